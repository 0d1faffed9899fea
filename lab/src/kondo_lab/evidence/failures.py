"""What went wrong in whose run, each with the number that shows it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from kondo_lab.evidence.claims import chance_errors
from kondo_lab.evidence.runs import Run
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Estimate
from kondo_lab.training.arms import Arm

LEAST_FALL = 0.05
"""What a reward must have fallen by at least: two errors of one evaluation, about."""
COLLAPSED = 0.01
"""Entropy per token, in nats, below which a policy no longer explores."""
SOLVED = 0.9
"""Reward from which that does not matter."""
GROWN = 1.5
"""Entropy at the end over that of the first logged step: a policy that is paid for right answers
has no reason to become more random."""
FLAT = (0.48, 0.52)
"""Kept delight share of DG whose weights are all about a half: the gate says nothing."""
HARD = 0.98
"""Kept delight share of DG above which the gate is a step; of DG-K, nothing worth it is left."""
FEW_MIXED = 0.05
"""Share of groups with different rewards below which there is next to nothing to learn from."""


class Failure(NamedTuple):
    """One thing that went wrong."""

    series: str
    kind: str
    evidence: str


def fade(runs: Sequence[Run]) -> tuple[int, Estimate] | None:
    """Return the step of the highest mean reward and the fall from there to the end, if it is one.

    The fall is taken seed by seed, and must exceed what chance does. The peak is the highest of
    several noisy means: some of a small fall is chance all the same.
    """
    if len(runs) < 2:
        return None
    rewards = np.stack([own.reward for own in runs])
    peak = int(rewards.mean(axis=0).argmax())
    fall = estimate([float(own.reward[peak] - own.reward[-1]) for own in runs])
    if fall.mean > max(chance_errors(len(runs)) * fall.se, LEAST_FALL):
        return int(runs[0].steps[peak]), fall
    return None


def found(
    by_series: Mapping[str, Sequence[Run]], records: pd.DataFrame, arms: Sequence[Arm]
) -> list[Failure]:
    """Return the failures of runs; records have what was logged on the way."""
    by_name = {each.name: each for each in arms}
    return [
        Failure(series, kind, evidence)
        for series, runs in by_series.items()
        for kind, evidence in (
            *_of_rewards(runs),
            *_of_policy(runs, records[records["series"] == series]),
            *_of_gate(by_name.get(series), records[records["series"] == series]),
        )
    ]


_Told = Iterator[tuple[str, str]]
"""Kinds of failure, each with its evidence."""


def _of_rewards(runs: Sequence[Run]) -> _Told:
    fallen = fade(runs)
    if fallen is not None:
        step, fall = fallen
        kind = "late fade" if step else "decline from the start"
        yield kind, f"fell by {fall.mean:.3f} ± {fall.se:.3f} after step {step}"


def _of_policy(runs: Sequence[Run], logged: pd.DataFrame) -> _Told:
    reward = float(np.mean([own.end for own in runs]))
    first, last = logged_at(logged, "entropy", "min"), logged_at(logged, "entropy", "max")
    if last > GROWN * first:
        change = f"{first:.3f} to {last:.3f} nats a token"
        yield "growing entropy", f"{change}, at a reward of {reward:.2f}"
    if last < COLLAPSED and reward < SOLVED:
        yield "entropy collapse", f"{last:.4f} nats a token at a reward of {reward:.2f}"
    mixed = logged_at(logged, "mixed groups", "max")
    if mixed < FEW_MIXED:
        share = f"{100 * mixed:.1f}% of groups have different rewards"
        yield "no mixed groups", f"{share}, at a reward of {reward:.2f}"


def _of_gate(arm: Arm | None, logged: pd.DataFrame) -> _Told:
    share = logged_at(logged, "kept delight share", "max")
    if arm is None or math.isnan(share):
        return
    if arm.kind == "soft" and FLAT[0] <= share <= FLAT[1]:
        yield "flat gate", f"lets {share:.2f} of delight through: weights near a half"
    if (arm.kind == "soft" or arm.by_delight) and share > HARD:
        yield "saturated gate", f"keeps {share:.3f} of the positive delight"


def logged_at(logged: pd.DataFrame, metric: str, step: Literal["min", "max"]) -> float:
    """Return the mean over seeds at the first or last step of a metric; NaN without any."""
    own = logged[logged["metric"] == metric]
    return float(own[own["step"] == own["step"].agg(step)]["value"].mean())
