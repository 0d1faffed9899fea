"""How often each pair has the lowest score if the seeds are drawn anew, with replacement.

A resample draws the seeds of every figure once, for all methods, and for all pairs with as many
seeds: these are paired, since a seed has the same prompts everywhere. A figure of one seed has no
spread, so its part of the score is taken as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

RESAMPLES = 1000

Key = TypeVar("Key")
Resampled = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Figure -> ours [n, R], the paper's [n]."""


class Number(Protocol):
    """A number of the paper, and ours by seed."""

    @property
    def figure(self) -> str:
        """Its figure: two readings of one share their seeds."""

    @property
    def expected(self) -> float:
        """The paper's."""

    @property
    def by_seed(self) -> Mapping[int, float]:
        """Ours."""


def shares_won(
    numbers: Mapping[Key, Mapping[str, Sequence[Number]]],
    total: Callable[[Resampled], np.ndarray],
) -> dict[Key, float]:
    """Return the share of resamples in which each key has the lowest total score.

    Args:
        numbers: key -> figure -> its numbers. A figure has the same seeds for all keys that have
            equally many of them.
        total: from the resampled numbers of a key to its score [R].
    """
    draws: dict[tuple[str, int], np.ndarray] = {}
    generator = np.random.default_rng(0)
    found = []
    for figures in numbers.values():
        resampled = {}
        for figure, own in figures.items():
            ours = [_resampled(each, draws, generator) for each in own]
            resampled[figure] = (np.array(ours), np.array([each.expected for each in own]))
        found.append(total(resampled))
    best = np.argmin(np.stack(found), axis=0)
    return {key: float((best == place).mean()) for place, key in enumerate(numbers)}


def _resampled(
    number: Number,
    draws: dict[tuple[str, int], np.ndarray],
    generator: np.random.Generator,
) -> np.ndarray:
    """Return the mean [R] of a number over the drawn seeds of its figure."""
    values = np.array([value for _, value in sorted(number.by_seed.items())])
    place = (number.figure, len(values))
    if place not in draws:
        draws[place] = generator.integers(len(values), size=(RESAMPLES, len(values)))
    return np.asarray(values[draws[place]].mean(axis=1))
