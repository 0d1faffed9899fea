"""What the study runs: each friction at three strengths, then all of them by length."""

import dataclasses

from kondo_lab.population.member import Frictions
from kondo_lab.studies.study import Size, sized

ALL = Frictions(delay=100, uniform_delay=True, bug=0.1, corruption=0.1, discovery=0.01)
"""The middle strength of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    length: int = 10
    num_tokens: int = 2
    learning_rate: float = 1e-4
    num_steps: int = 4_000
    """0.4M answers."""
    rate: float = 0.03
    """Of DG-K."""
    cap: float = 10.0
    """Of the importance weight of an answer."""
    num_seeds: int = 3
    """Of each friction alone."""

    delays: tuple[int, ...] = (30, 100, 300)
    """The actors' parameters are 0 to so many learner steps old, drawn at every step."""
    bugs: tuple[float, ...] = (0.03, 0.1, 0.3)
    """Shares of rows replaced by zeros."""
    corruptions: tuple[float, ...] = (0.03, 0.1, 0.3)
    """Shares of rewards replaced by a fair coin."""
    discoveries: tuple[float, ...] = (0.001, 0.01, 0.1)
    """Shares of rows replaced by the right answer."""

    together: Frictions = ALL
    lengths: tuple[int, ...] = (4, 7, 10, 14, 19, 25)
    """H with all frictions together; `length` must be among them."""
    length_seeds: int = 2
    """Of all frictions together; `num_seeds` at `length`."""
    test_prompts: int = 500
    """Fresh prompts that the learner answers at each look."""
    looks: int = 20
    """So often, evenly spaced."""
    precision: str = "high"
    """Of float32 products on a GPU: TF32."""


SMALL = Settings(
    length=2,
    learning_rate=1e-3,
    num_steps=16,
    num_seeds=1,
    delays=(10,),
    bugs=(0.1,),
    corruptions=(0.1,),
    discoveries=(0.01,),
    lengths=(1, 2),
    length_seeds=1,
    test_prompts=50,
    looks=4,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds, length_seeds=num_seeds)
