"""Fields where gates meet dense GRPO, the baseline of every speed-up, by the clock."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kondo_lab.evidence.runs import LEARNER, LOOP, Run, SpeedUp, reach, speed_up
from kondo_lab.training.alone import PLAIN
from kondo_lab.training.fields import Field

DENSE = "GRPO"
TARGETS = {"half way": 0.5, "90% of the way": 0.9}
"""Name -> share of the way from the start's reward to dense GRPO's at the end."""
AIMED_AT = "90% of the way"


class Arena(NamedTuple):
    """Where runs by the clock meet."""

    field: Field
    runs: dict[str, list[Run]]
    """By series."""

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.field.name}, by the clock"

    @property
    def dense(self) -> str:
        """Dense GRPO's name: of two paths the one whose learner took less time."""
        paths = [name for name in (DENSE, DENSE + PLAIN) if name in self.runs]

        def seconds(name: str) -> float:
            return float(np.mean([own.costs[LEARNER][-1] for own in self.runs[name]]))

        return min(paths, key=seconds) if len(paths) > 1 else (paths or [DENSE])[0]


def targets(arena: Arena) -> dict[str, float]:
    """Return the rewards to reach, by name; none where dense GRPO learned nothing."""
    if arena.dense not in arena.runs:
        return {}
    start = float(np.mean([own.reward[0] for several in arena.runs.values() for own in several]))
    goal = float(np.mean([own.end for own in arena.runs[arena.dense]]))
    if goal <= start:
        return {}
    return {name: start + share * (goal - start) for name, share in TARGETS.items()}


def over_dense(arena: Arena, ours: str, level: float) -> tuple[SpeedUp, SpeedUp]:
    """Return speed-ups to a target over dense GRPO, in learner seconds and by the whole loop."""
    learner, loop = (
        speed_up(*(reach(arena.runs[name], level, axis) for name in (arena.dense, ours)))
        for axis in (LEARNER, LOOP)
    )
    return learner, loop


def of_seeds(runs: Sequence[Run], seeds: Collection[int]) -> list[Run]:
    """Return the runs of some seeds."""
    return [own for own in runs if own.seed in seeds]
