"""Numbers out of records: means over seeds, curves, and what was paid until a quality was reached.

`records` is a table, as `kondo_lab.evidence.records.table` makes one of runs. Wherever a setting is
chosen, it may be left out if the series has only one.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from kondo_lab.evidence.study import Estimate, FrontierPoint

TOLERANCE = 0.1
"""How far, relatively, the nearest logged step may lie from the one asked for."""

_HUGE = 1e150
"""The square of a larger number is infinite."""

_PLACE = ["part", "series", "setting", "step", "metric"]


class RecordsError(ValueError):
    """There are no records of what is asked for."""


class Cost(NamedTuple):
    """What was paid: samples seen, and those a backward pass was paid for."""

    forward: float
    backward: float


class Reach(NamedTuple):
    """What each seed paid until a quality was reached."""

    costs: dict[int, Cost]
    """By seed; only those that reached it."""
    seeds: int
    """All there are."""

    @property
    def reached(self) -> int:
        """How many seeds got there."""
        return len(self.costs)

    @property
    def mean(self) -> Cost:
        """Over the seeds that reached it; NaN if none did."""
        if not self.costs:
            return Cost(math.nan, math.nan)
        forward, backward = zip(*self.costs.values(), strict=True)
        return Cost(float(np.mean(forward)), float(np.mean(backward)))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one number per seed, and its standard error: NaN if a seed diverged."""
    count = len(values)
    if not all(abs(value) < _HUGE for value in values):  # not of NaN either
        return Estimate(sum(values) / count, math.nan, count)
    mean = statistics.fmean(values)
    se = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(mean, se, count)


def ratio(top: Estimate, bottom: Estimate) -> Estimate:
    """Return a mean over another, with both standard errors; of the fewer seeds.

    Example:
        >>> from kondo_lab.evidence.statistics import Estimate, ratio
        >>> ratio(Estimate(0.5, 0.05, 10), Estimate(0.25, 0.0, 5))
        Estimate(mean=2.0, se=0.2, seeds=5)
    """
    value = top.mean / bottom.mean
    relative = math.hypot(top.se / top.mean, bottom.se / bottom.mean)  # NaN with a single seed
    return Estimate(value, abs(value) * relative, min(top.seeds, bottom.seeds))


def select(
    records: pd.DataFrame, part: str, series: str, metric: str, *, setting: float | None = None
) -> pd.DataFrame:
    """Return the records of one line of a figure.

    Raises:
        RecordsError: there are none, or `setting` is left out though the series has several.
    """
    # Rows are copied once, at the end: analyses select thousands of lines from one table.
    same = np.ones(len(records), dtype=bool)
    for column, name in (("part", part), ("series", series), ("metric", metric)):
        before, same = same, same & (records[column] == name).to_numpy()
        if not same.any():
            known = sorted(records[column][before].unique())
            raise RecordsError(f"{column} must be one of {known}, got {name!r}.")
    settings = sorted(records["setting"][same].unique())
    if setting is None:
        if len(settings) > 1:
            raise RecordsError(f"setting must be given for series {series!r}: one of {settings}.")
        return records[same]
    # Files hold 6 digits.
    same &= np.isclose(records["setting"], setting, rtol=1e-5, atol=0, equal_nan=True)
    if not same.any():
        raise RecordsError(
            f"setting must be one of {settings} for series {series!r}, got {setting}."
        )
    return records[same]


def at(
    records: pd.DataFrame,
    part: str,
    series: str,
    metric: str,
    step: float,
    *,
    setting: float | None = None,
    by: Literal["step", "forward", "backward"] = "step",
) -> Estimate:
    """Return the mean over seeds at `step`, or at that many forward passes with by="forward".

    Of each seed the nearest logged step counts.

    Raises:
        RecordsError: a seed has no logged step within 10%.
    """
    chosen = select(records, part, series, metric, setting=setting)
    chosen = chosen.sort_values([by, "step"])  # of two that are as near, the first
    values = []
    for seed, own in chosen.groupby("seed"):
        distance = (own[by] - step).abs()
        if distance.min() > TOLERANCE * abs(step):
            nearest = own[by][distance.idxmin()]
            raise RecordsError(
                f"{by} must lie within {TOLERANCE:.0%} of a logged one, got {step:g}; the nearest "
                f"of {series!r}, seed {seed}, is {nearest}."
            )
        values.append(float(own["value"][distance.idxmin()]))
    return estimate(values)


