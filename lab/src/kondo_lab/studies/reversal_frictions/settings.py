"""What the study runs: each friction at several strengths, then all of them by length."""

import dataclasses

from kondo_lab.evidence.study import Size, sized
from kondo_lab.studies import reversals
from kondo_lab.training.member import Frictions

ALL = Frictions(delay=100, uniform_delay=True, bug=0.1, corruption=0.1, discovery=0.01)
"""A middle strength of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    length: int = 10
    num_tokens: int = 2
    feed_forward: int = reversals.FEED_FORWARD
    learning_rate: float = reversals.LEARNING_RATE
    num_steps: int = 10_000
    """1M answers."""
    rate: float = 0.03
    """Of DG-K."""
    cap: float = 10.0
    """Of the importance weight of an answer."""
    num_seeds: int = 10
    seeds_per_part: int = 5
    """So many seeds make a part: a run that is stopped has the same seeds everywhere."""
    rewards: tuple[str, ...] = ("prefix", "bag")
    """Names of `run.REWARDS`, in the order they are run."""

    delays: tuple[int, ...] = (30, 100, 300)
    """The actors' parameters are 0 to so many learner steps old, drawn at every step."""
    bugs: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    """Shares of rows replaced by zeros."""
    corruptions: tuple[float, ...] = (0.03, 0.1, 0.3)
    """Shares of rewards replaced by a fair coin."""
    discoveries: tuple[float, ...] = (0.001, 0.01, 0.1)
    """Shares of rows replaced by the right answer."""

    together: Frictions = ALL
    lengths: tuple[int, ...] = (4, 6, 8, 10, 12)
    """H with all frictions together; `length` must be among them."""
    targets: tuple[float, ...] = (0.1, 0.25)
    """Errors to which the samples are counted."""
    long_lengths: tuple[int, ...] = (14, 19, 25)
    """Longer H, for the longest that is solved."""
    long_seeds: int = 3
    """Of the longer H: the least that a claim may rest on."""

    why_bug: float = 0.1
    why_seeds: int = 5
    why_steps: int = 4_000
    why_etas: tuple[float, ...] = (0.1, 0.3, 3.0)
    """Temperatures of DG beside 1."""
    why_rates: tuple[float, ...] = (0.1, 0.3)
    """Of DG-K beside `rate`."""

    test_prompts: int = 500
    """Fresh prompts that the learner answers at each look."""
    looks: int = 20
    """So often, evenly spaced; with all frictions together also at times spaced by logarithm."""
    precision: str = "high"
    """Of products on a GPU: 10 bits of mantissa, TF32 or float16 in fused kernels."""


SMALL = Settings(
    length=2,
    feed_forward=16,
    learning_rate=1e-3,
    num_steps=6,
    num_seeds=1,
    delays=(10,),
    bugs=(0.1,),
    corruptions=(0.1,),
    discoveries=(0.01,),
    lengths=(1, 2, 3),
    targets=(0.5,),
    long_lengths=(4,),
    long_seeds=1,
    why_bug=0.3,
    why_seeds=1,
    why_steps=6,
    why_etas=(0.1,),
    why_rates=(0.3,),
    test_prompts=50,
    looks=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    return sized(
        size, Settings(), SMALL, num_seeds=num_seeds, long_seeds=num_seeds, why_seeds=num_seeds
    )
