"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    seeds: int = 30
    gap: float = 0.5
    """Delta: how much less than 1 the worse arms pay on average."""
    batch: int = 100
    """Rewards drawn per step."""
    steps: int = 1000
    learning_rate: float = 0.02
    """Of Adam, on the logits."""
    tail: float = 0.1
    """Share of the steps at the end whose mean is the final number."""

    luck_probs: tuple[float, ...] = (0.5, 0.9, 0.99)
    luck_samples: int = 20_000

    ratios: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
    """sigma / Delta of the sweeps."""
    few_ratios: tuple[float, ...] = (0.0, 1.0, 3.0, 10.0, 30.0)
    """sigma / Delta where there are many series."""
    prices: tuple[float, ...] = (0.0, 0.1, 0.5)
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    many_arms: int = 10
    gamblers: tuple[int, ...] = (1, 5, 9)
    """How many of the many arms are noisy; the other worse arms pay 1 - Delta exactly."""
    learning_rates: tuple[float, ...] = (0.005, 0.05)
    """Of Adam, to see how much hangs on it."""
    penalty: float = 1.0
    """What a landmine's reward is lower by than that of the other worse arms, on average."""
    bug: float = 0.1
    """Share of the actions that a broken actor replaces by the landmine."""
    sampler_noises: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    """Standard deviation of the Gaussian noise on the sampler's logits."""
    sgd_rate: float = 0.2
    """Learning rate of plain SGD, for the same reason."""


SMALL = Settings(
    seeds=4,
    steps=60,
    learning_rate=0.2,
    luck_samples=2000,
    ratios=(0.0, 1.0, 10.0),
    few_ratios=(0.0, 10.0),
    learning_rates=(0.05,),
    sampler_noises=(0.0, 1.0),
)


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, seeds=seeds)