def final(
    records: pd.DataFrame, part: str, series: str, metric: str, *, setting: float | None = None
) -> Estimate:
    """Return the mean over seeds at the last logged step of each."""
    chosen = select(records, part, series, metric, setting=setting)
    last = chosen.sort_values("step").drop_duplicates("seed", keep="last").sort_values("seed")
    return estimate(last["value"].tolist())


def curve(
    records: pd.DataFrame, part: str, series: str, metric: str, *, setting: float | None = None
) -> pd.DataFrame:
    """Return one line of a figure, by step: columns step, mean, se, seeds, forward, backward."""
    line = over_seeds(select(records, part, series, metric, setting=setting)).sort_values("step")
    return line[["step", "mean", "se", "seeds", "forward", "backward"]].reset_index(drop=True)


def over_seeds(records: pd.DataFrame) -> pd.DataFrame:
    """Return mean and standard error over seeds, and mean passes, at every place, in order."""
    groups = records.groupby(_PLACE, sort=False, dropna=False)
    table = groups.agg(
        mean=("value", "mean"),
        se=("value", "sem"),
        seeds=("value", "size"),
        counted=("value", "count"),
        forward=("forward", "mean"),
        backward=("backward", "mean"),
    )
    # pandas leaves NaNs out of its means; a mean over the seeds that went well is not one.
    table.loc[table["counted"] < table["seeds"], ["mean", "se"]] = math.nan
    return table.drop(columns="counted").reset_index()


def first_reach(
    records: pd.DataFrame,
    part: str,
    series: str,
    metric: str,
    target: float,
    *,
    setting: float | None = None,
) -> Reach:
    """Return what each seed paid until its metric first fell to `target`.

    Between two logged points the logarithm of the metric is taken to fall linearly with the passes
    paid; the metric itself where one of the numbers is not above 0. A seed already there at its
    first logged point counts with that point.
    """
    chosen = select(records, part, series, metric, setting=setting)
    costs = {}
    seeds = 0
    for seed, own in chosen.sort_values("step").groupby("seed"):
        seeds += 1
        paid = own[["forward", "backward"]].to_numpy()
        cost = cost_to(target, own["value"].to_numpy(), paid)
        if cost is not None:
            costs[int(seed)] = cost
    return Reach(costs, seeds)


def cost_to(target: float, values: np.ndarray, paid: np.ndarray) -> Cost | None:
    """Return what was paid until `values` [n] first fell to a target; None if they never do.

    `paid` [n, 2] are forward and backward passes. Between two points as `first_reach` says.
    """
    below = np.flatnonzero(values <= target)
    return _crossing(values, paid, int(below[0]), target) if len(below) else None


def frontier_point(
    records: pd.DataFrame,
    part: str,
    series: str,
    metric: str,
    target: float,
    *,
    task: str,
    rate: float,
    setting: float | None = None,
) -> FrontierPoint:
    """Return what a series paid, on average over seeds, until an error fell to `target`."""
    reach = first_reach(records, part, series, metric, target, setting=setting)
    last = final(records, part, series, metric, setting=setting)
    name = f"{100 * target:g}% {metric}"
    return FrontierPoint(
        task, series, rate, name, *reach.mean, reach.reached, reach.seeds, last.mean
    )


def _crossing(values: np.ndarray, paid: np.ndarray, place: int, target: float) -> Cost:
    """Return the cost at which the line from the point before `place` to it meets the target."""
    if place == 0:
        return Cost(*map(float, paid[0]))
    ends = np.array([values[place - 1], values[place], target])
    above, below, level = np.log(ends) if (ends > 0).all() else ends
    share = (above - level) / (above - below)
    return Cost(*map(float, paid[place - 1] + share * (paid[place] - paid[place - 1])))


def speed_up(ratio: float, *, baseline: Cost, cost: Cost) -> float:
    """Return (F_baseline + c B_baseline) / (F + c B), where a backward costs c = ratio forwards.

    Example:
        >>> from kondo_lab.evidence.statistics import Cost, speed_up
        >>> speed_up(2, baseline=Cost(100, 100), cost=Cost(120, 15))
        2.0
    """
    return (baseline.forward + ratio * baseline.backward) / (cost.forward + ratio * cost.backward)
