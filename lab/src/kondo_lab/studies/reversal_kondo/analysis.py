"""Records -> Figures 8 and 10, speed-ups at growing (H, M), vocabularies, and what was tried."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics, updates
from kondo_lab.studies.comparison import (
    against_paper,
    beats,
    ends,
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
    there, found = set(records["part"]), Analysis()
    lines, figures = found.headline, found.figures
    if "curves" in there:
        lines += _curve_lines(records, settings)
        figures["fig8-learning-curves"] = _curves_figure(records, settings)
        found.findings.append(_ties_finding(records, settings))
        found.frontier.extend(_frontier(records, settings))
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
    return found


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
    exact, end, best = _exact(settings), settings.num_steps, delightful(settings)
    lines = []
    if _full(settings):
        lines += against_paper(records, "curves", "Kondo Fig 8", ONLINE, paper.FIG_8, by="step")
    for series in (*list(best)[1:], exact):
        known = paper.FIG_8_BACKWARD.get(series) if _full(settings) else None
        metric, paid = "backward passes at the end", _paid(records, series)
        lines.append(headline("Kondo Fig 8", series, metric, "", paid, expected=known))
    found = ends(records, "curves", [*_all_series(settings), exact])
    lines += beats("Kondo Fig 8", ONLINE, end, best, baselines(), found)
    return [*lines, headline("beyond the paper", exact, ONLINE, end, found[exact])]


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
    panels: tuple[tuple[plotting.Axis, str], ...] = (
        ("step", "step of 100 sequences (crosses: the paper)"),
        ("backward", "backward passes"),
    )
    for ax, (x, label) in zip(axes[0], panels, strict=True):
        for name, colour in zip(names, plotting.WHEEL, strict=False):
            curve = statistics.curve(records, "curves", name, ONLINE)
            dash = "-" if name in delightful(settings) else (0, (4, 1.5))
            plotting.line(ax, curve, name, names, x=x, color=colour, linestyle=dash)
            points = paper.FIG_8.get(name, {}) if _full(settings) and x == "step" else {}
            plotting.crosses(ax, points, color=colour, markersize=4)
        plotting.log_percent(ax, "sequence error")
        ax.set(xscale="log", xlabel=label)
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

    `average` judges by the mean reward since the start of training, which reproduces the paper's
    figure, instead of by the reward at that moment. None if some seed solves not even the shortest
    length of these parts.
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
                lines.append(
                    headline("Kondo Fig 10", series, metric, forward, found, expected=theirs)
                )
    solved = {
        name: -found.mean
        for name in _all_series(settings)
        if (found := longest(records, name, end, average=True)) is not None
    }
    lines += [
        ordering("Kondo Fig 10", "- longest length", end, order=[series, baseline], ours=solved)
        for series in delightful(settings)
        for baseline in baselines()
        if {series, baseline} <= set(solved)
    ]
    return lines


def _slow_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Return Figure 10 at the lower learning rate, judged at the moment."""
    end = _logged(records, "slow")[-1]
    lines = []
    for series in _all_series(settings):
        known = paper.FIG_10[series] if _full(settings) else {}
        name = f"{series}, lr {settings.slow_learning_rate:g}"
        for forward in known or [float(end)]:
            found = longest(records, series, forward, average=False, parts=["slow"])
            if found is not None:
                theirs = known.get(forward)
                line = headline("Kondo Fig 10", name, SOLVED_NOW, forward, found, expected=theirs)
                lines.append(line)
    return lines


def _lengths_figure(
    records: pd.DataFrame,
    settings: Settings,
    *,
    average: bool = True,
    parts: Sequence[str] = FIG_10_PARTS,
) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8, height=4)
    _draw_longest(axes[0][0], records, settings, average=average, parts=parts)
    errors = {
        name: {length: at for part in parts for length, at in finals(records, part, name).items()}
        for name in _all_series(settings)
    }
    plotting.sweep(axes[0][1], errors)
    axes[0][1].set(xlabel="length H", ylabel="sequence error at the end")
    axes[0][1].axhline(SOLVED, color="black", linewidth=0.8, linestyle=":")
    return figure


def _slow_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure = _lengths_figure(records, settings, average=False, parts=["slow"])
    figure.axes[0].set_title(f"learning rate {settings.slow_learning_rate:g}")
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
        plotting.crosses(ax, paper.FIG_10[name] if _full(settings) else {}, color=colour)
    ax.xaxis.set_major_formatter(plotting.counts)
    label = SOLVED_SO_FAR if average else SOLVED_NOW
    ax.set(xlabel="forward passes (crosses: the paper)", ylabel=label)
    ax.legend(fontsize=8)


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
    lines = []
    for part, setting, name in _places(records, settings):
        metric = f"speed-up over PG to 25% error, {name}"
        for series in delightful(settings):
            for ratio in SPEED_COSTS:
                value = _speed(records, part, series, setting, ratio)
                if value is not None:
                    ours = Estimate(value, seeds=settings.sweep_seeds)
                    lines.append(headline("Kondo section 5", series, metric, ratio, ours))
    return lines


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
        ax.set(title=series, xlabel="cost of a backward, in forwards")
        ax.set_ylabel("counted speed-up over PG")
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize=7)
    return figure


def _vocabulary_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    metric = f"{ONLINE} at the end, H={settings.length}, by M"
    return [
        headline("Kondo section 5", series, metric, size, found)
        for series in ("PG", *delightful(settings))
        for size, found in finals(records, "vocabularies", series).items()
    ]


def _vocabulary_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5, height=3.8)
    names = ("PG", *delightful(settings))
    plotting.sweep(axes[0][0], {name: finals(records, "vocabularies", name) for name in names})
    axes[0][0].set(xscale="log", xlabel="vocabulary M", ylabel="sequence error at the end")
    axes[0][0].legend()
    return figure


def _tried_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    names = sorted(records[records["part"] == "tried"]["series"].unique())
    steps = [settings.tried_steps // 4, settings.tried_steps // 2, settings.tried_steps]
    at = partial(statistics.at, records, "tried")
    return [
        headline("beyond the paper", name, ONLINE, step, at(name, ONLINE, step))
        for name in names
        for step in steps
    ]
