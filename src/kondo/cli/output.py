"""Standard output that reports what it cannot write, and a width of it that makes sense."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

WIDTHS = range(60, 1001)
"""Values of COLUMNS that are followed."""


class OutputError(Exception):
    """Standard output cannot be written; the cause says why.

    No OSError: argparse would ignore it, and rich would end the process at a closed pipe.
    """


class _Checked:
    """A stream whose failures are an `OutputError`."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write standard output: {error.strerror}.") from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Have standard output raise an `OutputError` where it cannot be written."""
    stream = sys.stdout
    sys.stdout = cast(TextIO, _Checked(stream))
    try:
        yield
    finally:
        sys.stdout = stream


def drop_output() -> None:
    """Send what is still to be written nowhere: Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def forget_odd_columns() -> None:
    """Unset COLUMNS if it is no sensible width: lines of 0 or of 999,999,999 cells help nobody."""
    given = os.environ.get("COLUMNS", "")
    if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) in WIDTHS):
        os.environ.pop("COLUMNS", None)
