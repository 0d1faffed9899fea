"""What every command shares: exit statuses, errors in one line, and numbers of options."""

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

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


class CommandError(ValueError):
    """A command cannot do what was asked; the message is one line that says what to do."""


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
