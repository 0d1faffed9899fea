"""Progress on the screen: live bars on a terminal, plain lines anywhere else."""

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

# Of a log file or a pipe: the table fits.
PLAIN_WIDTH = 100

# A log file gets this many lines, whatever the number of rounds.
NUM_LINES = 10


def make_console() -> Console:
    """Return a console on standard output, wide enough for the table where width is our choice."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII log gets "?" for "±", not a traceback
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


class Status(NamedTuple):
    """Where one method stands on one task."""

    task: str
    method: str
    error: float
    """Mean over the recent steps."""
    backward_passes: int
    """Paid so far."""


def merge(statuses: Sequence[Status]) -> list[Status]:
    """Return one status per task and method: the mean error, the sum of backward passes."""
    groups: dict[tuple[str, str], list[Status]] = {}
    for status in statuses:
        groups.setdefault((status.task, status.method), []).append(status)
    return [
        Status(
            task,
            method,
            error=sum(status.error for status in group) / len(group),
            backward_passes=sum(status.backward_passes for status in group),
        )
        for (task, method), group in groups.items()
    ]


Update = Callable[[float, Sequence[Status]], None]
"""(share of all work done, one status per bar)"""


@contextmanager
def show(console: Console, labels: Sequence[tuple[str, str]]) -> Iterator[Update]:
    """Give a function to call with each change; `labels` are the (task, method) pairs shown."""
    started = time.monotonic()
    if not console.is_terminal:
        yield _lines(console, started)
        return
    bars = _bars(console)
    keys = {pair: bars.add_task("  ".join(pair), total=1.0, note="") for pair in labels}
    total = bars.add_task("[bold]all", total=1.0, note="")

    def update(share: float, statuses: Sequence[Status]) -> None:
        for status in statuses:
            note = f"error {100 * status.error:5.1f}%  backward passes {status.backward_passes:,}"
            bars.update(keys[status.task, status.method], completed=share, note=note)
        bars.update(total, completed=share, note=_clock(share, started))

    with bars:
        yield update


Work = Callable[[float, str, float, str], None]
"""(share of all work done, name of the piece at work, share of it done, note)"""


@contextmanager
def show_pieces(console: Console) -> Iterator[Work]:
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


def _lines(console: Console, started: float) -> Update:
    printed = 0

    def update(share: float, statuses: Sequence[Status]) -> None:
        nonlocal printed
        if int(share * NUM_LINES + 1e-9) <= printed:
            return
        printed = int(share * NUM_LINES + 1e-9)
        console.print(f"{share:4.0%}  {_clock(share, started)}", highlight=False)
        for task in dict.fromkeys(status.task for status in statuses):
            errors = [f"{s.method} {100 * s.error:.1f}%" for s in statuses if s.task == task]
            console.print(f"      {task}: error {', '.join(errors)}", highlight=False)

    return update


def _clock(share: float, started: float) -> str:
    spent = time.monotonic() - started
    left = spent / share - spent if share else 0.0
    return f"{spent:.0f} s, about {left:.0f} s left"
