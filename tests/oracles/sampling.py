"""Draws with unequal probabilities, by bisection and by trying every order and every start."""

import math


def probabilities(worth, count, floor=0.0):
    """p = min(1, max(floor, s / t)) of positive s, 0 of others, with t such that they sum to count.

    `worth`: a list of floats. t by bisection in logarithms.
    """
    positive = [each for each in worth if each > 0]
    if not positive:
        return [0.0] * len(worth)
    low, high = math.log(min(positive)) - 50, math.log(max(positive)) + 50
    for _ in range(300):
        middle = (low + high) / 2
        if math.fsum(at_price(worth, math.exp(middle), floor)) > count:
            low = middle
        else:
            high = middle
    return at_price(worth, math.exp(high), floor)


def at_price(worth, price, floor=0.0):
    """p of every unit at a price."""
    return [min(1.0, max(floor, each / price)) if each > 0 else 0.0 for each in worth]


def second_moment(worth, chances):
    """sum s^2 / p over sum s^2."""
    squares = [each**2 for each in worth if each > 0]
    drawn = [each**2 / chance for each, chance in zip(worth, chances, strict=True) if each > 0]
    return math.fsum(drawn) / math.fsum(squares)


def smallest_count(worth, noise, floor=0.0):
    """The fewest units whose second moment is at most `noise` times the dense one, by trying."""
    able = sum(each > 0 for each in worth)
    for count in range(1, able + 1):
        if count < floor * able:
            continue
        if second_moment(worth, probabilities(worth, count, floor)) <= noise * (1 + 1e-9):
            return count
    return able


def starts_of(chances, order):
    """The starts at which a systematic draw in this order changes: [(from, to)] over [0, 1)."""
    edges, end = {0.0, 1.0}, 0.0
    for place in order:
        if 0 < chances[place] < 1:
            end += chances[place]
            edges.add(math.ceil(end) - end)
    rising = sorted(edges)
    pairs = [(rising[i], rising[i + 1]) for i in range(len(rising) - 1)]
    return [(a, b) for a, b in pairs if b - a > 1e-12]
