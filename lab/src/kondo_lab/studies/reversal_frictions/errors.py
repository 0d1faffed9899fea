"""The learner's error at the end: its mean over seeds, who solves, and how far apart two are."""

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR

LAST_SHARE = 0.1
"""The error at the end is the mean over this last share of the steps."""
SOLVED = 0.05
"""Outcomes are all or nothing: a seed below this error has solved the task."""


def _last_looks(
    records: pd.DataFrame, part: str, series: str, setting: float | None
) -> pd.DataFrame:
    """Return the errors of all seeds in the last tenth of the steps, one record a look."""
    own = statistics.select(records, part, series, LEARNER_ERROR, setting=setting)
    return own[own["step"] > (1 - LAST_SHARE) * own["step"].max()]


def by_seed(
    records: pd.DataFrame, part: str, series: str, setting: float | None = None
) -> dict[int, float]:
    """Return each seed's mean error over the last tenth of the steps."""
    late = _last_looks(records, part, series, setting)
    return {int(seed): float(values.mean()) for seed, values in late.groupby("seed")["value"]}


def at_end(records: pd.DataFrame, part: str, series: str, setting: float | None = None) -> Estimate:
    """Return the mean of `by_seed`."""
    return statistics.estimate(list(by_seed(records, part, series, setting).values()))


def solved(records: pd.DataFrame, part: str, series: str, setting: float | None = None) -> Estimate:
    """Return the share of seeds that end below 5%."""
    ends = by_seed(records, part, series, setting).values()
    return statistics.estimate([float(error < SOLVED) for error in ends])


def least_error(
    records: pd.DataFrame,
    settings: Settings,
    part: str,
    series: str,
    setting: float,
    *,
    length: float | None = None,
) -> float:
    """Return the smallest error that `at_end` can tell from none: one wrong token in all it saw.

    1 / (seeds · looks · prompts · H): at each look a seed answers every prompt with H tokens.
    """
    looks = len(_last_looks(records, part, series, setting))
    return 1 / (looks * settings.test_prompts * (length or settings.length))


def ratio(theirs: Estimate, ours: Estimate, least: float) -> Estimate:
    """Return theirs / ours, its standard error to first order.

        se / ratio = sqrt((se_theirs / theirs)^2 + (se_ours / ours)^2)

    An error below `least` counts as that: nobody can tell it from none.
    """
    at_least = (one._replace(mean=max(one.mean, least)) for one in (theirs, ours))
    return statistics.ratio(*at_least)
