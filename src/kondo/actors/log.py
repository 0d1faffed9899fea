"""The log of a run: one JSON object a line, for people and for a run that goes on."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kondo.run_files import DamagedFileError, WriteError

FILE = "log.jsonl"

Write = Callable[[dict[str, Any]], None]


@contextmanager
def opened(home: Path) -> Iterator[Write]:
    """Give a function that appends a line; NaN and infinity, which JSON has not, become null.

    A last line that was left unfinished is cut off: the next one must not be joined to half of one.

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
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

        def write(line: dict[str, Any]) -> None:
            broken = {k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
            plain = line | dict.fromkeys(broken)
            rest = (json.dumps(plain, allow_nan=False) + "\n").encode()
            try:
                while rest:  # a disk that fills up takes a part of it, and then fails
                    rest = rest[file.write(rest) :]
            except OSError as error:
                raise WriteError.of(path, error) from error

        yield write


def lines(home: Path) -> list[dict[str, Any]]:
    """Return the log, without a last line that a killed driver or a full disk left unfinished.

    Raises:
        DamagedFileError: another line is not a JSON object.
    """
    path = home / FILE
    if not path.exists():
        return []
    made = []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, text in enumerate(texts, 1):
        try:
            found = json.loads(text or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DamagedFileError(
                f"{path} is damaged: line {number} is not a JSON object. Delete that line, then "
                f"resume."
            )
        made += [found] if text else []
    return made


def last_issued(home: Path) -> tuple[int, int]:
    """Return how many orders and processes the log knows: their numbers must not be used again."""
    steps = [line for line in lines(home) if "issued" in line]
    orders = max((line["issued"] for line in steps), default=0)
    return orders, max((line["incarnations"] for line in steps), default=0)


def last_step(home: Path) -> int:
    """Return the step of the last line that has one: where the run before was; 0 without any."""
    return next((line["step"] for line in reversed(lines(home)) if "step" in line), 0)
