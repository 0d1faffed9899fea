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
_FOLDERS = {"kondo": ".", "kondo-lab": "lab"}
"""Where a distribution is in a checkout."""


def install_command(requirement: str) -> str:
    """Return the command that installs `kondo-lab`, or `kondo` or `kondo-lab` with an extra.

    Args:
        requirement: such as "kondo-lab" or "kondo[ray]".
    """
    name, bracket, extra = requirement.partition("[")
    place = _place(name)
    found = requirement if place is None else _shown(place) + bracket + extra
    return f"pip install {shlex.quote(found)}"


def _place(name: str) -> Path | None:
    """Return the folder or wheel of a distribution on this machine; None if there is none."""
    source = _source()
    if source is not None and source.suffix == ".whl":
        wheels = sorted(source.parent.glob(f"{name.replace('-', '_')}-*.whl"))
        if wheels:
            return wheels[-1]
    for root in (source, _HERE.parents[3]):
        folder = None if root is None else root / _FOLDERS[name]
        if folder is not None and (folder / "pyproject.toml").is_file():
            return folder
    return None


def _source() -> Path | None:
    """Return the folder or file that `kondo` was installed from; None if it was an index."""
    try:
        text = distribution("kondo").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    address = urlparse(json.loads(text)["url"]) if text else None
    if address is None or address.scheme != "file":
        return None
    return Path(unquote(address.path))


def _shown(path: Path) -> str:
    """Return the path from the working folder if it is inside, with a dot that pip needs."""
    place, here = path.resolve(), Path.cwd().resolve()
    if not place.is_relative_to(here):
        return str(place)
    inside = place.relative_to(here)
    return f".{os.sep}{inside}" if inside.parts else "."
