"""Checkpoints of the learner: plain tensors and numbers in one file, replaced as a whole."""

import os
from pathlib import Path
from typing import Any

import torch

FILE = "checkpoint.pt"
FORMAT = 3


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the checkpoint. A process killed meanwhile leaves the one before."""
    partial = folder / f".{FILE}.partial"
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / FILE)


def load(folder: Path) -> dict[str, Any]:
    """Return what `save` wrote. Loads tensors and numbers only: a foreign file runs no code."""
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"no {FILE} in {folder}; start without resume.")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} must have format {FORMAT}, got {state.get('format')}; it was written by "
            f"another version."
        )
    return state
