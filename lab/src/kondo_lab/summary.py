"""Finished runs -> numbers: curves and one row per method. Reads records, never live policies."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kondo_lab.train import StepRecord

# Errors are means over this share of a run's steps: the last ones, or those before a point.
WINDOW_SHARE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What is left of a run once it is over."""

    task: str
    method: str
    dense: bool
    seed: int
    records: Sequence[StepRecord]
    test_error: float | None


class CurvePoint(NamedTuple):
    """Where a run stood after some steps. Totals since its start."""

    samples: int
    backward_passes: int
    error: float
    """Mean over the window before this point."""
    sampling_seconds: float
    learner_seconds: float


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    standard_error: float
    """NaN for a single seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. Counts and seconds are of one seed's run, averaged over seeds."""

    task: str
    method: str
    dense: bool
    num_seeds: int
    num_steps: int
    error: Estimate
    """Online: 1 - mean reward over the last steps."""
    test_error: Estimate | None
    samples: float
    backward_passes: float
    seconds: dict[str, float]
    """sampling, gate, forward, backward, optimiser."""
    speed_up: float
    """Learner seconds (gate + forward + backward) of the baseline over this method's."""
    loop_speed_up: float
    """The same with sampling and optimiser counted in."""

    @property
    def learner_seconds(self) -> float:
        """Gate + forward + backward."""
        return self.seconds["gate"] + self.seconds["forward"] + self.seconds["backward"]


def trim(results: Sequence[RunResult]) -> list[RunResult]:
    """Cut the runs of each task to the steps that all of them made: equal samples for each."""
    common: dict[str, int] = {}
    for result in results:
        made = len(result.records)
        common[result.task] = min(common.get(result.task, made), made)
    return [
        dataclasses.replace(result, records=result.records[: common[result.task]])
        for result in results
        if common[result.task]
    ]


def window(num_steps: int) -> int:
    """Return how many steps an error is averaged over."""
    return max(1, round(WINDOW_SHARE * num_steps))


def curve(records: Sequence[StepRecord], *, num_points: int = 100) -> list[CurvePoint]:
    """Return evenly spaced points of one run, the last step included."""
    num_points = min(num_points, len(records))
    ends = {len(records) * (point + 1) // num_points for point in range(num_points)}
    width = window(len(records))
    points = []
    samples = backward = 0
    sampling = learner = 0.0
    for step, record in enumerate(records, start=1):
        samples += record.samples
        backward += record.backward_passes
        sampling += record.sampling
        learner += record.learner_seconds
        if step in ends:
            recent = [r.error for r in records[max(0, step - width) : step]]
            error = statistics.fmean(recent)
            points.append(CurvePoint(samples, backward, error, sampling, learner))
    return points


def summarise(results: Sequence[RunResult], *, baseline: str = "PG") -> list[Row]:
    """Return one row per task and method, in the order they come; speed-ups against `baseline`."""
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.task, result.method), []).append(result)
    rows = []
    for (task, _), group in groups.items():
        spent, reference = _seconds(group), _seconds(groups[task, baseline])
        tests = [r.test_error for r in group if r.test_error is not None]
        rows.append(
            Row(
                task=task,
                method=group[0].method,
                dense=group[0].dense,
                num_seeds=len(group),
                num_steps=len(group[0].records),
                error=estimate([_final_error(r.records) for r in group]),
                test_error=estimate(tests) if tests else None,
                samples=_mean_total(group, "samples"),
                backward_passes=_mean_total(group, "backward_passes"),
                seconds=spent,
                speed_up=_learner(reference) / _learner(spent),
                loop_speed_up=sum(reference.values()) / sum(spent.values()),
            )
        )
    return rows


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its standard error."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan)
    return Estimate(mean, statistics.stdev(values) / math.sqrt(len(values)))


def _final_error(records: Sequence[StepRecord]) -> float:
    return statistics.fmean(record.error for record in records[-window(len(records)) :])


def _seconds(group: Sequence[RunResult]) -> dict[str, float]:
    stages = ("sampling", "gate", "forward", "backward", "optimiser")
    return {stage: _mean_total(group, stage) for stage in stages}


def _learner(seconds: dict[str, float]) -> float:
    return seconds["gate"] + seconds["forward"] + seconds["backward"]


def _mean_total(group: Sequence[RunResult], field: str) -> float:
    return statistics.fmean(
        math.fsum(getattr(record, field) for record in result.records) for result in group
    )
