"""Records -> Figures 8 and 10, speed-ups at growing (H, M), vocabularies, and what was tried."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics, updates
from kondo_lab.studies.comparison import (
    against_paper,
    finals,
    interpolated_longest,
    settings_of,
)
from kondo_lab.studies.reversal_kondo import paper
from kondo_lab.studies.reversal_kondo.run import EXACT_COUNT, baselines, delightful
from kondo_lab.studies.reversal_kondo.settings import Settings
from kondo_lab.studies.study import Analysis, Estimate, FrontierPoint, Headline, headline, ordering

ONLINE = "online error"
SOLVED = 0.25
"""A length counts as solved where the error is below this, the reward above 0.75."""
SOLVED_SO_FAR = "longest length with mean reward above 0.75 so far"
SOLVED_NOW = "longest length with reward above 0.75 at that moment"
FIG_10_PARTS = ("lengths", "shorter")
SPEED_COSTS = (0, 1, 2, 4, 8)
TARGETS = (SOLVED, 0.05)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = set(records["part"])
    lines: list[Headline] = []
    figures: dict[str, Figure] = {}
    findings: list[str] = []
    frontier: list[FrontierPoint] = []
    if "curves" in there:
        lines += _curve_lines(records, settings)
        figures["fig8-learning-curves"] = _curves_figure(records, settings)
        findings.append(_ties_finding(records, settings))
        frontier += _frontier(records, settings)
    if "lengths" in there:
        lines += _length_lines(records, settings)
        figures["fig10-lengths"] = _lengths_figure(records, settings)
    if "slow" in there:
        lines += _slow_lines(records, settings)
        figures["fig10-slow"] = _slow_figure(records, settings)
    if {"lengths", "vocabularies"} <= there:
        lines += _speed_lines(records, settings)
        figures["speed-up-by-backward-cost"] = _speed_figure(records, settings)
    if "vocabularies" in there:
        lines += _vocabulary_lines(records, settings)
        figures["vocabularies"] = _vocabulary_figure(records, settings)
    if "tried" in there:
        lines += _tried_lines(records, settings)
    return Analysis(headline=lines, figures=figures, findings=findings, frontier=frontier)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.num_steps >= 10_000 and settings.length == 10


def _all_series(settings: Settings) -> list[str]:
    return [*delightful(settings), *baselines()]


def _exact(settings: Settings) -> str:
    return f"{updates.percent(settings.rate)}, {EXACT_COUNT}"


def _paid(records: pd.DataFrame, series: str) -> Estimate:
    """Return the backward passes at the end of the curves."""
    chosen = statistics.select(records, "curves", series, ONLINE)
    return statistics.estimate(chosen.groupby("seed")["backward"].max().astype(float).tolist())


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    if _full(settings):
        lines += against_paper(records, "curves", "Kondo Fig 8", ONLINE, paper.FIG_8, by="step")
    for series in (*list(delightful(settings))[1:], _exact(settings)):
        found = _paid(records, series)
        known = paper.FIG_8_BACKWARD.get(series) if _full(settings) else None
        lines.append(
            headline("Kondo Fig 8", series, "backward passes at the end", "", found, paper=known)
        )
    ends = {
        series: statistics.final(records, "curves", series, ONLINE)
        for series in (*_all_series(settings), _exact(settings))
    }
    best = list(delightful(settings))
    means = {series: found.mean for series, found in ends.items()}
    for baseline in baselines():
        for series in best:
            pair = [series, baseline]
            lines.append(
                ordering("Kondo Fig 8", ONLINE, settings.num_steps, paper=pair, ours=means)
            )
    exact = ends[_exact(settings)]
    lines.append(headline("beyond the paper", _exact(settings), ONLINE, settings.num_steps, exact))
    return lines


def _ties_finding(records: pd.DataFrame, settings: Settings) -> str:
    told = []
    for series in (updates.percent(settings.rate), _exact(settings)):
        error = statistics.at(records, "curves", series, ONLINE, settings.num_steps // 10)
        paid = _paid(records, series)
        told.append(
            f"{series}: error {100 * error.mean:.2f} ± {100 * error.se:.2f}% at a tenth of the "
            f"steps, {paid.mean:,.0f} backward passes in all"
        )
    return "Equal answers to one prompt have equal delight. " + "; ".join(told) + "."


def _frontier(records: pd.DataFrame, settings: Settings) -> list[FrontierPoint]:
    rates = dict.fromkeys(_all_series(settings), 1.0)
    rates |= {
        updates.percent(settings.rate): settings.rate,
        _exact(settings): settings.rate,
        "DG-K price 0": math.nan,
    }
    task = f"reversal H={settings.length} M=2"
    return [
        statistics.frontier_point(
            records, "curves", series, ONLINE, target, task=task, rate=rates[series]
        )
        for target in TARGETS
        for series in rates
    ]


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=5.2, height=4)
    names = [*_all_series(settings), _exact(settings)]
    drawn_by: tuple[plotting.Axis, ...] = ("step", "backward")
    for ax, x in zip(axes[0], drawn_by, strict=True):
        for name, colour in zip(names, plotting.WHEEL, strict=False):
            curve = statistics.curve(records, "curves", name, ONLINE)
            dash = "-" if name in delightful(settings) else (0, (4, 1.5))
            plotting.line(ax, curve, name, names, x=x, color=colour, linestyle=dash)
            points = paper.FIG_8.get(name, {}) if _full(settings) and x == "step" else {}
            ax.plot(list(points), list(points.values()), "x", color=colour, markersize=4)
        plotting.log_percent(ax, "sequence error")
        ax.set_xscale("log")
    axes[0][0].set_xlabel("step of 100 sequences (crosses: the paper)")
    axes[0][1].set_xlabel("backward passes")
    axes[0][1].xaxis.set_major_formatter(plotting.counts)
    axes[0][0].legend(fontsize=8)
    return figure


def longest(
    records: pd.DataFrame,
    series: str,
    forward: float,
    *,
    average: bool,
    parts: Sequence[str] = FIG_10_PARTS,
) -> Estimate | None:
    """Return the longest length solved after that many forward passes, mean over seeds.

    Args:
        average: judge by the mean reward since the start of training, which reproduces the paper's
            figure, instead of by the reward at that moment.
        parts: whose lengths are looked at together.

    Returns:
        None if some seed solves not even the shortest length that was run.
    """
    chosen = records[
        records["part"].isin(parts)
        & (records["series"] == series)
        & (records["metric"] == ONLINE)
        & (records["forward"] <= forward)
    ].sort_values("forward")
    values = []
    for _, own in chosen.groupby("seed"):
        by_length = own.groupby("setting")["value"]
        errors = by_length.mean() if average else by_length.last()
        values.append(interpolated_longest(dict(errors), SOLVED))
    return None if min(values) == 0 else statistics.estimate(values)


def _logged(records: pd.DataFrame, part: str) -> list[int]:
    return sorted(int(x) for x in records[records["part"] == part]["forward"].unique())


def _length_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    end = _logged(records, "lengths")[-1]
    for series in _all_series(settings):
        known = paper.FIG_10[series] if _full(settings) else {}
        for forward in known or [float(end)]:
            for average, metric in ((True, SOLVED_SO_FAR), (False, SOLVED_NOW)):
                found = longest(records, series, forward, average=average)
                if found is None:
                    continue
                theirs = known.get(forward) if average else None
                lines.append(headline("Kondo Fig 10", series, metric, forward, found, paper=theirs))
    ends = {name: longest(records, name, end, average=True) for name in _all_series(settings)}
    solved = {name: -found.mean for name, found in ends.items() if found is not None}
    lines += [
        ordering("Kondo Fig 10", "- longest length", end, paper=[series, baseline], ours=solved)
        for series in delightful(settings)
        for baseline in baselines()
        if {series, baseline} <= set(solved)
    ]
    return lines


def _slow_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Return Figure 10 at the lower learning rate, judged at the moment."""
    end = _logged(records, "slow")[-1]
    return [
        headline(
            "Kondo Fig 10",
            f"{series}, lr {settings.slow_learning_rate:g}",
            SOLVED_NOW,
            forward,
            found,
            paper=known.get(forward),
        )
        for series in _all_series(settings)
        for known in [paper.FIG_10[series] if _full(settings) else {}]
        for forward in known or [float(end)]
        for found in [longest(records, series, forward, average=False, parts=["slow"])]
        if found is not None
    ]


