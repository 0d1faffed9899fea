"""Records -> how late real actors were, and whether the twins end where the real runs do."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.asynchrony import run
from kondo_lab.studies.asynchrony.captions import captions
from kondo_lab.studies.asynchrony.claims import claims
from kondo_lab.studies.asynchrony.run import (
    FIXED,
    ON_RAY,
    ONLINE,
    REPLAYED,
    TWINS,
    UNIFORM,
    named,
)
from kondo_lab.studies.asynchrony.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR

METRICS = (LEARNER_ERROR, run.TEST, ONLINE)
TOLERATED = 0.01
"""Of error: a smaller difference is none, however small the standard errors are."""
HOWS = (ON_RAY, *TWINS)
DASHES = {ON_RAY: "-", REPLAYED: "-", FIXED: "--", UNIFORM: ":"}
COLOURS = {
    ON_RAY: "#b0b0b0",
    REPLAYED: plotting.BLUE,
    FIXED: plotting.VERMILLION,
    UNIFORM: plotting.GREEN,
}
"""By how the actors were run or simulated."""

beyond = partial(headline, "beyond the paper")


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


def ages(records: pd.DataFrame, crew: str) -> dict[int, float]:
    """Return age -> share of the rollouts that were made with weights of that age."""
    chosen = records[(records["part"] == crew) & (records["metric"] == run.AGES)]
    return {int(age): float(v) for age, v in zip(chosen["setting"], chosen["value"], strict=True)}


def error(records: pd.DataFrame, crew: str, series: str, metric: str) -> Estimate:
    """Return the mean over seeds: of the whole run for online error, else at its end."""
    if metric != ONLINE:
        return statistics.final(records, crew, series, metric)
    chosen = statistics.select(records, crew, series, metric)
    return statistics.estimate(chosen.groupby("seed")["value"].mean().tolist())


class _Crew:
    """What was recorded of one crew."""

    def __init__(self, records: pd.DataFrame, settings: Settings, name: str):
        self.name, self.records = name, records
        self.methods = list(run.methods(settings))
        self.ages = ages(records, name)
        self.mean_age = sum(age * share for age, share in self.ages.items())
        self.errors = {
            (method, how, metric): error(records, name, named(method, how), metric)
            for method in self.methods
            for how in HOWS
            for metric in METRICS
        }

    def differences(self) -> Iterator[Difference]:
        """Yield every twin's error minus the real one."""
        for method in self.methods:
            for metric in METRICS:
                real = self.errors[method, ON_RAY, metric]
                for twin in TWINS:
                    own = self.errors[method, twin, metric]
                    value, se = own.mean - real.mean, math.hypot(own.se, real.se)
                    yield Difference(self.name, method, twin, metric, value, se, real.seeds)

    def line(self, series: str, metric: str, ours: Estimate) -> Headline:
        """Return a line of the headline at this crew's mean age."""
        return beyond(series, f"{metric}, crew {self.name}, by mean age", self.mean_age, ours)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = set(records["part"])
    crews = [_Crew(records, settings, crew.name) for crew in settings.crews if crew.name in there]
    lines = [
        *(beyond(crew.name, "mean age of the weights on Ray", "", crew.mean_age) for crew in crews),
        *(
            crew.line(named(method, how), metric, ours)
            for crew in crews
            for (method, how, metric), ours in crew.errors.items()
        ),
    ]
    found: list[Difference] = []
    for crew in crews:
        for one in crew.differences():
            found.append(one)
            ours = Estimate(one.value, one.se, one.seeds)
            lines.append(crew.line(f"{one.method}, {one.twin} - {ON_RAY}", one.metric, ours))
    lines += _share_lines(found)
    judged = claims(lines)
    analysis = Analysis(
        headline=lines,
        claims=judged,
        figures={
            "ages": _age_figure(crews),
            "errors": _error_figure(crews),
            "curves": _curve_figure(crews),
        },
        findings=[
            *map(_age_finding, crews),
            *map(_error_finding, crews),
            *(_verdict(found, twin) for twin in TWINS),
        ],
    )
    return with_captions(analysis, captions(lines, judged))


def _share_lines(found: list[Difference]) -> Iterator[Headline]:
    for twin in TWINS:
        for metric in METRICS:
            own = [one.within for one in found if (one.twin, one.metric) == (twin, metric)]
            name = f"share of {metric}s within 2 standard errors of those {ON_RAY}"
            yield beyond(twin, name, "", sum(own) / len(own))


def _age_finding(crew: _Crew) -> str:
    found = crew.ages
    most = max(found, key=lambda age: found[age])
    return (
        f"Crew {crew.name}: weights {crew.mean_age:.1f} versions old in the mean, "
        f"{min(found)} to {max(found)}, most often {most} ({found[most]:.0%} of the rollouts)."
    )


