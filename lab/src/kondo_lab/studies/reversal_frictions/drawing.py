"""The figures: errors by friction, all frictions by length, and what bugs do."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.evidence.comparison import settings_of
from kondo_lab.evidence.study import Estimate, Headline
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_frictions import claim_lines, errors
from kondo_lab.studies.reversal_frictions.run import (
    EACH,
    NONE,
    TOGETHER,
    methods,
    named,
    of,
    sweeps,
    told_of_bugs,
)
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR

MARGIN = 1.5
"""Factor by which a log axis of errors goes past the smallest there can be, and past 1."""


def _draw(
    ax: Axes,
    found: Mapping[str, Mapping[float, Estimate]],
    *,
    least: Mapping[float, float],
    label: str,
) -> None:
    """Draw method -> {x: error} on a log axis, an error of 0 at `least`, {x: `least_error`}.

    The axis ends just below the smallest of these, and there it cuts bars that reach to 0.
    """
    shown = {
        name: {x: value._replace(mean=max(value.mean, least[x])) for x, value in values.items()}
        for name, values in found.items()
    }
    plotting.sweep(ax, shown)
    ax.set_xlabel(label)
    plotting.log_percent(ax, "error of the learner")
    # Left to itself a log axis follows bars to 0 for hundreds of decades, and has no ticks then.
    ax.set_ylim(min(least.values()) / MARGIN, MARGIN)


def each(records: pd.DataFrame, settings: Settings, reward: str) -> Figure:
    """Return the errors of all methods by strength, a panel a friction."""
    figure, axes = plotting.grid(2, 2, width=5.2, height=3.6)
    part = of(EACH, reward)
    for ax, (friction, sweep) in zip(axes.flat, sweeps(settings).items(), strict=True):
        places = {0.0: NONE} | dict.fromkeys(sweep.strengths, friction)
        found = {
            method: {
                x: errors.at_end(records, part, named(method, kind), x)
                for x, kind in places.items()
            }
            for method in methods(settings)
        }
        least = {
            x: errors.least_error(records, settings, part, named("DG", kind), x)
            for x, kind in places.items()
        }
        _draw(ax, found, least=least, label=sweep.label)
        ax.set_xscale("symlog", linthresh=min(sweep.strengths))
        ax.set_xlim(left=-0.2 * min(sweep.strengths))  # no strength is negative
        ax.set_title(friction)
        plotting.label_ends(ax)
    says = "Reversal: error by the strength of each friction alone, lower is better"
    plotting.head(figure, says, plotting.seeds_note(records, "bars: one standard error"))
    return figure


def together(
    records: pd.DataFrame, settings: Settings, reward: str, lines: Sequence[Headline]
) -> Figure:
    """Return the errors by length, learning curves, and samples over DG's by length."""
    figure, axes = plotting.grid(1, 3, width=4.3, height=4)
    part, names = of(TOGETHER, reward), list(methods(settings))
    lengths = settings_of(records, part, "DG")
    found = {name: {x: errors.at_end(records, part, name, x) for x in lengths} for name in names}
    least = {x: errors.least_error(records, settings, part, "DG", x, length=x) for x in lengths}
    _draw(axes[0, 0], found, least=least, label="length H, all frictions")
    axes[0, 0].axhline(reversals.SOLVED, color="black", linewidth=0.8, linestyle=":")
    ax = axes[0, 1]
    x = settings.length
    plotting.curves(ax, records, part, names, LEARNER_ERROR, setting=x)
    plotting.log_percent(ax, "error of the learner")
    ax.set_xlabel(f"learner step, H = {x}, all frictions")
    _gains(axes[0, 2], settings, reward, lines)
    for ax in axes[0]:
        plotting.label_ends(ax)
    plotting.head(
        figure,
        "Reversal: error by length and by step, and samples over DG's, all frictions",
        f"{plotting.seeds_note(records)} Lower is better. Right: triangles up are lower bounds.",
    )
    return figure


def _gains(ax: Axes, settings: Settings, reward: str, lines: Sequence[Headline]) -> None:
    """Draw the samples over DG's by length; triangles up are lower bounds."""
    target = max(settings.targets)
    metric = claim_lines.samples_metric(reward, target)
    names = list(methods(settings))
    for name in names:
        series = claim_lines.over_dg(name)
        own = [line for line in lines if line.metric == metric and line.series.startswith(series)]
        if not own:
            continue
        xs, ys = [float(line.x) for line in own], [line.ours for line in own]
        colour, dash = plotting.series_style(name, names)
        ax.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.2, label=name)
        for x, y, line in zip(xs, ys, own, strict=True):
            mark = {"at least": "^", "at most": "v", "either side": "x"}.get(
                line.series.rpartition(", ")[2], "o"
            )
            ax.plot([x], [y], mark, color=colour, markersize=5)
    ax.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    ax.set_yscale("log")
    ax.set_xlabel("length H, all frictions")
    ax.set_ylabel(f"samples to {100 * target:g}% over DG's")


def why(records: pd.DataFrame, settings: Settings, part: str) -> Figure:
    """Return the error at the end of every rule that was tried on bugs, seed by seed."""
    figure, axes = plotting.grid(1, 1, width=7.0, height=4.5)
    ax, names = axes[0, 0], list(told_of_bugs(settings))
    for place, name in enumerate(names):
        own = list(errors.by_seed(records, part, name).values())
        ax.plot(100 * np.array(own), [place] * len(own), "o", color=plotting.BLUE, alpha=0.5)
        ax.plot([100 * float(np.mean(own))], [place], "|", color="black", markersize=14)
    plotting.rows_axis(ax, names, size=9)
    ax.set_xlabel("error of the learner in percent: left is better")
    says = f"Reversal: error with bugs in {100 * settings.why_bug:g}% of the rows, by rule"
    plotting.head(figure, says, "Dots: seeds. Bars: means.")
    return figure
