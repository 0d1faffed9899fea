"""Progress on the screen: live bars on a terminal, plain lines anywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

# Of a log file or a pipe, unless COLUMNS says otherwise: the tables fit.
PLAIN_WIDTH = 100

# A log file gets this many lines, whatever the number of rounds.
NUM_LINES = 10


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; in a log or a pipe, wide enough for the tables.

    Args:
        stderr: print to standard error, since standard output is for a result that is read by
            a program.
    """
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # an ASCII log gets "?" for "±", no traceback
    console = Console(stderr=stderr)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(stderr=stderr, width=PLAIN_WIDTH)


Work = Callable[[float, str, float, str], None]
"""(share of all work done, name of the piece at work, share of it done, note)"""


@contextmanager
def show(console: Console) -> Iterator[Work]:
    """Give a function to call with each change, where pieces of work follow one another."""
    started = time.monotonic()
    if not console.is_terminal:
        yield _piece_lines(console, started)
        return
    bars = _bars(console)
    total = bars.add_task("[bold]all", total=1.0, note="")
    current = bars.add_task("", total=1.0, note="", visible=False)

    def update(share: float, name: str, done: float, note: str) -> None:
        bars.update(
            current, completed=done, visible=True, description=escape(name), note=escape(note)
        )
        bars.update(total, completed=share, note=_clock(share, started))

    with bars:
        yield update


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=18),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _piece_lines(console: Console, started: float) -> Work:
    printed = 0

    def update(share: float, name: str, done: float, note: str) -> None:
        nonlocal printed
        if int(share * NUM_LINES + 1e-9) > printed:
            printed = int(share * NUM_LINES + 1e-9)
            text = f"{share:4.0%}  {_clock(share, started)}  {name} {done:.0%} {note}"
            console.print(escape(text.rstrip()), highlight=False, soft_wrap=True)

    return update


def _clock(share: float, started: float) -> str:
    spent = time.monotonic() - started
    left = spent / share - spent if share else 0.0
    return f"{spent:.0f} s, about {left:.0f} s left"
