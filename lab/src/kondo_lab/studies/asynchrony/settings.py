"""What the study runs: crews that are late in several ways, and every method with each."""

import dataclasses

from kondo_lab.evidence.study import Size, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crew:
    """Rollout processes on Ray, and what makes them late."""

    name: str
    """Lower-case letters, digits and hyphens: it names a part."""
    pauses: tuple[float, ...]
    """Seconds each actor waits in every rollout; their number is that of the actors."""
    queue: int = 2
    """Rollouts an actor may have ordered but not yet trained on."""
    publish_every: int = 1
    """Updates from one published version of the weights to the next."""


FRESH = Crew(name="fresh", pauses=(0.0,), queue=1)
BUSY = Crew(name="busy", pauses=(0.0, 0.0))
SLOW = Crew(name="slow", pauses=(0.01, 0.06, 0.06))
RARE = Crew(name="rare", pauses=(0.0, 0.0), publish_every=20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results, but for the machine's own timing."""

    width: int = 64
    batch: int = 100
    learning_rate: float = 1e-3
    num_steps: int = 400
    rate: float = 0.03
    """Of DG-K."""
    crews: tuple[Crew, ...] = (FRESH, SLOW, RARE)
    num_seeds: int = 4
    windows: int = 10
    """Of online error, from the first step to the last."""


SMALL = Settings(width=32, num_steps=60, crews=(BUSY,), num_seeds=1, windows=3)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for every way of running."""
    return sized(size, Settings(), SMALL, num_seeds=num_seeds)
