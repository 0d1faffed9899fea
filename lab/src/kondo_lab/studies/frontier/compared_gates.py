"""The gates that are compared: one line of the frontier each."""

import math
from typing import NamedTuple

from kondo_lab.population.member import Member, Update
from kondo_lab.studies.frontier.settings import Settings

DG_K = "DG-K"
"""The papers' gate: everything from the batch's quantile upwards, ties included."""


class Line(NamedTuple):
    """One way to update, as the figures name it."""

    series: str
    family: str
    """Lines of one family differ in their rate or price alone."""
    rate: float
    """Share of rows kept: 1 where all are, NaN where a price decides."""
    update: Update

    @property
    def setting(self) -> float:
        """The rate, or the price."""
        return self.update.price if math.isnan(self.rate) else self.rate


def lines(settings: Settings) -> list[Line]:
    """Return every gate of the study."""
    found = [
        Line("PG", "PG", 1.0, Update()),
        Line("DG", "DG", 1.0, Update(gate="soft")),
    ]
    for rate in settings.rates:
        found += [
            _rated(DG_K, rate, Update(gate="quantile", rate=rate)),
            _rated("top", rate, Update(gate="top", rate=rate)),
            _rated("rolling", rate, Update(gate="rolling", rate=rate, window=settings.window)),
        ]
        found += [
            _rated(f"draw, eta {eta:g},", rate, Update(gate="draw", rate=rate, temperature=eta))
            for eta in settings.temperatures
        ]
    found += [
        Line(f"price {price:g}", "price", math.nan, Update(gate="price", price=price))
        for price in settings.prices
    ]
    found += [
        _rated("random", rate, Update(gate="top", rate=rate, priority="uniform"))
        for rate in settings.random_rates
    ]
    return found


def members(settings: Settings, *, learning_rate: float) -> list[Member]:
    """Return every gate with every seed."""
    return [
        Member(
            series=line.series,
            seed=seed,
            learning_rate=learning_rate,
            update=line.update,
            setting=line.setting,
        )
        for line in lines(settings)
        for seed in range(settings.num_seeds)
    ]


def _rated(family: str, rate: float, update: Update) -> Line:
    return Line(f"{family} {100 * rate:g}%", family.rstrip(","), rate, update)
