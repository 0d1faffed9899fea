"""Exit statuses, errors in one line, numbers of options and output, for every command."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
else:
    Commands: TypeAlias = argparse._SubParsersAction

FAILED = 1
"""Exit status after an error that the message explains. Wrong usage has 2, as argparse gives it."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
CLOSED_PIPE = 141
"""Exit status where the reader of a pipe left before the end, as shells have it for SIGPIPE."""
WIDTHS = range(60, 1001)
"""Values of COLUMNS that are followed."""


class CommandError(ValueError):
    """A command cannot do what was asked; the message is one line that says what to do."""


class OutputError(Exception):
    """Standard output cannot be written; the cause says why.

    No OSError: argparse would ignore it, and rich would end the process at a closed pipe.
    """


class CheckedOutput:
    """A stream whose failures are an `OutputError`."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text."""
        written: int = self._told(self._stream.write, text)
        return written

    def flush(self) -> None:
        """Write what is held back."""
        self._told(self._stream.flush)

    def _told(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            raise OutputError(f"cannot write standard output: {error.strerror}.") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fail(options: argparse.Namespace, message: str) -> int:
    """Print in one line why a command failed and return the exit status for that."""
    name = f"kondo {options.command}" if options.command else "kondo"
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


def whole(text: str, *, least: int, most: int | None = None) -> int:
    """Parse a whole number >= least, and <= most where there is a most.

    Example:
        >>> whole("7", least=1, most=10)
        7
    """
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
    return number


def forget_odd_columns() -> None:
    """Unset COLUMNS if it is no sensible width: lines of 0 or of 999,999,999 cells help nobody."""
    given = os.environ.get("COLUMNS", "")
    if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) in WIDTHS):
        os.environ.pop("COLUMNS", None)


def drop_output() -> None:
    """Send what is still to be written nowhere: Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
