"""Records of fields -> runs: each seed's reward by what it had cost, and when it met a target.

    rollouts                 completions sampled
    tokens differentiated    of a training forward, prompts included
    learner seconds          everything after the reward
    loop seconds             everything

Only runs by the clock have seconds.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Estimate
from kondo_lab.training.tuning import LAST, QUALITY

ROLLOUTS, TOKENS = "rollouts", "tokens differentiated"
LEARNER, LOOP = "learner seconds", "loop seconds"
ROWS = "rows differentiated"


class Run(NamedTuple):
    """One seed of one series."""

    series: str
    seed: int
    steps: np.ndarray
    """Evaluated ones, from 0."""
    reward: np.ndarray
    """At these steps."""
    costs: dict[str, np.ndarray]
    """Axis -> what had been paid at these steps; an axis that was not measured is missing."""

    @property
    def end(self) -> float:
        """The reward at the end: the mean of the last evaluations."""
        return float(self.reward[self.steps > 0][-LAST:].mean())


class Reach(NamedTuple):
    """When each seed first reached a target."""

    times: dict[int, float]
    """By seed; infinite where it never did."""
    ends: dict[int, float]
    """By seed: what the whole run had cost."""

    def of(self, seeds: Collection[int]) -> "Reach":
        """Return the same of some seeds."""
        return Reach(*({seed: own[seed] for seed in sorted(seeds)} for own in self))

    @property
    def seeds(self) -> int:
        """All there are."""
        return len(self.times)

    @property
    def reached(self) -> int:
        """How many got there."""
        return sum(math.isfinite(time) for time in self.times.values())

    @property
    def mean(self) -> Estimate:
        """Over all seeds."""
        return estimate(self.paid)

    @property
    def paid(self) -> list[float]:
        """Of every seed. One that never got there counts with its whole run: at least that."""
        return [min(self.times[seed], self.ends[seed]) for seed in self.times]


Bound = Literal["", "at least", "at most", "unknown"]


class SpeedUp(NamedTuple):
    """How many times less one series pays than another."""

    value: float
    se: float
    bound: Bound
    """Of a ratio that seeds which never reached the target are part of."""

    def __str__(self) -> str:
        if self.bound == "unknown":
            return "unknown size (seeds of both never got there)"
        if math.isnan(self.value):
            return "unknown size (nothing had been paid, or no seed is of both)"
        # Of equal costs only rounding is left.
        error = "" if math.isnan(self.se) else f" ± {self.se if self.se > 1e-9 else 0:.2g}"
        return f"{self.bound} {self.value:.2f}x{error}".strip()


def grid_runs(records: pd.DataFrame, parts: Iterable[str]) -> dict[str, list[Run]]:
    """Return the runs of populations of some parts, by series; they have no seconds."""
    return _runs(records, parts, lambda table: {})


def clock_runs(records: pd.DataFrame, parts: Iterable[str]) -> dict[str, list[Run]]:
    """Return the runs by the clock of some parts, by series."""

    def costs(table: pd.DataFrame) -> dict[str, np.ndarray]:
        columns = {LEARNER: "seconds learner", LOOP: "seconds loop"}
        return {axis: table[column].fillna(0.0).to_numpy() for axis, column in columns.items()}

    return _runs(records, parts, costs)


def _runs(
    records: pd.DataFrame,
    parts: Iterable[str],
    costs: Callable[[pd.DataFrame], dict[str, np.ndarray]],
) -> dict[str, list[Run]]:
    """Return the runs of some parts; `costs` are seconds, of a run's table by step."""
    columns = {ROLLOUTS: "forward", ROWS: "backward", TOKENS: TOKENS}
    found: dict[str, list[Run]] = {}
    own = records[records["part"].isin(list(parts))]
    for (series, seed), logged in own.groupby(["series", "seed"], sort=False):
        table = logged.pivot_table(index="step", columns="metric", values="value")
        table[["forward", "backward"]] = logged.groupby("step")[["forward", "backward"]].first()
        table = table[table[QUALITY].notna()].sort_index()
        # Before the first step nothing has been counted yet.
        paid = {axis: table[name].fillna(0.0).to_numpy(float) for axis, name in columns.items()}
        paid |= costs(table)
        one = Run(str(series), int(seed), table.index.to_numpy(), table[QUALITY].to_numpy(), paid)
        found.setdefault(str(series), []).append(one)
    return found


def time_to(run: Run, target: float, axis: str) -> float:
    """Return what a run had paid when its reward first met the target; infinite if it never did.

    Between two evaluations the reward is taken to grow linearly with what is paid.
    """
    above = np.flatnonzero(run.reward >= target)
    if not len(above):
        return math.inf
    place, paid = int(above[0]), run.costs[axis]
    if place == 0:
        return float(paid[0])
    low, high = run.reward[place - 1], run.reward[place]
    share = (target - low) / (high - low)
    return float(paid[place - 1] + share * (paid[place] - paid[place - 1]))


def reach(runs: Sequence[Run], target: float, axis: str) -> Reach:
    """Return when the seeds of a series reached a target."""
    return Reach(
        {own.seed: time_to(own, target, axis) for own in runs},
        {own.seed: float(own.costs[axis][-1]) for own in runs},
    )


def speed_up(baseline: Reach, own: Reach) -> SpeedUp:
    """Return baseline / own, of means over the seeds that both have.

    Starts differ from seed to seed, and of a run that was cut short some series have fewer. Seeds
    that never got there make it a bound. Those of a seed share start and prompts, so the standard
    error is that of a ratio of paired numbers, r = mean(a) / mean(b):

        se(r) = standard error of (a - r b) / mean(b)
    """
    both = baseline.times.keys() & own.times.keys()
    if not both:
        return SpeedUp(math.nan, math.nan, "")
    baseline, own = baseline.of(both), own.of(both)
    slow, fast = baseline.paid, own.paid
    paid = estimate(fast).mean
    value = estimate(slow).mean / paid if paid > 0 else math.nan
    apart = [mine - value * theirs for mine, theirs in zip(slow, fast, strict=True)]
    se = estimate(apart).se / paid if paid > 0 else math.nan
    late, missed = baseline.reached < baseline.seeds, own.reached < own.seeds
    bound: Bound = "unknown" if late and missed else ""
    if late != missed:
        bound = "at least" if late else "at most"
    return SpeedUp(value, se, bound)


def end_rewards(runs: Sequence[Run]) -> Estimate:
    """Return the reward at the end, over seeds."""
    return estimate([own.end for own in runs])
