"""Records -> the reward at the end of every arm under every friction, seed by seed."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.lm_frictions import assignments
from kondo_lab.studies.lm_frictions.settings import Settings
from kondo_lab.training import tuning
from kondo_lab.training.corrections import needs_behaviour
from kondo_lab.training.fields import Field
from kondo_lab.training.member import Frictions

BySeed = dict[int, float]


class Outcomes(NamedTuple):
    """What came of a field."""

    field: Field
    frictions: tuple[Frictions, ...]
    """All of the field."""
    ends: dict[str, dict[str, BySeed]]
    """Frictions -> arm -> seed -> reward at the end; in the order of the settings."""
    needing: frozenset[str]
    """Arms that need the log-probs of the actors."""
    floor: float
    """The smallest error that can be told from 0: half an answer of an evaluation."""

    @property
    def cells(self) -> list[Frictions]:
        """Those with a result."""
        return [cell for cell in self.frictions if cell.name in self.ends]

    @property
    def arms(self) -> list[str]:
        """All with a result."""
        return list(dict.fromkeys(name for ends in self.ends.values() for name in ends))

    def reward(self, cell: str, arm: str) -> Estimate | None:
        """Return the mean reward at the end over seeds."""
        found = self.ends.get(cell, {}).get(arm)
        return estimate(list(found.values())) if found else None

    def error(self, cell: str, arm: str, seed: int) -> float:
        """Return 1 - reward at the end, not below what can be told from 0."""
        return max(self.floor, 1 - self.ends[cell][arm][seed])

    def common(self, *places: tuple[str, str]) -> list[int]:
        """Return the seeds that all of (friction, arm) have."""
        found = [set(self.ends.get(cell, {}).get(arm, {})) for cell, arm in places]
        return sorted(set.intersection(*found))

    def apart(self, first: tuple[str, str], second: tuple[str, str]) -> list[float]:
        """Return the reward of one (friction, arm) less another's, seed by seed."""
        one, other = (self.ends.get(cell, {}).get(name, {}) for cell, name in (first, second))
        return [one[seed] - other[seed] for seed in self.common(first, second)]

    def best(self, cell: str, wanted: Callable[[str], bool]) -> str | None:
        """Return the arm of the highest mean reward among those wanted.

        Only seeds that all of them have count: starts differ from seed to seed, and an easy seed
        that one has alone is no merit. None where there is no such seed, or nobody.
        """
        there = [name for name, by_seed in self.ends.get(cell, {}).items() if by_seed]
        there = [name for name in there if wanted(name)]
        seeds = self.common(*((cell, name) for name in there)) if there else []
        if not seeds:
            return None
        ends = self.ends[cell]
        return max(there, key=lambda name: sum(ends[name][seed] for seed in seeds))


def base_of(cell: Frictions, among: Sequence[Frictions]) -> Frictions | None:
    """Return the same friction with true log-probs; None where there is none."""
    wanted = dataclasses.replace(cell, reported="true", noise=0.0)
    return next((own for own in among if dataclasses.replace(own, name=cell.name) == wanted), None)


def outcomes(records: pd.DataFrame, settings: Settings, field: Field) -> Outcomes | None:
    """Return what came of a field; None where nothing did.

    Who does not look at the actors' log-probs has, where they are wrong, the reward that it has
    where they are right.
    """
    own = records[records["part"].isin(assignments.names(settings, field))]
    if own.empty:
        return None
    found: dict[str, dict[str, BySeed]] = {}
    for (series, _, seed), end in tuning.end_reward(own).items():
        arm, under = assignments.split(str(series))
        # A run that was lost to NaN answers nothing.
        value = 0.0 if math.isnan(end) else float(end)
        found.setdefault(under, {}).setdefault(arm, {})[int(seed)] = value
    needing = frozenset(each.name for each in settings.of(field) if needs_behaviour(each))
    ends: dict[str, dict[str, BySeed]] = {}
    cells = settings.cells(field)
    for cell in cells:
        base = None if cell.reports_truly else base_of(cell, cells)
        same = {} if base is None or cell.name not in found else found.get(base.name, {})
        of_cell = {name: by for name, by in same.items() if name not in needing}
        of_cell |= found.get(cell.name, {})
        if of_cell:
            order = [each.name for each in settings.of(field) if each.name in of_cell]
            ends[cell.name] = {name: of_cell[name] for name in order}
    return Outcomes(field, cells, ends, needing, 0.5 / settings.num_held_out)
