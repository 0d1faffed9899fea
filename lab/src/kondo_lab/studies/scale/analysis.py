"""Measured beside simulated; where more actors stop helping; what dropping at the source moves."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.scale import run, theory
from kondo_lab.studies.scale.captions import captions
from kondo_lab.studies.scale.claims import claims
from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.run import DESIGNS, IDLE, MODES, PACE, SINGLE, STALENESS, Case, cases
from kondo_lab.studies.scale.settings import EVERY_ROW, SOURCE, Settings

ENOUGH = 0.9
"""Share of the pace at the most actors: fewer that reach it are enough."""
ADVICE = (
    "Add actors while the learner finds no rollout waiting at the end of a step; beyond that they "
    "add staleness alone, actors x queue / rollouts per step less 1. Its idle share does not fall "
    "to 0: between two steps Ray takes its time. Then make steps of more rollouts, which share "
    "what a step costs, and add learners only once kept rows fill the learner's time."
)
"""Holds whatever the numbers are."""
COLOURS = {SOURCE: "#d55e00", EVERY_ROW: "#0072b2"}
TIMED_LINES = (
    "rollout",
    "sketch",
    "gate, sketch and pack, at source",
    "gate, sketch and pack, send all",
    "check, at source",
    "check, send all",
    "at source: actor calls",
    "send all: actor calls",
    "at source: learner",
    "send all: learner",
    "dense: learner",
    "at source: learner calls",
    "publish",
    "checkpoint",
)
"""What the headline tells of the costs; records hold all."""

beyond = partial(headline, "beyond the paper")


class Scaling(NamedTuple):
    """A simulated line, read out."""

    most: float
    """Rollouts per second with the most actors."""
    enough: float
    """Least number of actors with at least 90% of that."""
    staleness: float
    """With that many actors."""


def scaling(pace: dict[float, float], staleness: dict[float, float]) -> Scaling:
    """Read a line out: its pace and staleness by actors.

    Example:
        >>> from kondo_lab.studies.scale.analysis import scaling
        >>> scaling({10: 50.0, 100: 95.0, 1000: 100.0}, {10: 1.0, 100: 2.0, 1000: 3.0})
        Scaling(most=100.0, enough=100, staleness=2.0)
    """
    most = pace[max(pace)]
    enough = min(actors for actors, value in pace.items() if value >= ENOUGH * most)
    return Scaling(most, enough, staleness[enough])


class _Task:
    """What was recorded of one task."""

    def __init__(self, records: pd.DataFrame, settings: Settings, name: str):
        self.name, self.settings = name, settings
        self.records = records[records["part"] == name]
        simulated = self.records[self.records["series"].str.contains("learner ")]
        self._lines = {
            place: dict(zip(line["setting"].tolist(), line["value"].tolist(), strict=True))
            for place, line in simulated.groupby(["series", "metric"], sort=False)
        }

    def line(self, case: Case, metric: str) -> dict[float, float]:
        """Return actors -> value of a simulated line."""
        return self._lines[case.name, metric]

    def scaling(self, case: Case) -> Scaling:
        """Read a simulated line out."""
        return scaling(self.line(case, PACE), self.line(case, STALENESS))

    def values(self, series: str, metric: str, actors: float | None = None) -> pd.Series:
        """Return what was recorded, by seed or round."""
        return statistics.select(self.records, self.name, series, metric, setting=actors)["value"]

    def both(self, mode: str, metric: str, actors: int) -> tuple[Estimate, Estimate]:
        """Return the measured number of real runs, and the simulated one."""
        measured, simulated = (
            statistics.estimate(self.values(f"{who}, {mode}", metric, actors).tolist())
            for who in (run.MEASURED, run.SIMULATED)
        )
        return measured, simulated

    def usual(self, design: str = SINGLE, mode: str = SOURCE, speed: int = 0) -> Case:
        """Return the case the sentences speak of: middle network, the rate of the real runs."""
        chosen = self.settings
        network = chosen.networks[len(chosen.networks) // 2]
        return Case(design, network, chosen.speeds[speed], mode, chosen.rate)


def costs_of(records: pd.DataFrame, task: str) -> Costs:
    """Return the costs a task was simulated with."""
    own = records[(records["part"] == task) & (records["series"] == run.FITTED)]
    values = dict(zip(own["metric"], own["value"], strict=True))
    known = {field.name: float(values[field.name]) for field in dataclasses.fields(Costs)}
    return Costs(**known | {"samples": int(known["samples"])})  # type: ignore[arg-type]


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = set(records["part"])
    tasks = [_Task(records, settings, name) for name in settings.tasks if name in there]
    kinds = (_cost_lines, _check_lines, _scale_lines)
    lines = [line for task in tasks for some in kinds for line in some(task)]
    findings = (_check_finding, _scale_finding, _source_finding, _limit_finding)
    found = Analysis(
        headline=lines,
        claims=claims(lines),
        figures={
            "measured-against-simulated": _check_figure(tasks, settings),
            **{f"{task.name}-actors": _scale_figure(task) for task in tasks},
            "staleness-and-bytes": _traffic_figure(tasks),
        },
        findings=[*(finding(task) for task in tasks for finding in findings), ADVICE],
    )
    names, most = [task.name for task in tasks], max(settings.real_actors)
    return with_captions(found, captions(lines, found.claims, names, most))


# Headline.


def _cost_lines(task: _Task) -> Iterator[Headline]:
    """Yield p20, p50 and p80 over rounds of what was timed."""
    for metric in TIMED_LINES:
        values = task.values(run.TIMED, metric)
        for share in (0.2, 0.5, 0.8):
            ours = Estimate(1e3 * float(values.quantile(share)), seeds=len(values))
            yield beyond(task.name, f"milliseconds, {metric}", f"p{100 * share:g}", ours)
    weights = float(task.values(run.FITTED, "weights_bytes").iloc[0])
    yield beyond(task.name, "bytes of the weights", "", weights)


def _check_lines(task: _Task) -> Iterator[Headline]:
    """Yield the measured number where a paper's would stand, and the simulated beside it."""
    for metric in (PACE, IDLE, STALENESS, run.BYTES):
        for mode in MODES:
            series = f"{task.name}, {mode}"
            for actors in task.settings.real_actors:
                (real, se, seeds), (twin, *_) = task.both(mode, metric, actors)
                ours, figure = Estimate(twin, se, seeds), "measured on Ray / simulated"
                yield headline(
                    figure, series, metric, actors, ours, expected=real, against="simulation"
                )
                if metric == PACE:
                    ratio = Estimate(twin / real, se * twin / real**2, seeds)
                    yield beyond(series, "simulated / measured pace", actors, ratio)


