"""Measured beside simulated; where more actors stop helping; what dropping at the source moves."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.scale import theory
from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.run import (
    BYTES,
    EVERY_ROW,
    FITTED,
    IDLE,
    INWARD,
    MEASURED,
    MODES,
    OUTWARD,
    PACE,
    ROUND,
    SIMULATED,
    SINGLE,
    SOURCE,
    STALENESS,
    TIMED,
    Case,
    cases,
)
from kondo_lab.studies.scale.settings import Settings
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline

BEYOND = "beyond the paper"
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

Lines = dict[tuple[str, str, str], dict[float, float]]
"""(task, series, metric) -> actors -> value of a simulated line."""


class Scaling(NamedTuple):
    """A simulated line, read out."""

    most: float
    """Rollouts per second with the most actors."""
    enough: float
    """Least number of actors with at least 90% of that."""
    staleness: float
    """With that many actors."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    tasks = [task for task in settings.tasks if task in set(records["part"])]
    lines = _look_up(records)
    figures = {"measured-against-simulated": _check_figure(records, settings, tasks)}
    for task in tasks:
        figures[f"{task}-actors"] = _scale_figure(lines, settings, task)
    figures["staleness-and-bytes"] = _traffic_figure(lines, settings, tasks)
    found, findings = [], []
    for task in tasks:
        costs = costs_of(records, task)
        found += [
            *_cost_lines(records, task),
            *_check_lines(records, settings, task),
            *_scale_lines(lines, settings, task),
        ]
        findings += [
            _check_finding(records, settings, task),
            _scale_finding(lines, settings, task),
            _source_finding(lines, settings, task),
            _limit_finding(costs, settings, task),
        ]
    return Analysis(headline=found, figures=figures, findings=[*findings, ADVICE])


def _look_up(records: pd.DataFrame) -> Lines:
    """Return the simulated lines by place."""
    lines: Lines = {}
    own = records[records["series"].str.contains("learner ")]
    for row in own.itertuples():
        place = lines.setdefault((row.part, row.series, row.metric), {})
        place[float(row.setting)] = float(row.value)
    return lines


def costs_of(records: pd.DataFrame, task: str) -> Costs:
    """Return the costs a task was simulated with."""
    own = records[(records["part"] == task) & (records["series"] == FITTED)]
    values = dict(zip(own["metric"], own["value"], strict=True))
    known = {field.name: float(values[field.name]) for field in dataclasses.fields(Costs)}
    return Costs(**known | {"samples": int(known["samples"])})  # type: ignore[arg-type]


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


def _scaling(lines: Lines, task: str, case: Case) -> Scaling:
    return scaling(lines[task, case.name, PACE], lines[task, case.name, STALENESS])


# Headline.


def _cost_lines(records: pd.DataFrame, task: str) -> list[Headline]:
    """Return p20, p50 and p80 over rounds of what was timed."""
    found = []
    for metric in TIMED_LINES:
        values = statistics.select(records, task, TIMED, metric)["value"]
        found += [
            headline(
                BEYOND,
                task,
                f"milliseconds, {metric}",
                f"p{100 * share:g}",
                Estimate(1e3 * float(values.quantile(share)), seeds=len(values)),
            )
            for share in (0.2, 0.5, 0.8)
        ]
    weights = float(statistics.select(records, task, FITTED, "weights_bytes")["value"].iloc[0])
    return [*found, headline(BEYOND, task, "bytes of the weights", "", weights)]


def _both(
    records: pd.DataFrame, task: str, mode: str, metric: str, actors: int
) -> tuple[Estimate, Estimate]:
    measured, simulated = (
        statistics.estimate(
            statistics.select(records, task, f"{who}, {mode}", metric, setting=actors)[
                "value"
            ].tolist()
        )
        for who in (MEASURED, SIMULATED)
    )
    return measured, simulated


def _check_lines(records: pd.DataFrame, settings: Settings, task: str) -> list[Headline]:
    """Return the measured number where a paper's would stand, and the simulated beside it."""
    found = []
    for metric in (PACE, IDLE, STALENESS, BYTES):
        for mode in MODES:
            for actors in settings.real_actors:
                measured, simulated = _both(records, task, mode, metric, actors)
                found.append(
                    headline(
                        "measured on Ray / simulated",
                        f"{task}, {mode}",
                        metric,
                        actors,
                        Estimate(simulated.mean, measured.se, measured.seeds),
                        paper=measured.mean,
                    )
                )
                if metric == PACE:
                    found.append(
                        headline(
                            BEYOND,
                            f"{task}, {mode}",
                            "simulated / measured pace",
                            actors,
                            Estimate(
                                simulated.mean / measured.mean,
                                measured.se * simulated.mean / measured.mean**2,
                                measured.seeds,
                            ),
                        )
                    )
    return found


