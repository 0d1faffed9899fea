"""Records -> how late real actors were, and whether the twins end where the real runs do."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.asynchrony.run import (
    AGES,
    FIXED,
    ON_RAY,
    ONLINE,
    REPLAYED,
    TEST,
    TWINS,
    UNIFORM,
    methods,
    named,
)
from kondo_lab.studies.asynchrony.settings import Settings
from kondo_lab.studies.learner_error import LEARNER_ERROR
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline

FIGURE = "beyond the paper"
METRICS = (LEARNER_ERROR, TEST, ONLINE)
TOLERATED = 0.01
"""Of error: a smaller difference is none, however small the standard errors are."""
HOWS = (ON_RAY, *TWINS)
DASHES = {ON_RAY: "-", REPLAYED: "--", FIXED: "-.", UNIFORM: ":"}


class Difference(NamedTuple):
    """A twin's error minus the real one."""

    crew: str
    method: str
    twin: str
    metric: str
    value: float
    se: float
    """Of the difference; NaN for single seeds."""
    seeds: int

    @property
    def within(self) -> bool:
        """Whether the twin predicts the real run: 2 standard errors, or `TOLERATED`."""
        allowed = 0.0 if math.isnan(self.se) else 2 * self.se
        return abs(self.value) <= max(allowed, TOLERATED)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = [crew.name for crew in settings.crews if crew.name in set(records["part"])]
    found = list(_differences(records, settings, there))
    return Analysis(
        headline=[
            *_age_lines(records, there),
            *_error_lines(records, settings, there),
            *(_difference_line(records, one) for one in found),
            *_share_lines(found),
        ],
        figures={
            "ages": _age_figure(records, there),
            "errors": _error_figure(records, settings, there),
            "curves": _curve_figure(records, settings, there),
        },
        findings=[
            *(_age_finding(records, crew) for crew in there),
            *(_error_finding(records, settings, crew) for crew in there),
            *(_verdict(found, twin) for twin in TWINS),
        ],
    )


def ages(records: pd.DataFrame, crew: str) -> dict[int, float]:
    """Return age -> share of the rollouts that were made with weights of that age."""
    chosen = records[(records["part"] == crew) & (records["metric"] == AGES)]
    return {int(age): float(v) for age, v in zip(chosen["setting"], chosen["value"], strict=True)}


def mean_age(records: pd.DataFrame, crew: str) -> float:
    """Return the mean age of the weights that a crew acted with."""
    return sum(age * share for age, share in ages(records, crew).items())


def error(records: pd.DataFrame, crew: str, series: str, metric: str) -> Estimate:
    """Return the mean over seeds: of the whole run for online error, else at its end."""
    if metric != ONLINE:
        return statistics.final(records, crew, series, metric)
    chosen = statistics.select(records, crew, series, metric)
    return statistics.estimate(chosen.groupby("seed")["value"].mean().tolist())


def _differences(
    records: pd.DataFrame, settings: Settings, there: list[str]
) -> Iterator[Difference]:
    for crew in there:
        for method in methods(settings):
            for metric in METRICS:
                real = error(records, crew, named(method, ON_RAY), metric)
                for twin in TWINS:
                    own = error(records, crew, named(method, twin), metric)
                    value, se = own.mean - real.mean, math.hypot(own.se, real.se)
                    yield Difference(crew, method, twin, metric, value, se, real.seeds)


def _age_lines(records: pd.DataFrame, there: list[str]) -> list[Headline]:
    return [
        headline(FIGURE, crew, "mean age of the weights on Ray", "", mean_age(records, crew))
        for crew in there
    ]


def _error_lines(records: pd.DataFrame, settings: Settings, there: list[str]) -> list[Headline]:
    lines = []
    for crew in there:
        for method in methods(settings):
            for how in HOWS:
                for metric in METRICS:
                    own = error(records, crew, named(method, how), metric)
                    what = f"{metric}, crew {crew}, by mean age"
                    name = named(method, how)
                    lines.append(headline(FIGURE, name, what, mean_age(records, crew), own))
    return lines


def _difference_line(records: pd.DataFrame, one: Difference) -> Headline:
    metric = f"{one.metric}, crew {one.crew}, by mean age"
    ours = Estimate(one.value, one.se, one.seeds)
    name = f"{one.method}, {one.twin} - {ON_RAY}"
    return headline(FIGURE, name, metric, mean_age(records, one.crew), ours)


def _share_lines(found: list[Difference]) -> list[Headline]:
    lines = []
    for twin in TWINS:
        for metric in METRICS:
            own = [one.within for one in found if (one.twin, one.metric) == (twin, metric)]
            name = f"share of {metric}s within 2 standard errors of those {ON_RAY}"
            lines.append(headline(FIGURE, twin, name, "", sum(own) / len(own)))
    return lines


