"""Live display of a run: a table on a terminal, a line every few seconds anywhere else."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kondo.actors.driver import Observer, Status
from kondo.actors.processes import Summary

LINE_SECONDS = 5.0
"""Between two plain lines."""
_REFRESH_SECONDS = 0.2
_MAX_EVENTS = 4
# Enough steps to smooth over, whatever their pace.
_STEPS = 50


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Observer]:
    """Give an observer for `run` that shows what it sees."""
    recent: deque[Status] = deque(maxlen=_STEPS)
    events: deque[str] = deque(maxlen=_MAX_EVENTS)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    last = 0.0

    def show(status: Status) -> None:
        nonlocal last
        recent.append(status)
        for event in status.events:
            who = "learner" if event.who < 0 else f"actor {event.who}"
            events.append(escape(f"{event.kind}: {who}, {event.detail}"))
        for actor, reason, detail in status.report.quarantined:
            events.append(escape(f"quarantined: actor {actor}, {reason}: {detail}"))
        now = time.monotonic()
        pause = _REFRESH_SECONDS if live else LINE_SECONDS
        if now - last < pause and status.report.step != status.num_steps:
            return
        last = now
        if live is None:
            text = "  ".join(f"{name} {value}" for name, value in _numbers(recent).items())
            console.print(escape(text), highlight=False, soft_wrap=True)
            while events:
                console.print(f"  {events.popleft()}", highlight=False)
            return
        title = escape(status.setup)
        table = Table(title=title, show_header=False, box=None, title_justify="left")
        for key, value in _numbers(recent).items():
            table.add_row(key, value)
        for text in events:
            table.add_row("", text)
        live.update(table, refresh=True)

    with live or contextlib.nullcontext():
        yield show


def _numbers(recent: Sequence[Status]) -> dict[str, str]:
    """Return what is shown of the last steps, in words."""
    now, first = recent[-1], recent[0]
    reports = [status.report for status in recent]
    produced = sum(report.produced for report in reports)
    trained = sum(report.trained for report in reports)
    accepted = trained + sum(report.skipped for report in reports)
    sent = sum(report.wire_bytes for report in reports)
    full = sum(report.full_bytes for report in reports)
    spent = max(now.seconds - first.seconds, 1e-9)
    pace = (produced - first.report.produced) / spent if len(reports) > 1 else 0.0
    counts = now.report.counts
    return {
        "step": f"{now.report.step:,} of {now.num_steps:,}",
        "error": f"{_mean([report.error for report in reports]):.1%}",
        "samples/s": f"{pace:,.0f}",
        "staleness": f"{_mean([report.staleness for report in reports]):.1f}",
        "price": f"{now.report.price.price:.4g}",
        "kept": f"{trained / accepted:.2%}" if accepted else "-",
        "sent": f"{_bytes(sent)}, {sent / full:.2%} of all" if full else "-",
        "quarantined": f"{counts['quarantined']:,}",
        "lost": f"{counts['lost']:,}",
        "actors": f"{sum(pid > 0 for pid in now.pids)} of {len(now.pids)}",
    }


def closing(summary: Summary) -> list[str]:
    """Return the lines to print at the end."""
    counts = summary.counts
    outcomes = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in list(counts)[1:])
    spent = summary.busy_seconds + summary.idle_seconds
    lines = [
        f"{summary.step:,} steps. {counts['produced']:,} samples produced = {outcomes}"
        + ("." if summary.balanced else ": THE ACCOUNTS DO NOT BALANCE."),
        f"sent {_bytes(summary.wire_bytes)} of {_bytes(summary.full_bytes)} "
        f"({summary.wire_bytes / max(1, summary.full_bytes):.2%}); learner idle "
        f"{summary.idle_seconds / max(spent, 1e-9):.1%} of {spent:.1f} s.",
    ]
    if summary.quarantined:
        by = ", ".join(f"{reason} {count:,}" for reason, count in summary.quarantined.items())
        lines.append(f"quarantined by reason: {by}.")
    if summary.held_out_error is not None:
        lines.append(f"held-out error {summary.held_out_error:.2%}.")
    return lines


def _mean(values: list[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