def _scale_lines(lines: Lines, settings: Settings, task: str) -> list[Headline]:
    found = []
    for case in cases(settings):
        read = _scaling(lines, task, case)
        series = f"{task}, {case.name}"
        found += [
            headline(BEYOND, series, PACE, max(settings.actors), read.most),
            headline(BEYOND, series, "actors for 90% of that", "", read.enough),
            headline(BEYOND, series, STALENESS, read.enough, read.staleness),
        ]
        if case.mode == SOURCE:
            other = _scaling(lines, task, case._replace(mode=EVERY_ROW))
            found.append(
                headline(
                    BEYOND,
                    series,
                    "pace over that of send all",
                    max(settings.actors),
                    read.most / other.most,
                )
            )
    return found


# Findings.


def _check_finding(records: pd.DataFrame, settings: Settings, task: str) -> str:
    ratios = []
    for mode in MODES:
        for actors in settings.real_actors:
            measured, simulated = _both(records, task, mode, PACE, actors)
            ratios.append(simulated.mean / measured.mean)
    within = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    return (
        f"{task}: simulated / measured pace is {min(ratios):.2f} to {max(ratios):.2f} over "
        f"{len(ratios)} kinds of real runs, geometric mean "
        f"{math.exp(float(np.mean(np.log(ratios)))):.2f}; {within} of {len(ratios)} are within 20%."
    )


