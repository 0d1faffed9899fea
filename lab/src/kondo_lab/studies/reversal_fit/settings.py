"""What the study runs: every pair of a width and a learning rate, on five figures."""

import dataclasses
import itertools
from typing import NamedTuple

from kondo_lab.evidence.study import Size, sized


class Pair(NamedTuple):
    """A model that is tried."""

    feed_forward: int
    learning_rate: float

    @property
    def name(self) -> str:
        """As in the names of series."""
        return f"ff {self.feed_forward}, lr {self.learning_rate:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    feed_forwards: tuple[int, ...] = (64, 128, 256)
    learning_rates: tuple[float, ...] = (1e-4, 2e-4, 3e-4)
    rate: float = 0.03
    """Of the gate."""
    length: int = 10
    """H of the learning curves and of the vocabularies."""
    prefix_steps: int = 2_500
    prefix_seeds: int = 10
    """Of Kondo Figure 8, where the correct prefix is paid. A seed of PG or PMPO learns or does not,
    so a mean over few says little."""
    token_steps: int = 1_000
    token_seeds: int = 6
    """Of DG Figure 8, where every correct token is paid."""
    sweep_steps: int = 10_000
    sweep_seeds: int = 1
    """Of DG Figure 9."""
    vocabularies: tuple[int, ...] = (30, 50)
    """M of DG Figure 9b."""
    longest: int = 50
    """H of DG Figure 9a."""
    solved_steps: int = 5_000
    solved_seeds: int = 1
    """Of Kondo Figure 10, to 500k forward passes."""
    baseline_lengths: tuple[int, ...] = (6, 12, 18)
    """H of PG in Kondo Figure 10."""
    delight_lengths: tuple[int, ...] = (12, 18, 24)
    """H of DG and DG-K there."""
    finalists: tuple[Pair, ...] = (Pair(256, 1e-4), Pair(256, 2e-4))
    """Pairs that are ahead after the first seeds of Figures 9 and 10: these get more."""
    final_seeds: int = 3
    """Of the finalists there, the first seeds included: the least that a claim may rest on."""
    precision: str = "high"
    """Of products on a GPU: 10 bits of mantissa, TF32 or float16 in fused kernels."""

    @property
    def pairs(self) -> list[Pair]:
        """All that are tried."""
        made = itertools.product(self.feed_forwards, self.learning_rates)
        return [Pair(*each) for each in made]


SMALL = Settings(
    feed_forwards=(8, 16),
    learning_rates=(1e-3, 2e-3),
    length=2,
    prefix_steps=110,
    prefix_seeds=1,
    token_steps=100,
    token_seeds=1,
    sweep_steps=2,
    vocabularies=(30,),
    solved_steps=10,
    baseline_lengths=(2,),
    delight_lengths=(2, 3),
    finalists=(Pair(8, 1e-3),),
    final_seeds=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every part."""
    names = ("prefix_seeds", "token_seeds", "sweep_seeds", "solved_seeds")
    return sized(size, Settings(), SMALL, **dict.fromkeys(names, num_seeds))