def _scale_lines(task: _Task) -> Iterator[Headline]:
    most = max(task.settings.actors)
    for case in cases(task.settings):
        read = task.scaling(case)
        series = f"{task.name}, {case.name}"
        yield beyond(series, PACE, most, read.most)
        yield beyond(series, "actors for 90% of that", "", read.enough)
        yield beyond(series, STALENESS, read.enough, read.staleness)
        if case.mode == SOURCE:
            gain = read.most / task.scaling(case._replace(mode=EVERY_ROW)).most
            yield beyond(series, "pace over that of send all", most, gain)


# Findings.


def _check_finding(task: _Task) -> str:
    both = [task.both(mode, PACE, n) for mode in MODES for n in task.settings.real_actors]
    ratios = [simulated.mean / measured.mean for measured, simulated in both]
    within = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    return (
        f"{task.name}: simulated / measured pace is {min(ratios):.2f} to {max(ratios):.2f} over "
        f"{len(ratios)} kinds of real runs, geometric mean "
        f"{math.exp(float(np.mean(np.log(ratios)))):.2f}; {within} of {len(ratios)} are within 20%."
    )


def _scale_finding(task: _Task) -> str:
    told = []
    for design in DESIGNS:
        for speed, factor in enumerate(task.settings.speeds):
            read = task.scaling(task.usual(design, speed=speed))
            told.append(
                f"{design}, learner {factor:g}x: {read.most:,.0f} rollouts/s, 90% of it with "
                f"{read.enough:,.0f} actors at a staleness of {read.staleness:,.0f}"
            )
    usual = task.usual()
    place = f"{task.name}, {usual.network.name}, {usual.mode} {100 * usual.rate:g}%"
    return f"{place}. {'; '.join(told)}."


def _source_finding(task: _Task) -> str:
    """Say what dropping at the source moves: pace and bytes, not staleness and weights."""
    settings, most = task.settings, float(max(task.settings.actors))

    def pace(case: Case) -> float:
        return task.line(case, PACE)[most]

    told = []
    for design in DESIGNS:
        for network in settings.networks:
            source = task.usual(design, speed=-1)._replace(network=network)
            gain = pace(source) / pace(source._replace(mode=EVERY_ROW))
            told.append(f"{gain:.2f}x ({design}, {network.name})")
    source = task.usual(speed=-1)
    every = source._replace(mode=EVERY_ROW)
    wanted = ((source, run.INWARD), (every, run.INWARD), (source, run.OUTWARD))
    inward, every_inward, outward = (
        task.line(case, metric)[most] / pace(case) for case, metric in wanted
    )
    return (
        f"{task.name}: dropping at the source at {100 * settings.rate:g}% changes the pace with "
        f"{most:,.0f} actors and a learner of {settings.speeds[-1]:g}x by {', '.join(told)}. A "
        f"rollout then brings {inward:,.0f} bytes in instead of {every_inward:,.0f}, and still "
        f"{outward:,.0f} bytes of weights out."
    )


