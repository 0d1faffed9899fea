"""The sets of largest variance, by trying every set."""

import math


def variance(values):
    """Mean squared distance from the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)


def subsets(items, count):
    """Every list of `count` of the items."""
    if count == 0:
        yield []
    for place in range(len(items) - count + 1) if count else ():
        for rest in subsets(items[place + 1 :], count - 1):
            yield [items[place], *rest]


def wanted(rate, counts):
    """How many units a rate buys."""
    return max(1, round(rate * sum(counts)))


def best_sets(values, counts, rate):
    """Every set of units with the largest variance: [set], never one of zeros or of what is masked.

    `values`, `counts`: lists of floats and bools. As many as the rate buys, or all there are.
    """
    worth = [i for i, counted in enumerate(counts) if counted and values[i] != 0]
    count = min(wanted(rate, counts), len(worth))
    if count == 0:
        return [set()]
    return _largest(values, subsets(worth, count))


def best_sets_without_zeros_afterwards(values, counts, rate):
    """The same, but zeros may be chosen, and are dropped from the sets afterwards."""
    counted = [i for i, counted in enumerate(counts) if counted]
    count = min(wanted(rate, counts), len(counted))
    if count == 0:
        return [set()]
    sets = _largest(values, subsets(counted, count))
    return [{i for i in each if values[i] != 0} for each in sets]


def _largest(values, sets):
    found = [(variance([values[i] for i in each]), set(each)) for each in sets]
    largest = max(spread for spread, _ in found)
    return [each for spread, each in found if spread >= largest * (1 - 1e-9)]
