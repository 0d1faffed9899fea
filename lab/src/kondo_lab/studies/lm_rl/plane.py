"""The plane of rollouts per step and kept rows: when a point's runs reach the target, and who wins.

    smoothed reward    the mean of two successive evaluations, at the mean of what both had cost
    time to target     where the line through smoothed rewards first meets it

The best point of a role is chosen on the tuning seed by a rule that is fixed before anything is
run: the fewest loop seconds to the target; where nobody got there, the highest smoothed reward at
the end.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kondo_lab.evidence import runs
from kondo_lab.evidence.runs import LOOP, Run
from kondo_lab.studies.lm_rl import assignments
from kondo_lab.studies.lm_rl.settings import Plane, Point, Role
from kondo_lab.training import tuning

AGAINST = (
    "The dense point also differentiates rows of advantage 0; learner seconds are without "
    "generation, loop seconds with it."
)
"""What the speed-up over a dense point is against, and what its seconds hold."""


class Trial(NamedTuple):
    """A point with one of its learning rates, on a tuning seed."""

    point: Point
    learning_rate: float
    run: Run
    """Smoothed."""


def has_reached(history: Sequence[dict[str, Any]], target: float) -> bool:
    """Return whether the mean of the last two evaluations is the target or above.

    Example:
        >>> from kondo_lab.studies.lm_rl.plane import has_reached
        >>> history = [{"values": {"held-out sampled reward": [own]}} for own in (0.5, 0.9, 0.96)]
        >>> has_reached(history, 0.92), has_reached(history, 0.94)
        (True, False)
    """
    rewards = [own["values"][tuning.QUALITY][0] for own in history]
    return len(rewards) > 1 and (rewards[-1] + rewards[-2]) / 2 >= target


def smoothed(run: Run) -> Run:
    """Return the run with means of two successive evaluations, of rewards and costs alike."""

    def halves(values: np.ndarray) -> np.ndarray:
        means: np.ndarray = (values[1:] + values[:-1]) / 2
        return means

    costs = {axis: halves(paid) for axis, paid in run.costs.items()}
    return run._replace(steps=halves(run.steps), reward=halves(run.reward), costs=costs)


def trials(records: pd.DataFrame, plane: Plane) -> list[Trial]:
    """Return what was tried on tuning seeds, of the points whose parts are among the records."""
    found = []
    for point in plane.points:
        own = records[records["part"] == assignments.point_name(plane, point)]
        for rate, one in own.groupby("setting"):
            for several in runs.clock_runs(one, own["part"].unique()).values():
                found += [Trial(point, float(rate), smoothed(run)) for run in several]
    return found


def best(found: Sequence[Trial], role: Role, target: float) -> Trial:
    """Return a role's best trial, by the rule above."""
    own = [trial for trial in found if trial.point.role == role]
    if not own:
        raise ValueError(f"role must be one of those tried, got {role!r}; run its points first.")

    return min(own, key=partial(rank, target=target))


def rank(trial: Trial, target: float) -> tuple[float, float]:
    """Return what trials are compared by, the best first: the rule above."""
    return runs.time_to(trial.run, target, LOOP), -float(np.nan_to_num(trial.run.reward[-1]))


def best_runs(records: pd.DataFrame, plane: Plane, role: Role) -> list[Run]:
    """Return the smoothed runs of a role's best point, one for each seed."""
    by_series = runs.clock_runs(records, [assignments.best_name(plane, role)])
    return [smoothed(run) for several in by_series.values() for run in several]


def rival_runs(records: pd.DataFrame, plane: Plane) -> list[tuple[Point, float, list[Run]]]:
    """Return the rivals that were run: point, learning rate, and smoothed runs, one a seed."""
    found = []
    for point in plane.rivals:
        own = records[records["part"] == assignments.rival_name(plane, point)]
        for rate, one in own.groupby("setting"):
            by_series = runs.clock_runs(one, own["part"].unique())
            several = [smoothed(run) for runs_of in by_series.values() for run in runs_of]
            found.append((point, float(rate), several))
    return found