def _error_finding(crew: _Crew) -> str:
    told = []
    for method in crew.methods:
        own = [crew.errors[method, how, LEARNER_ERROR] for how in HOWS]
        numbers = ", ".join(f"{100 * one.mean:.1f}{_spread(one.se)}" for one in own)
        told.append(f"{method} {numbers}")
    return f"Crew {crew.name}, learner error in percent {', '.join(HOWS)}: {'; '.join(told)}."


def _verdict(found: list[Difference], twin: str) -> str:
    own = [one for one in found if one.twin == twin]
    missed = [one for one in own if not one.within]
    told = ", ".join(
        f"{one.method} with crew {one.crew} ({one.metric} {100 * one.value:+.1f}"
        f"{_spread(one.se)} points)"
        for one in missed
    )
    name = "Replayed ages predict" if twin == REPLAYED else f"A {twin} predicts"
    rest = f"; not of {told}." if told else "."
    return f"{name} {len(own) - len(missed)} of {len(own)} errors of the real runs{rest}"


def _spread(se: float) -> str:
    """Return a standard error in percent; nothing for a single seed, which has none."""
    return "" if math.isnan(se) else f" ± {100 * se:.1f}"


def _panels(crews: Sequence[_Crew], label: str, **size: float) -> tuple[Figure, Any]:
    """Return a figure with a panel per crew."""
    figure, (axes,) = plotting.grid(1, len(crews), width=3.4, **size)
    for ax, crew in zip(axes, crews, strict=True):
        ax.set_title(f"crew {crew.name}")
    axes[0].set_ylabel(label)
    return figure, axes


def _age_figure(crews: Sequence[_Crew]) -> Figure:
    figure, axes = _panels(crews, "share of the rollouts", height=3.0)
    for ax, crew in zip(axes, crews, strict=True):
        ax.bar(list(crew.ages), list(crew.ages.values()), color=plotting.FAINT, label=ON_RAY)
        ax.axvline(round(crew.mean_age), color=COLOURS[FIXED], label=FIXED)
        top = round(2 * crew.mean_age)
        ax.plot([-0.5, top + 0.5], 2 * [1 / (top + 1)], color=COLOURS[UNIFORM], label=UNIFORM)
        ax.set(xlabel="age of the weights in versions", xlim=(-1, max(top, *crew.ages, 2) + 1))
    says = "Age of the weights that rollouts were made with, on Ray and as simulated"
    plotting.head(figure, says, legend=axes[0])
    return figure


def _error_figure(crews: Sequence[_Crew]) -> Figure:
    figure, axes = _panels(crews, "learner error at the end")
    for ax, crew in zip(axes, crews, strict=True):
        places = np.arange(len(crew.methods))
        for shift, how in enumerate(HOWS):
            own = [crew.errors[method, how, LEARNER_ERROR] for method in crew.methods]
            means, bars = [one.mean for one in own], 2 * np.nan_to_num([one.se for one in own])
            xs = places + 0.16 * (shift - 1.5)
            ax.errorbar(xs, means, bars, color=COLOURS[how], label=how, fmt="o", markersize=4)
        ax.set_xticks(places, crew.methods, fontsize=plotting.SMALL)
        ax.set_title(f"crew {crew.name}, mean age {crew.mean_age:.1f}")
        ax.set_ylim(0, 1)
    says = "Learner error of real and simulated actors: lower is better"
    note = "Bars: two standard errors. A simulation predicts well where its dot is on that of Ray."
    plotting.head(figure, says, note, legend=axes[0])
    return figure


def _curve_figure(crews: Sequence[_Crew]) -> Figure:
    """Draw a row per crew and a column per method: on Ray against the simulations."""
    methods = list(dict.fromkeys(method for crew in crews for method in crew.methods))
    size = {"width": max(2.6, 5.2 / len(methods)), "height": 2.3}
    figure, axes = plotting.grid(len(crews), len(methods), sharey=True, **size)
    for row, crew in zip(axes, crews, strict=True):
        for ax, method in zip(row, methods, strict=True):
            ax.set_title(f"{method}, crew {crew.name}")
            if method not in crew.methods:
                continue
            for how in HOWS:
                curve = statistics.curve(crew.records, crew.name, named(method, how), ONLINE)
                width = 3.0 if how == ON_RAY else 1.2
                look = {"color": COLOURS[how], "linewidth": width, "linestyle": DASHES[how]}
                ax.plot(curve["step"], curve["mean"], label=how, **look)
        row[0].set_ylabel("online error")
    for ax in axes[-1]:
        ax.set_xlabel("learner step")
    says = "Online error of the actors by learner step: lower is better"
    note = "Means over seeds. A simulation predicts well where its line is on the grey one of Ray."
    plotting.head(figure, says, note, legend=axes[0, 0])
    return figure