def _lengths_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8, height=4)
    _draw_longest(axes[0][0], records, settings, average=True, parts=FIG_10_PARTS)
    _draw_ends(axes[0][1], records, settings, parts=FIG_10_PARTS)
    return figure


def _slow_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8, height=4)
    _draw_longest(axes[0][0], records, settings, average=False, parts=["slow"])
    _draw_ends(axes[0][1], records, settings, parts=["slow"])
    axes[0][0].set_title(f"learning rate {settings.slow_learning_rate:g}")
    return figure


def _draw_longest(
    ax: Axes, records: pd.DataFrame, settings: Settings, *, average: bool, parts: Sequence[str]
) -> None:
    for name, colour in zip(_all_series(settings), plotting.WHEEL, strict=False):
        found = {
            float(forward): value
            for forward in _logged(records, parts[0])
            if (value := longest(records, name, forward, average=average, parts=parts)) is not None
        }
        means = [value.mean for value in found.values()]
        errors = [value.se for value in found.values()]
        ax.plot(list(found), means, color=colour, label=name)
        plotting.band(ax, list(found), means, errors, colour=colour)
        points = paper.FIG_10[name] if _full(settings) else {}
        ax.plot(list(points), list(points.values()), "x", color=colour)
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.set_xlabel("forward passes (crosses: the paper)")
    ax.set_ylabel(SOLVED_SO_FAR if average else SOLVED_NOW)
    ax.legend(fontsize=8)


