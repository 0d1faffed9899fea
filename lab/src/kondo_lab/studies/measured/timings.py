"""Percentiles over rounds of what was timed on a workload."""

import math
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.studies.measured.settings import Shape

P80_DEVIATIONS = 0.8416
"""Standard deviations between a normal's median and its 80th percentile."""


class Spread(NamedTuple):
    """Percentiles over rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int

    @property
    def se(self) -> float:
        """Of the median of a normal sample as wide: one slow round in twenty must not set it."""
        deviation = (self.p80 - self.p20) / (2 * P80_DEVIATIONS)
        return math.sqrt(math.pi / 2 / self.rounds) * deviation

    def times(self, factor: float) -> "Spread":
        """Return the percentiles of the metric times a constant."""
        return Spread(factor * self.p20, factor * self.p50, factor * self.p80, self.rounds)


def spread(records: pd.DataFrame, shape: Shape, series: str, metric: str) -> Spread:
    """Return the percentiles over rounds of a metric of a workload."""
    values = statistics.select(records, shape.name, series, metric)["value"]
    p20, p50, p80 = (float(values.quantile(share)) for share in (0.2, 0.5, 0.8))
    return Spread(p20, p50, p80, len(values))
