"""Records -> the numbers that tables and figures ask for, by place."""

import math

import pandas as pd
from torch import Tensor

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import run, theory
from kondo_lab.studies.contamination.run import IS, PG, at, dg
from kondo_lab.studies.contamination.settings import Settings
from kondo_lab.studies.contamination.theory import Source


class Numbers:
    """What was recorded, by place, for these settings."""

    def __init__(self, records: pd.DataFrame, settings: Settings):
        self.records, self.settings = records, settings
        self.series = [PG, IS, *(dg(eta) for eta in settings.etas)]
        self.where = at("one arm", settings.share)
        self.last = settings.errors[-1]
        # There is one seed of what was summed exactly.
        own = records[records["part"] != "sampled"]
        deltas = own["setting"].map("{:.6g}".format)
        places = zip(own["part"], own["series"], own["metric"], deltas, strict=True)
        self._exact: dict[tuple[str, ...], float] = dict(
            zip(places, own["value"].tolist(), strict=True)
        )
        self.worlds = sorted(set(own[own["part"] == "worlds"]["series"]))

    def exact(self, part: str, series: str, metric: str, error: float) -> float:
        """Return a number that was summed exactly, at delta = error."""
        return self._exact[part, series, metric, f"{error:.6g}"]

    def expected(self, series: str, metric: str, error: float) -> float:
        """Return a number of the mean gradient, all contamination on one arm."""
        return self.exact("expected", series, f"{metric}, {self.where}", error)

    def over_pg(self, series: str, metric: str, error: float) -> float:
        """Return the same over PG's."""
        return self.expected(series, metric, error) / self.expected(PG, metric, error)

    def slope(self, series: str) -> float:
        """Return d log / d log delta of signal over contamination at the best policies.

        Of PG itself, or of a method over PG.
        """
        value = self.expected if series == PG else self.over_pg
        low, high = self.last, self.settings.errors[-3]
        below, above = (value(series, run.STRENGTH, error) for error in (low, high))
        return math.log(above / below) / math.log(high / low)

    def world(self, series: str, metric: str) -> float:
        """Return a number of one of the two worlds."""
        return self.exact("worlds", series, metric, self.settings.rare_error)

    def context(self, series: str, metric: str, share: float, error: float) -> float:
        """Return a number of many contexts, that share of them solved."""
        return self.exact("contexts", series, f"{metric}, {share:g} solved", error)

    def sampled(self, series: str, metric: str, kind: str, error: float) -> Estimate:
        """Return the mean over seeds of what was sampled."""
        where = f"{metric}, {at(kind, self.settings.share)}"
        return statistics.final(self.records, "sampled", series, where, setting=error)

    def moment_ratio(self, eta: float, error: float) -> Estimate:
        """Return the sampled second moment of failures, DG over PG."""
        metric = f"{run.MOMENT}, {self.where}"
        own, pg = (
            statistics.select(self.records, "sampled", name, metric, setting=error)
            for name in (dg(eta), PG)
        )
        ratios = own.set_index("seed")["value"] / pg.set_index("seed")["value"]
        return statistics.estimate(ratios.tolist())

    def drawn(self, error: float, kind: Source) -> tuple[Tensor, Tensor]:
        """Return pi and mu, [K] each."""
        probs = bandit.peaked(1 - error, self.settings.arms)
        nu = theory.source(kind, self.settings.arms)
        return probs, theory.mixture(probs, nu, self.settings.share)

    def over_errors(self, series: str, metric: str, part: str = "expected") -> list[float]:
        """Return a number that was summed exactly at every delta."""
        return [self.exact(part, series, metric, error) for error in self.settings.errors]

    def overlap(self, eta: float, error: float) -> float:
        """Return the factor that bounds the second moment of failures."""
        arms = self.settings.arms
        return theory.overlap(bandit.peaked(1 - error, arms), theory.source("one arm", arms), eta)
