"""Which learning rate an arm is reported with: a rule that is fixed before anything is run.

    the rate of the highest reward at the end, a mean over tuning seeds; of equal ones the smallest

The reward at the end is the mean of the last evaluations, at temperature 1 on held-out prompts.
"""

import math
from collections.abc import Mapping

import pandas as pd

from kondo_lab.training.arms import Arm

QUALITY = "held-out sampled reward"
"""What arms are compared by: the policy as it samples, on prompts it never trained on."""
GREEDY = "held-out reward"
"""The same without chance: the most probable token at every place."""
LAST = 3
"""Evaluations whose mean is the reward at the end; all of a run that has fewer."""


def end_reward(records: pd.DataFrame, metric: str = QUALITY) -> pd.Series:
    """Return the reward at the end of every run, indexed by series, setting and seed."""
    own = records[(records["metric"] == metric) & (records["step"] > 0)].sort_values("step")
    by_run = own.groupby(["series", "setting", "seed"], dropna=False)["value"]
    last: pd.Series = by_run.apply(lambda values: values.iloc[-LAST:].mean())
    return last


def best_rate(rewards: Mapping[float, float]) -> float:
    """Return the learning rate of the highest reward, of equal ones the smallest.

    Example:
        >>> from kondo_lab.training.tuning import best_rate
        >>> best_rate({1e-3: 0.5, 1e-4: 0.9, 3e-4: 0.9})
        0.0001
    """
    # A run that was lost to NaN is worse than any other.
    known = {rate: -math.inf if math.isnan(own) else own for rate, own in rewards.items()}
    return min(known, key=lambda rate: (-known[rate], rate))


def rewards_by_rate(records: pd.DataFrame) -> dict[str, dict[float, float]]:
    """Return series -> learning rate -> mean reward at the end; a record's setting is its rate."""
    means = end_reward(records).groupby(["series", "setting"], dropna=False).mean()
    found: dict[str, dict[float, float]] = {}
    for (series, rate), reward in means.items():
        found.setdefault(str(series), {})[float(rate)] = float(reward)
    return found


def tuned_name(arm: Arm) -> str:
    """Return whose learning rate an arm has: its own, but for three kinds.

    With an exact screen the free one's: the two decide by the same numbers up to rounding. The
    zero-advantage filter dense GRPO's: what it leaves out has no gradient. Unbiased gates dense
    GRPO's too: their expected gradient is dense GRPO's.
    """
    if arm.kind in ("filter", "unbiased"):
        return "GRPO"
    return arm.name.replace(" exact", "") if arm.screen == "exact" else arm.name


def chosen(records: pd.DataFrame) -> dict[str, float]:
    """Return series -> its learning rate."""
    return {series: best_rate(found) for series, found in rewards_by_rate(records).items()}
