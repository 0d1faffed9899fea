"""A gate on a task as a point: what it pays and what it reaches."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.frontier.compared_gates import Line

ONLINE, TEST = "online error", "test error"


class Task(NamedTuple):
    """One panel: whose records, which error counts, and how far it must fall."""

    part: str
    metric: str
    target: float

    @property
    def label(self) -> str:
        """The quality to reach."""
        return f"{100 * self.target:g}% {self.metric}"


class Point(NamedTuple):
    """A gate on a task."""

    line: Line
    error: Estimate
    """At the end, of the task's metric."""
    backward: float
    """Backward passes of the whole run, mean over seeds."""
    reach: statistics.Reach

    def cost(self, ratio: float) -> float:
        """Return forward + c backward to the target, in forward passes; NaN if none got there."""
        paid = self.reach.mean
        return paid.forward + ratio * paid.backward


def front(points: Sequence[Point]) -> list[Point]:
    """Return those that no other beats in backward passes and error, the cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.backward, point.error.mean)):
        if not best or point.error.mean < best[-1].error.mean:
            best.append(point)
    return best


def measure(records: pd.DataFrame, task: Task, line: Line) -> Point:
    """Return what a gate paid and reached."""
    chosen = statistics.curve(records, task.part, line.series, task.metric)
    return Point(
        line,
        statistics.final(records, task.part, line.series, task.metric),
        float(chosen["backward"].iloc[-1]),
        statistics.first_reach(records, task.part, line.series, task.metric, task.target),
    )
