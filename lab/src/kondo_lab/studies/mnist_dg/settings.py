"""What the study runs: Figures 2, 3 and 4 of the DG paper."""

import dataclasses

from kondo_lab.studies.image_bandits import Data
from kondo_lab.studies.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    data: Data = "mnist"
    width: int = 100
    batch: int = 100
    learning_rate: float = 1e-3
    num_steps: int = 10_000
    samples: tuple[int, ...] = (1, 3, 10, 30, 100)
    """Actions per image, S."""
    num_seeds: int = 30
    """Of every setting with S = 1."""
    sweep_seeds: int = 10
    """Of every setting with S > 1."""
    log_every: int = 100
    num_probes: int = 20
    """How often the cosines of Figure 4 are measured."""


SMALL = Settings(
    data="digits",
    width=32,
    num_steps=300,
    samples=(1, 10),
    num_seeds=2,
    sweep_seeds=2,
    log_every=50,
    num_probes=3,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every S."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds, sweep_seeds=num_seeds)
