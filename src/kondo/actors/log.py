"""The log of a run: one JSON object a line, for people and for a run that goes on."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kondo.actors.learner import StepOrder, StepReport
from kondo.run_files import DamagedFileError, WriteError

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
    """Give a function that appends a line. A last line that was left unfinished is dropped.

    Raises:
        WriteError: a line cannot be written, as on a full disk.
    """
    path = home / FILE
    try:
        # Without a buffer: what is written must outlive a killed driver.
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise WriteError.of(path, error) from error
    with file:
        _drop_torn_line(path)

        def write(line: dict[str, Any]) -> None:
            plain = {key: _plain(value) for key, value in line.items()}
            rest = (json.dumps(plain, allow_nan=False) + "\n").encode()
            try:
                while rest:  # a disk that fills up takes a part of it, and then fails
                    rest = rest[file.write(rest) :]
            except OSError as error:
                raise WriteError.of(path, error) from error

        yield write


def _drop_torn_line(path: Path) -> None:
    """Cut the file after its last whole line: the next one must not be joined to half of one."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def lines(home: Path) -> list[dict[str, Any]]:
    """Return the log, without a last line that a killed driver or a full disk left unfinished.

    Raises:
        DamagedFileError: another line is not a JSON object.
    """
    path = home / FILE
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [_line(path, number, text) for number, text in enumerate(texts, 1) if text]


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DamagedFileError(
            f"{path} is damaged: line {number} is not a JSON object. Delete that line, then resume."
        )
    return found


def last_issued(home: Path) -> Issued:
    """Return the highest numbers in the log."""
    steps = [line for line in lines(home) if "issued" in line]
    return Issued(
        max((line["issued"] for line in steps), default=0),
        max((line["incarnations"] for line in steps), default=0),
    )


def last_step(home: Path) -> int:
    """Return the step of the last line that has one: where the run before was; 0 without any."""
    return next((line["step"] for line in reversed(lines(home)) if "step" in line), 0)


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
