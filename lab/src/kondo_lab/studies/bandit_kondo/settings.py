"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    seeds: int = 30
    baseline: float = 0.5
    """b of U = R - b."""

    moment_probs: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 0.5, 0.9)
    moment_arms: tuple[int, ...] = (10, 100)
    moment_samples: int = 200_000
    """Samples a seed draws to estimate moments."""

    cosine_probs: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    cosine_arms: int = 10
    cosine_seeds: int = 100
    """More than elsewhere: 1 - cos varies by half from seed to seed."""
    cosine_samples: int = 2**16
    """Samples of the longest mean gradient."""
    cosine_target: float = 0.95

    success_probs: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 0.5)
    success_batches: int = 2000
    miss: float = 0.05
    """delta: how often a batch of log(1 / delta) / p samples may lack a success."""

    ranking_probs: tuple[float, ...] = (0.5, 0.9, 0.99)
    ranking_arms: tuple[int, ...] = (2, 10, 100, 1000)
    ranking_samples: int = 2000
    ranking_seeds: int = 10
    ranking_halvings: int = 40

    gate_delights: tuple[float, ...] = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)
    gate_prices: tuple[float, ...] = (0.0, 0.5)
    gate_etas: tuple[float, ...] = (0.001, 0.1, 1.0, 10.0, 1000.0)
    """The first and the last stand for the limits."""
    gate_grid: int = 20_000
    """Weights tried in [0, 1], to find the best by enumeration."""
    gate_draws: int = 20_000
    """Samples of each delight that a gate draws from."""


SMALL = Settings(
    seeds=8,
    moment_samples=20_000,
    cosine_seeds=8,
    cosine_samples=2**13,
    success_batches=100,
    ranking_seeds=2,
    gate_draws=2000,
)


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, seeds=seeds, cosine_seeds=seeds)
