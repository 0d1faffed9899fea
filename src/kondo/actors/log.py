"""The log of a run: one JSON object a line, for people and for a run that goes on."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kondo.actors.learner import StepOrder, StepReport

FILE = "log.jsonl"

Write = Callable[[dict[str, Any]], None]

# Of a step's report, as they are; JSON writes tuples as lists.
_LOGGED = (
    *("step", "error", "loss", "produced", "trained", "skipped", "quarantined", "staleness"),
    *("wire_bytes", "full_bytes", "counts"),
)


class Issued(NamedTuple):
    """Numbers of a run that must not be used twice."""

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
    """Return the log, without a last line that a killed driver left unfinished."""
    path = home / FILE
    if not path.exists():
        return []
    whole = [text for text in path.read_text(encoding="utf-8").split("\n")[:-1] if text]
    return [json.loads(text) for text in whole]


def last_issued(home: Path) -> Issued:
    """Return the highest numbers in the log."""
    steps = [line for line in lines(home) if "issued" in line]
    return Issued(
        max((line["issued"] for line in steps), default=0),
        max((line["incarnations"] for line in steps), default=0),
    )


def step_line(
    order: StepOrder, report: StepReport, issued: Issued, seconds: float
) -> dict[str, Any]:
    """Return the log line of a step."""
    return {
        **{name: getattr(report, name) for name in _LOGGED},
        "seconds": round(seconds, 3),
        "price": report.price.price,
        "orders": [one.number for one in order.orders],
        "lost": order.lost,
        "issued": issued.orders,
        "incarnations": issued.incarnations,
    }


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