def _limit_finding(task: _Task) -> str:
    """Name what limits the usual case, by counting alone."""
    costs, most = costs_of(task.records, task.name), max(task.settings.actors)
    told = []
    for design in DESIGNS:
        for speed, factor in enumerate(task.settings.speeds):
            system = task.usual(design, speed=speed).system(task.settings, costs.samples, most)
            (first, pace), (second, then), *_ = theory.scarcest(costs, system)
            told.append(
                f"{first} at {pace:,.0f} rollouts/s, then {second} at {then:,.0f} ({design}, "
                f"learner {factor:g}x)"
            )
    return f"{task.name}: what sets the pace with {most:,} actors, counted: {'; '.join(told)}."


# Figures.


def _check_figure(tasks: Sequence[_Task], settings: Settings) -> Figure:
    figure, axes = plotting.grid(len(tasks), 3, width=3.6, height=3.0)
    actors = settings.real_actors
    for row, task in zip(axes, tasks, strict=True):
        for ax, metric in zip(row, (PACE, IDLE, STALENESS), strict=True):
            for mode, colour in COLOURS.items():
                both = {float(n): task.both(mode, metric, n) for n in actors}
                measured = {n: pair[0] for n, pair in both.items()}
                simulated = [pair[1].mean for pair in both.values()]
                plotting.by_setting(ax, measured, f"{run.MEASURED}, {mode}", colour=colour)
                label = f"{run.SIMULATED}, {mode}"
                ax.plot(list(both), simulated, color=colour, linestyle="--", label=label)
            ax.set_xscale("log", base=2)
            ax.set_xticks(actors, map(str, actors))
            ax.set_ylim(bottom=0)
            ax.set(xlabel="actors", ylabel=metric, title=f"{task.name}: {metric}")
    says = "Measured on Ray against simulated: solid on dashed is a good simulation"
    plotting.head(figure, says, "Bars: one standard error.", legend=axes[0, 0])
    return figure


def _scale_figure(task: _Task) -> Figure:
    """Pace by actors: a row per design and speed of the learner, a column per network."""
    networks, speeds = task.settings.networks, task.settings.speeds
    rows = [(design, speed) for design in DESIGNS for speed in speeds]
    figure, axes = plotting.grid(len(rows), len(networks), width=3.4, height=2.5)
    for row, (design, speed) in zip(axes, rows, strict=True):
        for ax, network in zip(row, networks, strict=True):
            for case in cases(task.settings):
                # At other rates lines of "send all" lie on top of each other; records hold all.
                shown = case.mode == SOURCE or case.rate == task.settings.rate
                own = (case.design, case.speed, case.network)
                if shown and own == (design, speed, network):
                    _draw_pace(ax, task, case)
            _log_axes(ax, PACE)
            plotting.ratio_ticks(ax.yaxis, "")
            ax.set_title(f"{design}, learner {speed:g}x\n{network.name}", fontsize=9)
        plotting.label_ends(row[-1])
    plotting.head(
        figure,
        f"{task.name}: simulated rollouts per second by actors: higher is better",
        "Lines: share of the rows kept, and whether the others are dropped at the source or sent.",
    )
    return figure


def _draw_pace(ax: Axes, task: _Task, case: Case) -> None:
    rates = task.settings.rates
    colour = plotting.sequential(rates.index(case.rate) / max(1, len(rates) - 1))
    style = {"color": colour, "linestyle": "-"}
    if case.mode == EVERY_ROW:
        style = {"color": COLOURS[EVERY_ROW], "linestyle": "--"}
    _draw(ax, task.line(case, PACE), f"{case.mode} {100 * case.rate:g}%", marker="o", **style)


def _draw(ax: Axes, line: dict[float, float], label: str, **style: Any) -> None:
    ax.plot(list(line), list(line.values()), markersize=3, label=label, **style)


def _traffic_figure(tasks: Sequence[_Task]) -> Figure:
    """Staleness, network traffic and idle share of the usual case, both designs."""
    panels = {
        "staleness": (STALENESS, "versions"),
        "rollouts in": (run.INWARD, "bytes per second"),
        "weights out": (run.OUTWARD, "bytes per second"),
        "idle learner": (IDLE, "share of the time"),
    }
    figure, axes = plotting.grid(len(tasks), len(panels), width=2.9, height=3.0)
    for row, task in zip(axes, tasks, strict=True):
        for ax, (title, (metric, label)) in zip(row, panels.items(), strict=True):
            for design, dash in zip(DESIGNS, ("-", "--"), strict=True):
                for mode, colour in COLOURS.items():
                    line = task.line(task.usual(design, mode), metric)
                    style = {"color": colour, "linestyle": dash, "marker": "o"}
                    _draw(ax, line, f"{mode}, {design}", **style)
            _log_axes(ax, label, log_y=metric != IDLE)
            ax.set_title(f"{task.name}: {title}")
    says = "Staleness, traffic and idle time by actors, simulated: lower is better"
    plotting.head(figure, says, legend=axes[0, 0])
    return figure


def _log_axes(ax: Axes, label: str, *, log_y: bool = True) -> None:
    ax.set(xscale="log", yscale="log" if log_y else "linear", xlabel="actors", ylabel=label)
    ax.xaxis.set_major_formatter(plotting.counts)
