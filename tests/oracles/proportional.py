"""Chances in proportion to values, capped at 1: bisection on the price, plain numbers."""

import math


def chances(values, count):
    """p = min(1, value / price) with sum(p) = count; values >= 0, at most as many as are > 0."""
    return _at(values, _price(values, lambda p: sum(p) >= count))


def count_of_noise(values, noise):
    """The fewest units for which sum(s^2 / p) <= noise * sum(s^2)."""
    allowed = noise * sum(s * s for s in values) * (1 + 1e-9)

    def quiet(p):
        return sum(s * s / q for s, q in zip(values, p, strict=True) if s) <= allowed

    return math.ceil(sum(_at(values, _price(values, quiet))) - 1e-6)


def _at(values, price):
    return [min(1.0, s / price) for s in values]


def _price(values, enough):
    """The highest price at which the chances are `enough`."""
    low, high = 0.0, 1e6 * max(values)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(_at(values, middle)) else (low, middle)
    return high
