"""Checkpoints of the learner: plain tensors and numbers in one file, replaced as a whole."""

from pathlib import Path
from typing import Any

from kondo.run_files import DamagedFileError, load_state, save_state, set_aside

FILE = "checkpoint.pt"
FORMAT = 4


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the checkpoint, with checksums. A process killed meanwhile leaves the one before."""
    save_state(folder / FILE, {"format": FORMAT, **state})


def load(folder: Path) -> dict[str, Any]:
    """Return what `save` wrote. Loads tensors and numbers only: a foreign file runs no code.

    Raises:
        DamagedFileError: a checksum is wrong. The file is renamed, so that it is not loaded again.
        ValueError: there is no checkpoint, or one of another version.
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"no {FILE} in {folder}; start without resume.")
    try:
        state = load_state(path)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{error} It was set aside as {set_aside(path).name}; put a good copy in its place to "
            "resume, or start anew without resume."
        ) from error
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} must have format {FORMAT}, got {state.get('format')}; it was written by "
            f"another version."
        )
    return state
