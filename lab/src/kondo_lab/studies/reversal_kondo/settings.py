"""What the study runs: Figures 8 and 10 of the Kondo paper, and what grows with the vocabulary."""

import dataclasses

from kondo_lab.studies.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    learning_rate: float = 1e-4
    rate: float = 0.03
    num_steps: int = 10_000
    """1M forward passes."""
    length: int = 10
    """H of Figure 8, and of the vocabulary sweep."""
    num_seeds: int = 10
    """Of Figure 8."""
    sweep_seeds: int = 3
    """Of Figure 10, the vocabularies and what was tried."""
    baseline_lengths: tuple[int, ...] = (12, 15, 18, 21)
    """H tried with PG, PPO and PMPO in Figure 10."""
    delight_lengths: tuple[int, ...] = (18, 21, 24, 27, 30, 33)
    """H tried with DG and DG-K in Figure 10."""
    short_baseline_lengths: tuple[int, ...] = (6, 9)
    """Shorter H for PG, PPO and PMPO: those solved early in training."""
    short_delight_lengths: tuple[int, ...] = (12, 15)
    """Shorter H for DG and DG-K."""
    slow_learning_rate: float = 3e-5
    """Tried in Figure 10, since the paper does not state its own."""
    slow_lengths: tuple[int, ...] = (9, 15, 21, 27)
    slow_seeds: int = 2
    vocabularies: tuple[int, ...] = (4, 8, 16)
    vocabulary_steps: int = 5_000
    preferred: tuple[float, ...] = (0.3, 0.5, 0.6, 0.8)
    """PMPO's alpha, tried with each beta."""
    betas: tuple[float, ...] = (0.0, 0.1, 0.3)
    tried_learning_rates: tuple[float, ...] = (2e-4, 3e-4)
    """Of the gate at `rate`."""
    tried_steps: int = 2_000
    precision: str = "high"
    """Of float32 products on a GPU: TF32."""


SMALL = Settings(
    learning_rate=1e-3,
    num_steps=60,
    length=4,
    num_seeds=2,
    sweep_seeds=1,
    baseline_lengths=(2, 3),
    delight_lengths=(2, 4),
    short_baseline_lengths=(1,),
    short_delight_lengths=(3,),
    slow_learning_rate=3e-4,
    slow_lengths=(2, 4),
    slow_seeds=1,
    vocabularies=(2, 3),
    vocabulary_steps=60,
    preferred=(0.5,),
    betas=(0.1,),
    tried_learning_rates=(2e-3,),
    tried_steps=40,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    return sized(
        size, Settings(), SMALL, num_seeds=num_seeds, sweep_seeds=num_seeds, slow_seeds=num_seeds
    )
