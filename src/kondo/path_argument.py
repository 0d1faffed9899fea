"""Paths of a command line."""

import argparse
from pathlib import Path


def given_path(text: str) -> Path:
    """Return a path. An empty one, as of an unset shell variable, would be the current folder.

    Example:
        >>> given_path("runs/a").name
        'a'
    """
    if not text:
        raise argparse.ArgumentTypeError("must name a file or a folder, got an empty text")
    return Path(text)
