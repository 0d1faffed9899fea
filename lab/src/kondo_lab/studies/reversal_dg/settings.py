"""What the study runs: Figures 8 and 9 of the DG paper."""

import dataclasses

from kondo_lab.studies.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    learning_rate: float = 1e-4
    length: int = 10
    """H of Figure 8, and of the vocabulary sweep."""
    curve_steps: int = 1_000
    num_seeds: int = 30
    """Of Figure 8."""
    num_steps: int = 10_000
    """Of Figure 9."""
    sweep_seeds: int = 2
    """Of Figure 9."""
    sweep_learning_rates: tuple[float, ...] = (1e-4, 3e-5)
    """Of Figure 9. The paper does not state it; the lower one was chosen by one seed at M = 50."""
    lengths: tuple[int, ...] = (10, 50)
    vocabularies: tuple[int, ...] = (10, 20, 30, 50)
    precision: str = "high"
    """Of float32 products on a GPU: TF32."""


SMALL = Settings(
    learning_rate=1e-3,
    length=4,
    curve_steps=60,
    num_seeds=2,
    num_steps=50,
    sweep_seeds=1,
    sweep_learning_rates=(1e-3, 3e-4),
    lengths=(2, 4),
    vocabularies=(2, 3),
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds, sweep_seeds=num_seeds)
