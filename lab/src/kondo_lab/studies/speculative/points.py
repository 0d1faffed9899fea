"""One screen at one rate: what it kept, what it reached, and what that cost."""

import math
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.statistics import Reach
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.speculative.drafts import Screen

AGREEMENT, ONLINE, TEST = "kept agreement", "online error", "test error"


class Point(NamedTuple):
    """Means over seeds."""

    screen: Screen
    rate: float
    agreement: Estimate
    """Over the whole training."""
    last_agreement: Estimate
    """Over the last logged interval."""
    online: Estimate
    test: Estimate
    reach: Reach
    """Of the target test error."""

    def cost(self, ratio: float) -> Estimate:
        """Return s F + (1 + c) B to the target, in forward passes, over the seeds that got there.

        NaN for a screen without a cost, infinite where no seed got there. A draft's forward cannot
        be differentiated: kept rows pay a forward and a backward.
        """
        own = self.screen.cost
        if math.isnan(own) or not self.reach.reached:
            return Estimate(math.nan if math.isnan(own) else math.inf, seeds=0)
        paid = self.reach.costs.values()
        return statistics.estimate([own * one.forward + (1 + ratio) * one.backward for one in paid])


def dense_cost(ratio: float, reach: Reach) -> Estimate:
    """Return (1 + c) F: without a screen every sample pays a forward and a backward."""
    return statistics.estimate([(1 + ratio) * paid.forward for paid in reach.costs.values()])


def measure(records: pd.DataFrame, part: str, screen: Screen, rate: float, target: float) -> Point:
    """Return the numbers of a screen at a rate."""
    place = (records, part, screen.series)
    return Point(
        screen,
        rate,
        _over_training(statistics.select(*place, AGREEMENT, setting=rate)),
        statistics.final(*place, AGREEMENT, setting=rate),
        statistics.final(*place, ONLINE, setting=rate),
        statistics.final(*place, TEST, setting=rate),
        statistics.first_reach(*place, TEST, target, setting=rate),
    )


def _over_training(chosen: pd.DataFrame) -> Estimate:
    """Return the mean over steps: each logged value counts with the steps it is the mean of."""
    means = []
    for _, own in chosen.sort_values("step").groupby("seed"):
        steps = own["step"].diff().fillna(own["step"])
        means.append(float((own["value"] * steps).sum() / steps.sum()))
    return statistics.estimate(means)
