"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.training.image_bandits import Data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    num_seeds: int = 10

    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Of the gates that are given one."""
    prices: tuple[float, ...] = (0.0, 0.1, 0.5)
    temperatures: tuple[float, ...] = (0.1, 1.0)
    """Of the Bernoulli gate."""
    random_rates: tuple[float, ...] = (0.03, 0.1)
    """Of the control that keeps rows at random."""
    window: int = 16
    """Steps the rolling price looks back."""

    images: Data = "mnist"
    image_width: int = 100
    image_batch: int = 100
    image_steps: int = 10_000
    image_learning_rate: float = 1e-3
    image_target: float = 0.05
    """Test error to reach."""

    length: int = 10
    num_tokens: int = 2
    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    ff_width: int = 256
    num_prompts: int = 10
    num_answers: int = 10
    reversal_steps: int = 3000
    reversal_learning_rate: float = 1e-4
    reversal_target: float = 0.05
    """Online error to reach."""
    reversal_precision: str = "high"
    """Of float32 products: "high" lets a GPU use TF32."""

    log_points: int = 60
    """Logged steps evenly spaced in their logarithm; linear ones come on top."""
    linear_points: int = 40


SMALL = Settings(
    num_seeds=2,
    rates=(0.1,),
    prices=(0.0,),
    temperatures=(1.0,),
    random_rates=(0.1,),
    images="digits",
    image_width=32,
    image_steps=120,
    image_learning_rate=3e-3,
    image_target=0.3,
    length=3,
    width=16,
    num_layers=1,
    ff_width=32,
    reversal_steps=80,
    reversal_learning_rate=3e-3,
    reversal_target=0.3,
    log_points=10,
    linear_points=10,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds)
