"""The log of a run: one JSON object a line, for people and for a run that goes on."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kondo.actors.learner import StepOrder, StepReport
from kondo.actors.processes import Summary

FILE = "log.jsonl"

Write = Callable[[dict[str, Any]], None]


class Issued(NamedTuple):
    """How far a run had come with numbers that must not be used twice."""

    orders: int
    incarnations: int


@contextmanager
def opened(home: Path) -> Iterator[Write]:
    """Give a function that appends a line."""
    with (home / FILE).open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            plain = {key: _plain(value) for key, value in line.items()}
            file.write(json.dumps(plain, allow_nan=False) + "\n")
            file.flush()  # what is written must outlive a killed driver

        yield write


def lines(home: Path) -> list[dict[str, Any]]:
    """Return the log; a last line that a killed driver left unfinished is left out."""
    path = home / FILE
    if not path.exists():
        return []
    whole = [text for text in path.read_text(encoding="utf-8").split("\n")[:-1] if text]
    return [json.loads(text) for text in whole]


def last_issued(home: Path) -> Issued:
    """Return the highest numbers the log tells of."""
    steps = [line for line in lines(home) if "issued" in line]
    return Issued(
        max((line["issued"] for line in steps), default=0),
        max((line["incarnations"] for line in steps), default=0),
    )


def step_line(
    order: StepOrder, report: StepReport, issued: Issued, seconds: float
) -> dict[str, Any]:
    """Return what the log says of a step."""
    return {
        "step": report.step,
        "seconds": round(seconds, 3),
        "error": report.error,
        "loss": report.loss,
        "produced": report.produced,
        "trained": report.trained,
        "skipped": report.skipped,
        "quarantined": [list(refused) for refused in report.quarantined],
        "staleness": report.staleness,
        "price": report.price.price,
        "wire_bytes": report.wire_bytes,
        "full_bytes": report.full_bytes,
        "orders": [one.number for one in order.orders],
        "lost": [list(lost) for lost in order.lost],
        "issued": issued.orders,
        "incarnations": issued.incarnations,
        "counts": report.counts,
    }


def summary_line(summary: Summary) -> dict[str, Any]:
    """Return what the log says at the end."""
    return {"event": "finished", **summary._asdict()}


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