def _draw_ends(
    ax: Axes, records: pd.DataFrame, settings: Settings, *, parts: Sequence[str]
) -> None:
    for name, colour in zip(_all_series(settings), plotting.WHEEL, strict=False):
        found: dict[float, Estimate] = {}
        for part in parts:
            found |= finals(records, part, name)
        plotting.by_setting(ax, found, name, colour=colour)
    ax.set(xlabel="length H", ylabel="sequence error at the end")
    ax.axhline(SOLVED, color="black", linewidth=0.8, linestyle=":")


def _speed(
    records: pd.DataFrame, part: str, series: str, setting: float, ratio: float
) -> float | None:
    """Return the counted speed-up over PG to the solved level; None unless all seeds got there."""
    reached = [
        statistics.first_reach(records, part, name, ONLINE, SOLVED, setting=setting)
        for name in ("PG", series)
    ]
    if any(reach.reached < reach.seeds for reach in reached):
        return None
    return statistics.speed_up(ratio, baseline=reached[0].mean, cost=reached[1].mean)


def _places(records: pd.DataFrame, settings: Settings) -> list[tuple[str, float, str]]:
    """Return (part, setting, name) of every (H, M) where PG and the gates were run."""
    lengths = set(settings.baseline_lengths) & set(settings.delight_lengths)
    by_length = [("lengths", float(length), f"H={length} M=2") for length in sorted(lengths)]
    by_size = [
        ("vocabularies", size, f"H={settings.length} M={size:g}")
        for size in settings_of(records, "vocabularies", "PG")
    ]
    return by_length + by_size


def _speed_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    return [
        headline(
            "Kondo section 5",
            series,
            f"speed-up over PG to 25% error, {name}",
            ratio,
            Estimate(value, seeds=settings.sweep_seeds),
        )
        for part, setting, name in _places(records, settings)
        for series in delightful(settings)
        for ratio in SPEED_COSTS
        if (value := _speed(records, part, series, setting, ratio)) is not None
    ]


def _speed_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    names = list(delightful(settings))
    figure, axes = plotting.grid(1, len(names), width=3.8)
    places = _places(records, settings)
    ratios = np.linspace(0, 8, 17)
    for ax, series in zip(axes[0], names, strict=True):
        for number, (part, setting, name) in enumerate(places):
            values = [_speed(records, part, series, setting, float(ratio)) for ratio in ratios]
            if values[0] is not None:
                colour = plotting.sequential(number / max(1, len(places) - 1))
                ax.plot(ratios, values, color=colour, label=name)
        ax.axhline(1, color="#5a5a5a", linestyle=":")
        ax.set_title(series)
        ax.set_xlabel("cost of a backward, in forwards")
        ax.set_ylabel("counted speed-up over PG")
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize=7)
    return figure


def _vocabulary_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    return [
        headline(
            "Kondo section 5",
            series,
            f"{ONLINE} at the end, H={settings.length}, by M",
            size,
            found,
        )
        for series in ("PG", *delightful(settings))
        for size, found in finals(records, "vocabularies", series).items()
    ]


def _vocabulary_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5, height=3.8)
    for series, colour in zip(("PG", *delightful(settings)), plotting.WHEEL, strict=False):
        found = finals(records, "vocabularies", series)
        plotting.by_setting(axes[0][0], found, series, colour=colour)
    axes[0][0].set(xscale="log", xlabel="vocabulary M", ylabel="sequence error at the end")
    axes[0][0].legend()
    return figure


def _tried_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    names = sorted(records[records["part"] == "tried"]["series"].unique())
    steps = [settings.tried_steps // 4, settings.tried_steps // 2, settings.tried_steps]
    return [
        headline("beyond the paper", name, ONLINE, step, found)
        for name in names
        for step in steps
        for found in [statistics.at(records, "tried", name, ONLINE, step)]
    ]
