"""What the study runs: Figures 8 and 10 of the Kondo paper, and what grows with the vocabulary."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.studies import reversals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    feed_forward: int = reversals.FEED_FORWARD
    learning_rate: float = reversals.LEARNING_RATE
    solved_so_far: bool = reversals.SOLVED_SO_FAR
    """Which reading of Figure 10 is judged."""
    rate: float = 0.03
    num_steps: int = 10_000
    """1M forward passes."""
    length: int = 10
    """H of Figure 8, and of the vocabulary sweep."""
    num_seeds: int = 10
    """Of Figures 8 and 10, run in blocks."""
    baseline_lengths: tuple[int, ...] = (6, 12, 18, 24)
    """H tried with PG and PMPO in Figure 10."""
    delight_lengths: tuple[int, ...] = (12, 18, 24, 30, 36)
    """H tried with DG and DG-K in Figure 10."""
    vocabularies: tuple[int, ...] = (4, 8, 16)
    vocabulary_steps: int = 5_000
    vocabulary_seeds: int = 3
    precision: str = "high"
    """Of products on a GPU: 10 bits of mantissa, TF32 or float16 in fused kernels."""


SMALL = Settings(
    feed_forward=16,
    learning_rate=1e-3,
    num_steps=40,
    length=3,
    num_seeds=4,
    baseline_lengths=(1, 2),
    delight_lengths=(2, 3),
    vocabularies=(2, 3),
    vocabulary_steps=20,
    vocabulary_seeds=1,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds, vocabulary_seeds=num_seeds)