def _usual(settings: Settings, design: str = SINGLE, mode: str = SOURCE, speed: int = 0) -> Case:
    """Return the case the sentences speak of: the middle network, the rate of the real runs."""
    network = settings.networks[len(settings.networks) // 2]
    return Case(design, network, settings.speeds[speed], mode, settings.rate)


def _scale_finding(lines: Lines, settings: Settings, task: str) -> str:
    told = []
    for design in (SINGLE, ROUND):
        for speed, factor in enumerate(settings.speeds):
            read = _scaling(lines, task, _usual(settings, design, speed=speed))
            told.append(
                f"{design}, learner {factor:g}x: {read.most:,.0f} rollouts/s, 90% of it with "
                f"{read.enough:,.0f} actors at a staleness of {read.staleness:,.0f}"
            )
    usual = _usual(settings)
    return f"{task}, {usual.network.name}, {usual.mode} {100 * usual.rate:g}%. {'; '.join(told)}."


def _source_finding(lines: Lines, settings: Settings, task: str) -> str:
    """Say what dropping at the source moves: pace and bytes, not staleness and weights."""
    most = float(max(settings.actors))
    told = []
    for design in (SINGLE, ROUND):
        for network in settings.networks:
            source = _usual(settings, design, speed=-1)._replace(network=network)
            every = source._replace(mode=EVERY_ROW)
            gain = lines[task, source.name, PACE][most] / lines[task, every.name, PACE][most]
            told.append(f"{gain:.2f}x ({design}, {network.name})")
    source = _usual(settings, speed=-1)
    every = source._replace(mode=EVERY_ROW)

    def per_rollout(case: Case, metric: str) -> float:
        return lines[task, case.name, metric][most] / lines[task, case.name, PACE][most]

    return (
        f"{task}: dropping at the source at {100 * settings.rate:g}% changes the pace with "
        f"{most:,.0f} actors and a learner of {settings.speeds[-1]:g}x by {', '.join(told)}. A "
        f"rollout then brings {per_rollout(source, INWARD):,.0f} bytes in instead of "
        f"{per_rollout(every, INWARD):,.0f}, and still {per_rollout(source, OUTWARD):,.0f} bytes "
        f"of weights out."
    )


def _limit_finding(costs: Costs, settings: Settings, task: str) -> str:
    """Name what limits the usual case, by counting alone."""
    most = max(settings.actors)
    told = []
    for design in (SINGLE, ROUND):
        for speed, factor in enumerate(settings.speeds):
            system = _usual(settings, design, speed=speed).system(settings, costs.samples, most)
            (first, pace), (second, then), *_ = theory.scarcest(costs, system)
            told.append(
                f"{first} at {pace:,.0f} rollouts/s, then {second} at {then:,.0f} ({design}, "
                f"learner {factor:g}x)"
            )
    return f"{task}: what sets the pace with {most:,} actors, counted: {'; '.join(told)}."


# Figures.


def _check_figure(records: pd.DataFrame, settings: Settings, tasks: Sequence[str]) -> Figure:
    figure, axes = plotting.grid(len(tasks), 3, width=4.0, height=3.2)
    for row, task in zip(axes, tasks, strict=True):
        for ax, metric in zip(row, (PACE, IDLE, STALENESS), strict=True):
            for mode in MODES:
                both = {a: _both(records, task, mode, metric, a) for a in settings.real_actors}
                measured = {float(a): pair[0] for a, pair in both.items()}
                plotting.by_setting(ax, measured, f"{MEASURED}, {mode}", colour=COLOURS[mode])
                ax.plot(
                    list(measured),
                    [pair[1].mean for pair in both.values()],
                    color=COLOURS[mode],
                    linestyle="--",
                    label=f"{SIMULATED}, {mode}",
                )
            ax.set_xscale("log", base=2)
            ax.set_xticks(settings.real_actors, [str(actors) for actors in settings.real_actors])
            ax.set_ylim(bottom=0)
            ax.set(xlabel="actors", ylabel=metric, title=task)
    _legend(figure, axes[0, 0], columns=4)
    return figure


def _scale_figure(lines: Lines, settings: Settings, task: str) -> Figure:
    """Pace by actors: a row per design, a column per network."""
    designs, networks = (SINGLE, ROUND), settings.networks
    figure, axes = plotting.grid(len(designs), len(networks), width=4.3, height=3.4)
    for row, design in zip(axes, designs, strict=True):
        for ax, network in zip(row, networks, strict=True):
            for case in cases(settings):
                if (case.design, case.network) == (design, network):
                    _draw_pace(ax, lines, settings, task, case)
            _log_axes(ax, PACE)
            ax.set_title(f"{design}\n{network.name}")
    _legend(figure, axes[0, 0], columns=2 * len(networks))
    return figure


def _draw_pace(ax: Axes, lines: Lines, settings: Settings, task: str, case: Case) -> None:
    if case.mode == EVERY_ROW and case.rate != settings.rate:
        return  # they lie on top of each other; records hold all
    place = settings.rates.index(case.rate) / max(1, len(settings.rates) - 1)
    colour = COLOURS[EVERY_ROW] if case.mode == EVERY_ROW else plotting.sequential(place)
    fast = case.speed != settings.speeds[0]
    found = lines[task, case.name, PACE]
    ax.plot(
        list(found),
        list(found.values()),
        color=colour,
        linestyle="--" if fast else "-",
        marker="s" if case.mode == EVERY_ROW else "o",
        markersize=3,
        label=f"{case.mode} {100 * case.rate:g}%, learner {case.speed:g}x",
    )


def _traffic_figure(lines: Lines, settings: Settings, tasks: Sequence[str]) -> Figure:
    """Staleness and network traffic of the usual case, both designs."""
    panels: list[tuple[str, Callable[[Case], list[tuple[str, str]]]]] = [
        ("staleness, versions", lambda case: [(STALENESS, "")]),
        ("bytes per second", lambda case: [(INWARD, ", in"), (OUTWARD, ", weights out")]),
        (IDLE, lambda case: [(IDLE, "")]),
    ]
    figure, axes = plotting.grid(len(tasks), len(panels), width=4.3, height=3.4)
    for row, task in zip(axes, tasks, strict=True):
        for ax, (label, metrics) in zip(row, panels, strict=True):
            for design, dash in ((SINGLE, "-"), (ROUND, "--")):
                for mode in MODES:
                    case = _usual(settings, design, mode)
                    for metric, suffix in metrics(case):
                        found = lines[task, case.name, metric]
                        ax.plot(
                            list(found),
                            list(found.values()),
                            color=COLOURS[mode],
                            linestyle=dash,
                            marker="^" if suffix == ", weights out" else "o",
                            markersize=3,
                            label=f"{mode}, {design}",
                        )
            _log_axes(ax, label, log_y=label != IDLE)
            ax.set_title(task if label != "bytes per second" else f"{task}; triangles: weights")
    _legend(figure, axes[0, 0], columns=4)
    return figure


def _log_axes(ax: Axes, label: str, *, log_y: bool = True) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.set_xlabel("actors")
    if log_y:
        ax.set_yscale("log")
    ax.set_ylabel(label)


def _legend(figure: Figure, ax: Axes, columns: int) -> None:
    """Name each line once, below the panels."""
    handles, labels = ax.get_legend_handles_labels()
    once: dict[str, Any] = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), fontsize=8, loc="outside lower center", ncols=columns)
