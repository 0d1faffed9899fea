"""Live display of a run: a table on a terminal, a line every few seconds anywhere else."""

import functools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

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


class _Meter:
    """Sums over the last steps."""

    def __init__(self) -> None:
        # Enough steps to smooth over, whatever their pace.
        self._recent: deque[Status] = deque(maxlen=50)
        self.events: deque[str] = deque(maxlen=_MAX_EVENTS)

    def add(self, status: Status) -> None:
        self._recent.append(status)
        for event in status.events:
            who = "learner" if event.who < 0 else f"actor {event.who}"
            self.events.append(f"{event.kind}: {who}, {event.detail}")
        for actor, reason, detail in status.report.quarantined:
            self.events.append(f"quarantined: actor {actor}, {reason}: {detail}")

    def numbers(self) -> dict[str, str]:
        """Return what is shown, in words."""
        now, first = self._recent[-1], self._recent[0]
        reports = [status.report for status in self._recent]
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


@contextmanager
def shown(console: Console) -> Iterator[Observer]:
    """Give an observer for `run` that shows what it sees."""
    meter, last = _Meter(), 0.0

    def show_every(seconds: float, show: Observer, status: Status) -> None:
        nonlocal last
        meter.add(status)
        now = time.monotonic()
        if now - last >= seconds or status.report.step == status.num_steps:
            last = now
            show(status)

    def line(status: Status) -> None:
        text = "  ".join(f"{name} {value}" for name, value in meter.numbers().items())
        console.print(escape(text), highlight=False, soft_wrap=True)
        while meter.events:
            console.print(escape(f"  {meter.events.popleft()}"), highlight=False)

    if not console.is_terminal:
        yield functools.partial(show_every, LINE_SECONDS, line)
        return
    with Live(console=console, auto_refresh=False) as live:

        def table(status: Status) -> None:
            live.update(_table(status.setup, meter), refresh=True)

        yield functools.partial(show_every, _REFRESH_SECONDS, table)


def _table(name: str, meter: _Meter) -> Table:
    table = Table(title=escape(name), show_header=False, box=None, title_justify="left")
    for key, value in meter.numbers().items():
        table.add_row(key, value)
    for event in meter.events:
        table.add_row("", escape(event))
    return table


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
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else float("nan")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
