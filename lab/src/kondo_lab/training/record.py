"""What is kept of a run: its arm, its seed, and a curve of what was measured on the way.

Every part of a study returns runs. A file has a JSON line for each (`kondo_lab.evidence.records`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""One point of a curve: the `PLACE`, whole numbers, then what was measured by name. A metric that
is left out was not measured; NaN was measured and is none."""

PLACE = ("step", "rollouts", "passes")
"""Updates made, samples seen and backward passes paid for, since the start of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed at one x.

    A part has at most one run for each arm, x and seed, and a run one value for each step and
    metric.
    """

    part: str
    """Name of the part that made it."""
    arm: str
    """The line in the figure, as in the papers' legends: PG, DG, DG-K 3%, ..."""
    seed: int
    """Of its weights, inputs and actions; the number of the round where seconds are measured."""
    curve: list[Row]
    x: float = math.nan
    """What the part sweeps (rate, noise, length, ...); NaN where it sweeps nothing."""
    k: int = 1
    """Updates per rollout."""
    learning_rate: float | None = None
    """None where nothing is trained."""
    task: str = ""
    """What is learned, in words."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else its line says: study, device, commit; model, role, ... of other measurements."""

    def keeping(self, wanted: Callable[[Row, str], bool]) -> "Run":
        """Return the run with the metrics that are wanted of (row, metric)."""
        curve = []
        for row in self.curve:
            left = {name: row[name] for name in row if name in PLACE or wanted(row, name)}
            if len(left) > len(PLACE):
                curve.append(left)
        return dataclasses.replace(self, curve=curve)


def keeping(runs: Iterable[Run], wanted: Callable[[Row, str], bool]) -> list[Run]:
    """Return runs with the metrics that are wanted of (row, metric); without those left empty."""
    kept = [run.keeping(wanted) for run in runs]
    return [run for run in kept if run.curve]


class Log:
    """Collects rows into the runs of a part, in the order of their first rows.

    Args:
        part: its name.
        shared: fields of every run: task, learning_rate, k.

    Example:
        >>> from kondo_lab.training.record import Log
        >>> log = Log("curves", task="digits bandit", learning_rate=1e-3)
        >>> log.add("PG", 0, {"online error": 0.9}, step=1, rollouts=100, passes=100)
        >>> log.add("PG", 0, {"online error": 0.5}, step=2, rollouts=200, passes=200)
        >>> [run] = log.runs()
        >>> run.arm, run.learning_rate, [row["online error"] for row in run.curve]
        ('PG', 0.001, [0.9, 0.5])
    """

    def __init__(self, part: str, **shared: Any):
        self.part, self._shared = part, shared
        self._runs: dict[tuple[str, float | None, int], Run] = {}

    def add(
        self,
        arm: str,
        seed: int,
        measured: Mapping[str, float],
        *,
        x: float = math.nan,
        step: int = 0,
        rollouts: int = 0,
        passes: int = 0,
        **own: Any,
    ) -> None:
        """Add what was measured of a run, by metric; `own` are fields of this run alone.

        Metrics of the same place as the row before join that row.
        """
        if clash := sorted(measured.keys() & set(PLACE)):
            raise ValueError(
                f"measured must not have {', '.join(clash)}, which say where a row stands; give "
                "the metric another name."
            )
        key = (arm, None if math.isnan(x) else x, seed)
        if key not in self._runs:
            fields = self._shared | own
            self._runs[key] = Run(part=self.part, arm=arm, seed=seed, x=x, curve=[], **fields)
        curve = self._runs[key].curve
        row: Row = {"step": step, "rollouts": rollouts, "passes": passes}
        # A metric that the row has already is kept beside it, for the runner to refuse.
        if curve and row.items() <= curve[-1].items() and not measured.keys() & curve[-1].keys():
            curve[-1].update(measured)
        else:
            curve.append(row | dict(measured))

    def runs(self) -> list[Run]:
        """Return the runs."""
        return list(self._runs.values())
