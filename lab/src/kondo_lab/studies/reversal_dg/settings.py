"""What the study runs: Figures 8 and 9 of the DG paper, and the variants of its appendix."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.studies import reversals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    feed_forward: int = reversals.FEED_FORWARD
    learning_rate: float = reversals.LEARNING_RATE
    length: int = 10
    """H of Figure 8, of the vocabulary sweep and of the variants."""
    curve_steps: int = 1_000
    num_seeds: int = 30
    """Of Figure 8."""
    num_steps: int = 10_000
    """Of Figure 9."""
    sweep_seeds: int = 10
    """Of Figure 9, run in blocks."""
    lengths: tuple[int, ...] = (10, 50)
    vocabularies: tuple[int, ...] = (10, 20, 30, 50)
    variant_steps: int = 2_000
    variant_seeds: int = 5
    precision: str = "high"
    """Of products on a GPU: 10 bits of mantissa, TF32 or float16 in fused kernels."""


SMALL = Settings(
    feed_forward=16,
    learning_rate=1e-3,
    length=3,
    curve_steps=50,
    num_seeds=2,
    num_steps=20,
    sweep_seeds=4,
    lengths=(2, 4),
    vocabularies=(2, 3),
    variant_steps=10,
    variant_seeds=1,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    names = ("num_seeds", "sweep_seeds", "variant_seeds")
    return sized(size, Settings(), SMALL, **dict.fromkeys(names, num_seeds))
