"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results. The single bandit's are those of DG Fig 5, the table's of
    DG Fig 6."""

    seeds: int = 100
    """Of the single bandit."""
    arms: int = 100
    batch: int = 100
    baseline: float = 0.5
    eta: float = 1.0
    step_length: float = 0.1
    """Of every update in logit space: gradients are normalised."""
    single_steps: int = 150

    gap_errors: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 0.5, 0.9)
    """epsilon = 1 - p at which Proposition 1 is measured."""
    gap_batches: int = 200
    """Batches a seed draws at each."""
    gap_pooled: int = 100
    """So many of them also make one large batch: Proposition 1's ratio is a limit."""

    table_seeds: int = 30
    contexts: int = 100
    table_arms: int = 10
    table_steps: int = 1000
    table_etas: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
    """Temperatures tried in the table; the paper's is 1."""

    search_etas: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 1.0, 2.0, 5.0)
    search_contexts: tuple[int, ...] = (2, 3, 10)
    search_populations: int = 100_000
    """Sets of contexts a seed draws for each eta and number of contexts."""
    search_seeds: int = 10


SMALL = Settings(
    seeds=20,
    gap_batches=20,
    gap_pooled=10,
    table_seeds=3,
    table_steps=300,
    search_populations=2000,
    search_seeds=3,
)


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, seeds=seeds)
