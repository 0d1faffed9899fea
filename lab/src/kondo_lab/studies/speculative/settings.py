"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.models.networks import Initialisation
from kondo_lab.training.image_bandits import Data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    num_seeds: int = 10
    rates: tuple[float, ...] = (0.03, 0.1)

    noises: tuple[float, ...] = (0.3, 1.0, 3.0)
    """Standard deviations of the noise on the logits."""
    periods: tuple[int, ...] = (10, 100, 1000)
    """Steps between two copies of the policy."""
    bits: tuple[int, ...] = (8, 4, 3, 2)
    widths: tuple[int, ...] = (8, 16, 32)
    """Hidden units of the narrower network, in both its layers."""

    images: Data = "mnist"
    width: int = 100
    batch: int = 100
    initialisation: Initialisation = "lecun normal"
    """Presumably the author's: it is the default of JAX's libraries."""
    num_steps: int = 10_000
    learning_rate: float = 1e-3
    target: float = 0.05
    """Test error to reach."""

    log_points: int = 60
    """Logged steps evenly spaced in their logarithm; linear ones come on top."""
    linear_points: int = 40


SMALL = Settings(
    num_seeds=2,
    rates=(0.1,),
    noises=(1.0,),
    periods=(10, 50),
    bits=(8, 2),
    widths=(8,),
    images="digits",
    width=32,
    num_steps=120,
    learning_rate=3e-3,
    target=0.3,
    log_points=10,
    linear_points=10,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds)