def _age_finding(records: pd.DataFrame, crew: str) -> str:
    found = ages(records, crew)
    most = max(found, key=lambda age: found[age])
    return (
        f"Crew {crew}: weights {mean_age(records, crew):.1f} versions old in the mean, "
        f"{min(found)} to {max(found)}, most often {most} ({found[most]:.0%} of the rollouts)."
    )


def _error_finding(records: pd.DataFrame, settings: Settings, crew: str) -> str:
    told = []
    for method in methods(settings):
        own = [error(records, crew, named(method, how), LEARNER_ERROR) for how in HOWS]
        numbers = ", ".join(f"{100 * one.mean:.1f}{_spread(one.se)}" for one in own)
        told.append(f"{method} {numbers}")
    return f"Crew {crew}, learner error in percent {', '.join(HOWS)}: {'; '.join(told)}."


def _verdict(found: list[Difference], twin: str) -> str:
    own = [one for one in found if one.twin == twin]
    beyond = [one for one in own if not one.within]
    told = ", ".join(
        f"{one.method} with crew {one.crew} ({one.metric} {100 * one.value:+.1f}"
        f"{_spread(one.se)} points)"
        for one in beyond
    )
    name = "Replayed ages predict" if twin == REPLAYED else f"A {twin} predicts"
    rest = f"; not of {told}." if told else "."
    return f"{name} {len(own) - len(beyond)} of {len(own)} errors of the real runs{rest}"


def _spread(se: float) -> str:
    """Return a standard error in percent; nothing for a single seed, which has none."""
    return "" if math.isnan(se) else f" ± {100 * se:.1f}"


def _age_figure(records: pd.DataFrame, there: list[str]) -> Figure:
    figure, axes = plotting.grid(1, len(there), width=3.4, height=3.0)
    for ax, crew in zip(axes[0], there, strict=True):
        found, mean = ages(records, crew), mean_age(records, crew)
        ax.bar(list(found), list(found.values()), color=plotting.WHEEL[0], label=ON_RAY)
        ax.axvline(round(mean), color=plotting.WHEEL[1], label=FIXED)
        top = round(2 * mean)
        ax.plot([-0.5, top + 0.5], 2 * [1 / (top + 1)], color=plotting.WHEEL[2], label=UNIFORM)
        ax.set(title=f"crew {crew}", xlabel="age of the weights in versions")
    axes[0, 0].set_ylabel("share of the rollouts")
    axes[0, 0].legend(fontsize=8)
    return figure


def _error_figure(records: pd.DataFrame, settings: Settings, there: list[str]) -> Figure:
    figure, axes = plotting.grid(1, len(there), width=3.4)
    names = list(methods(settings))
    for ax, crew in zip(axes[0], there, strict=True):
        for place, (how, colour) in enumerate(zip(HOWS, plotting.WHEEL, strict=False)):
            own = [error(records, crew, named(name, how), LEARNER_ERROR) for name in names]
            xs = np.arange(len(names)) + 0.16 * (place - 1.5)
            bars = 2 * np.nan_to_num([one.se for one in own])
            ax.errorbar(
                xs, [one.mean for one in own], bars, color=colour, label=how, fmt="o", markersize=4
            )
        ax.set_xticks(range(len(names)), names, fontsize=8)
        ax.set_title(f"crew {crew}, age {mean_age(records, crew):.1f}")
        ax.set_ylim(0, 1)
    axes[0, 0].set_ylabel("learner error at the end, ± 2 se")
    axes[0, 0].legend(fontsize=8)
    return figure


def _curve_figure(records: pd.DataFrame, settings: Settings, there: list[str]) -> Figure:
    figure, axes = plotting.grid(1, len(there), width=3.4)
    for ax, crew in zip(axes[0], there, strict=True):
        _draw_curves(ax, records, settings, crew)
        ax.set(title=f"crew {crew}", xlabel="learner step")
    axes[0, 0].set_ylabel("online error, of the actors")
    axes[0, 0].legend(fontsize=7)
    return figure


def _draw_curves(ax: Axes, records: pd.DataFrame, settings: Settings, crew: str) -> None:
    for method, colour in zip(methods(settings), plotting.WHEEL, strict=False):
        for how, dash in DASHES.items():
            curve = statistics.curve(records, crew, named(method, how), ONLINE)
            label = method if how == ON_RAY else None
            ax.plot(curve["step"], curve["mean"], color=colour, linestyle=dash, label=label)
    for how, dash in DASHES.items():
        ax.plot([], [], color="black", linestyle=dash, label=how)
