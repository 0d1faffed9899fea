"""The gates that are compared: one line of the frontier each."""

import math
from typing import NamedTuple

from kondo import Gate, signals
from kondo_lab.studies.frontier.settings import Settings
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member, each_seed

DG_K = "DG-K"
"""The papers' gate: everything from the batch's quantile upwards, ties included."""


class Line(NamedTuple):
    """One way to update, as the figures name it."""

    series: str
    family: str
    """Lines of one family differ in their rate or price alone."""
    rate: float
    """Share of rows kept: 1 where all are, NaN where a price decides."""
    arm: Arm

    @property
    def setting(self) -> float:
        """The rate, or the price."""
        return self.price if math.isnan(self.rate) else self.rate

    @property
    def price(self) -> float:
        """The price, where one decides."""
        gate = self.arm.gate
        assert isinstance(gate, Gate)
        assert gate.price is not None
        return gate.price


def lines(settings: Settings) -> list[Line]:
    """Return every gate of the study."""
    found = [Line("PG", "PG", 1.0, arms.PG), Line("DG", "DG", 1.0, arms.DG)]
    for rate in settings.rates:
        found += [
            _rated(DG_K, rate, arms.kondo(rate)),
            _rated("top", rate, arms.kondo_count(rate)),
            _rated("rolling", rate, Arm(gate=Gate(rate=rate, window=settings.window))),
        ]
        found += [
            _rated(f"draw, eta {eta:g},", rate, Arm(gate=Gate(rate=rate, temperature=eta)))
            for eta in settings.temperatures
        ]
    found += [
        Line(f"price {price:g}", "price", math.nan, Arm(gate=Gate(price=price)))
        for price in settings.prices
    ]
    found += [
        _rated("random", rate, Arm(gate=Gate(rate=rate, signal=signals.uniform)))
        for rate in settings.random_rates
    ]
    return found


def members(settings: Settings, *, learning_rate: float) -> list[Member]:
    """Return every gate with every seed."""
    found = []
    for line in lines(settings):
        options = {"learning_rate": learning_rate, "setting": line.setting}
        found += each_seed({line.series: line.arm}, settings.num_seeds, **options)
    return found


def _rated(family: str, rate: float, arm: Arm) -> Line:
    return Line(f"{family} {100 * rate:g}%", family.rstrip(","), rate, arm)
