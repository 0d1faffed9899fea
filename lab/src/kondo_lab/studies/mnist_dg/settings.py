"""What the study runs: Figures 2, 3 and 4 of the DG paper, and the sweeps of its appendix."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.models.networks import Initialisation
from kondo_lab.training.image_bandits import Data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    data: Data = "mnist"
    width: int = 100
    batch: int = 100
    initialisation: Initialisation = "lecun normal"
    """Presumably the author's: it is the default of JAX's libraries."""
    learning_rate: float = 1e-3
    num_steps: int = 10_000
    samples: tuple[int, ...] = (1, 3, 10, 30, 100)
    """Actions per image, S."""
    num_seeds: int = 30
    """Of every setting with S = 1."""
    sweep_seeds: int = 20
    """Of every setting with S > 1."""
    log_every: int = 100
    num_probes: int = 20
    """How often the cosines of Figure 4 are measured."""
    probe_batches: int = 8
    """Of which a cosine is the mean; a single batch of 100 images tells little."""
    learning_rates: tuple[float, ...] = (1e-5, 1e-4, 3e-4, 3e-3, 1e-2)
    """Of the appendix, like all that follows. What the main runs have is not run again."""
    etas: tuple[float, ...] = (0.1, 0.3, 3.0, 10.0)
    batches: tuple[int, ...] = (1, 3, 10, 30, 300, 1000)
    widths: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    appendix_seeds: int = 5


SMALL = Settings(
    data="digits",
    width=32,
    num_steps=300,
    samples=(1, 10),
    num_seeds=2,
    sweep_seeds=2,
    log_every=50,
    num_probes=3,
    probe_batches=2,
    learning_rates=(1e-4,),
    etas=(0.3,),
    batches=(1, 30),
    widths=(4, 64),
    appendix_seeds=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every S."""
    seeds = dict.fromkeys(("num_seeds", "sweep_seeds", "appendix_seeds"), num_seeds)
    return sized(size, Settings(), SMALL, **seeds)
