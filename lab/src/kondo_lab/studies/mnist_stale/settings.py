"""What the study runs: every method at every delay, the oldest parameters or any of them."""

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
    rate: float = 0.03
    """Of DG-K."""
    cap: float = 10.0
    """Of the capped importance weights."""
    delays: tuple[int, ...] = (0, 1, 3, 10, 30, 100, 300, 1000)
    """In learner steps; the actor always uses the oldest parameters."""
    uniform_delays: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000)
    """The same, but the age is drawn at every step, uniform on 0 .. delay."""
    num_seeds: int = 10
    """With the oldest parameters."""
    uniform_seeds: int = 5
    train_images: int = 10_000
    """On which the learner's error is measured."""


SMALL = Settings(
    data="digits",
    width=32,
    num_steps=160,
    delays=(0, 3, 30),
    uniform_delays=(30,),
    num_seeds=2,
    uniform_seeds=1,
    train_images=500,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part of the study."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds, uniform_seeds=num_seeds)
