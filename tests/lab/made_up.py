"""Made-up runs for tests of analyses, told number by number."""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence import records
from kondo_lab.training.record import PLACE, Log, Run


class Record(NamedTuple):
    """A line of the table that analyses read."""

    part: str
    series: str
    setting: float
    seed: int
    step: int
    forward: int
    backward: int
    metric: str
    value: float


def runs_of(lines: Iterable[Record]) -> list[Run]:
    """Return the runs that lines of the table are told of."""
    logs: dict[str, Log] = {}
    for line in lines:
        log = logs.setdefault(line.part, Log(line.part))
        place = {"step": line.step, "rollouts": line.forward, "passes": line.backward}
        log.add(line.series, line.seed, {line.metric: line.value}, x=line.setting, **place)
    return [run for log in logs.values() for run in log.runs()]


def table_of(made: Iterable[Record | Run], *, part: str) -> pd.DataFrame:
    """Return lines, or runs, of a part as the table that analyses read."""
    given = list(made)
    lines = [each for each in given if isinstance(each, Record)]
    runs = [each for each in given if isinstance(each, Run)]
    return records.table(records.checked([*runs_of(lines), *runs], part=part))


def lines_of(runs: Iterable[Run]) -> list[Record]:
    """Return a line for each number of runs, step by step."""
    found = [
        Record(run.part, run.arm, run.x, run.seed, *(row[name] for name in PLACE), metric, value)
        for run in runs
        for row in run.curve
        for metric, value in row.items()
        if metric not in PLACE
    ]
    return sorted(found, key=lambda line: line.step)
