"""How much noise, or weight of surprisal, an update bears until its error has grown by a factor.

Each seed is compared with its own error at the lowest level. A seed whose error never grows so far
counts with the highest level that was tried: a lower bound. What a bound cannot tell is noisy, and
so is every verdict of fewer than 3 seeds.
"""

import math
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.agreement import Rule, judge, judge_order
from kondo_lab.evidence.claims import LEAST_SEEDS
from kondo_lab.evidence.comparison import settings_of, tolerated
from kondo_lab.evidence.study import Estimate, Verdict


class Borne(NamedTuple):
    """The level at which the error has grown, over seeds."""

    estimate: Estimate
    """Lower bounds count with the highest level."""
    bounds: int
    """Seeds whose error never grows so far."""

    @property
    def shown(self) -> Estimate:
        """The estimate; infinite where no seed's error ever grows so far."""
        if self.bounds < self.estimate.seeds:
            return self.estimate
        return Estimate(math.inf, seeds=self.estimate.seeds)

    def judged(self, expected: float, rule: Rule) -> Verdict:
        """Return whether it agrees with a paper's, noisy where bounds or few seeds cannot tell."""
        verdict = judge(self.shown, expected, "paper", rule)
        # The truth is larger than a mean with bounds in it: it may reach what is expected, or miss
        # what the mean equals.
        short = verdict == "differs" and self.shown.mean < expected
        unsure = self.bounds and (short or (verdict == "matches" and rule == "equals"))
        return "noisy" if unsure or self.estimate.seeds < LEAST_SEEDS else verdict


def borne(records: pd.DataFrame, part: str, series: str, factor: float) -> Borne:
    """Return the level at which a series' error at the end exceeds factor x that of the lowest."""
    by_seed: dict[int, dict[float, Estimate]] = {}
    for level in settings_of(records, part, series):
        own = statistics.select(records, part, series, "online error", setting=level)
        last = own.loc[own.groupby("seed")["step"].idxmax()]
        for seed, value in zip(last["seed"], last["value"], strict=True):
            by_seed.setdefault(int(seed), {})[level] = Estimate(float(value))
    found = [tolerated(errors, factor) for errors in by_seed.values()]
    highest = max(level for errors in by_seed.values() for level in errors)
    return Borne(
        statistics.estimate([min(level, highest) for level in found]),
        sum(math.isinf(level) for level in found),
    )


def judge_less(low: Borne, high: Borne) -> Verdict:
    """Return whether `low` bears less than `high`."""
    if min(low.estimate.seeds, high.estimate.seeds) < LEAST_SEEDS:
        return "noisy"
    verdict = judge_order(["low", "high"], {"low": low.estimate, "high": high.estimate})
    # The truth of a bound is larger.
    unsure = (verdict == "matches" and low.bounds) or (verdict == "differs" and high.bounds)
    return "noisy" if unsure else verdict
