"""Commands that install what is missing, from where this package was installed.

A package of an index is named; one of a checkout, or of a folder with wheels, has a path. pip wrote
down which of them it was in `direct_url.json`.
"""

import json
import os
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

_HERE = Path(__file__).resolve()
# Where a distribution is in a checkout.
_FOLDERS = {"kondo": ".", "kondo-lab": "lab"}


def install_command(requirement: str) -> str:
    """Return the command that installs `kondo-lab`, or `kondo` or `kondo-lab` with an extra.

    Args:
        requirement: such as "kondo-lab" or "kondo[ray]".
    """
    name, bracket, extra = requirement.partition("[")
    place = _place(name)
    if place is None:
        return f"pip install {shlex.quote(requirement)}"
    place, here = place.resolve(), Path.cwd().resolve()
    shown = str(place)
    if place.is_relative_to(here):  # with a dot that pip needs
        inside = place.relative_to(here)
        shown = f".{os.sep}{inside}" if inside.parts else "."
    return f"pip install {shlex.quote(shown + bracket + extra)}"


def _place(name: str) -> Path | None:
    """Return the folder or wheel of a distribution on this machine; None if there is none."""
    source = None  # the folder or file that `kondo` was installed from; None if it was an index
    try:
        text = distribution("kondo").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    if text and (address := urlparse(json.loads(text)["url"])).scheme == "file":
        source = Path(unquote(address.path))
    if source is not None and source.suffix == ".whl":
        wheels = sorted(source.parent.glob(f"{name.replace('-', '_')}-*.whl"))
        if wheels:
            return wheels[-1]
    for root in (source, _HERE.parents[3]):
        folder = None if root is None else root / _FOLDERS[name]
        if folder is not None and (folder / "pyproject.toml").is_file():
            return folder
    return None
