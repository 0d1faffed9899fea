"""What several analyses do: a table of the paper's numbers beside ours, and finals by setting."""

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.agreement import Against
from kondo_lab.evidence.study import Estimate, Headline, headline, ordering


def against_paper(
    records: pd.DataFrame,
    part: str,
    figure: str,
    metric: str,
    paper: Mapping[str, Mapping[float, float]],
    *,
    by: Literal["step", "forward"],
) -> list[Headline]:
    """Return a line for every number read off a figure.

    Args:
        paper: series -> {x: value}, x in steps or forward passes as `by` says.
    """
    lines = []
    for series, points in paper.items():
        for x, value in points.items():
            found = statistics.at(records, part, series, metric, x, by=by)
            lines.append(headline(figure, series, metric, x, found, expected=value))
    return lines


def beats(
    figure: str,
    metric: str,
    x: float | str,
    winners: Iterable[str],
    others: Iterable[str],
    ours: Mapping[str, Estimate] | Mapping[str, float],
    against: Against = "paper",
) -> list[Headline]:
    """Return whether each winner of the paper is below each of the others, as `ordering` lines."""
    pairs = itertools.product(others, winners)
    line = partial(ordering, figure, metric, x, ours=ours, against=against)
    return [line(order=[winner, other]) for other, winner in pairs]


def ends(
    records: pd.DataFrame,
    part: str,
    names: Iterable[str],
    metric: str = "online error",
    setting: float | None = None,
) -> dict[str, Estimate]:
    """Return series -> the number at the end of the run."""
    return {n: statistics.final(records, part, n, metric, setting=setting) for n in names}


def settings_of(records: pd.DataFrame, part: str, series: str) -> list[float]:
    """Return the settings a series was run at, in order."""
    own = records[(records["part"] == part) & (records["series"] == series)]
    return sorted(float(setting) for setting in own["setting"].unique())


def finals(
    records: pd.DataFrame, part: str, series: str, metric: str = "online error"
) -> dict[float, Estimate]:
    """Return setting -> the number at the end of the run."""
    return {
        setting: statistics.final(records, part, series, metric, setting=setting)
        for setting in settings_of(records, part, series)
    }


def means(
    records: pd.DataFrame, part: str, series: str, metric: str, settings: Iterable[float]
) -> list[float]:
    """Return the mean over seeds at the end of the run, at each of these settings."""
    final = statistics.final
    return [final(records, part, series, metric, setting=setting).mean for setting in settings]


def tolerated(errors: Mapping[float, Estimate], factor: float) -> float:
    """Return the first setting at which the error exceeds factor x that of the lowest setting.

    Between two settings the error is taken to grow linearly. Infinite if it never does.
    """
    settings = sorted(errors)
    limit = factor * errors[settings[0]].mean
    for low, high in itertools.pairwise(settings):
        below, above = errors[low].mean, errors[high].mean
        if above > limit:
            return low + (high - low) * (limit - below) / (above - below)
    return float(np.inf)


def interpolated_longest(errors: Mapping[float, float], limit: float) -> float:
    """Return the longest setting whose error is below `limit`, interpolated to where it is met.

    0 if none is; the longest there is if that one is still below.
    """
    settings = sorted(errors)
    solved = [place for place, setting in enumerate(settings) if errors[setting] < limit]
    if not solved:
        return 0.0
    place = solved[-1]
    if place == len(settings) - 1:
        return settings[place]
    low, high = settings[place], settings[place + 1]
    share = (limit - errors[low]) / (errors[high] - errors[low])
    return low + share * (high - low)
