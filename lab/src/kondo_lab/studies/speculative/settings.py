"""Sizes of the study."""

import dataclasses

from kondo_lab.studies.image_bandits import Data
from kondo_lab.studies.study import Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    num_seeds: int
    rates: tuple[float, ...]

    noises: tuple[float, ...]
    """Standard deviations of the noise on the logits."""
    periods: tuple[int, ...]
    """Steps between two copies of the policy."""
    bits: tuple[int, ...]
    widths: tuple[int, ...]
    """Hidden units of the narrower network, in both its layers."""

    images: Data
    width: int = 100
    batch: int = 100
    num_steps: int
    learning_rate: float = 1e-3
    target: float
    """Test error to reach."""

    log_points: int = 60
    """Logged steps evenly spaced in their logarithm; linear ones come on top."""
    linear_points: int = 40


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size."""
    if size == "small":
        return Settings(
            num_seeds=num_seeds or 2,
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
    return Settings(
        num_seeds=num_seeds or 10,
        rates=(0.03, 0.1),
        noises=(0.3, 1.0, 3.0),
        periods=(10, 100, 1000),
        bits=(8, 4, 3, 2),
        widths=(8, 16, 32),
        images="mnist",
        num_steps=10_000,
        target=0.05,
    )
