"""Figures: reward at the end by friction and by its strength, reward and entropy step by step."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.studies.lm_frictions import assignments
from kondo_lab.studies.lm_frictions.outcomes import Outcomes
from kondo_lab.studies.lm_frictions.settings import CLAIMED, FIRST, Settings
from kondo_lab.studies.lm_frictions.verdicts import SWEPT, sweep
from kondo_lab.training.tuning import QUALITY

DASHES = {"DG, eta 10": "--"}
"""Of arms that share their method's colour with another one that is drawn."""


def look(name: str) -> tuple[str, Any]:
    """Return the colour and dash of an arm that the claims are about, grey for others."""
    if name not in CLAIMED:
        return plotting.FAINT, "-"
    return plotting.method_colour(name), DASHES.get(name, "-")


def strengths(found: Outcomes) -> Figure | None:
    """Draw one panel per friction, a line per arm; None where no friction is swept.

    Those that the claims are about have a colour and a name, the others are grey.
    """
    sweeps = {kind: sweep(found, kind) for kind in SWEPT}
    sweeps = {kind: cells for kind, cells in sweeps.items() if len(cells) > 1}
    if not sweeps:
        return None
    columns = min(2, len(sweeps))
    figure, axes = plotting.grid(math.ceil(len(sweeps) / columns), columns, width=5.0, height=3.2)
    for ax in axes.flat[len(sweeps) :]:
        ax.set_axis_off()
    for ax, (kind, cells) in zip(axes.flat, sweeps.items(), strict=False):
        for name in sorted(found.arms, key=lambda own: own in CLAIMED):
            _draw(ax, found, name, list(cells.values()))
        ax.set_xticks(range(len(cells)), [f"{value:g}" for value in cells])
        ax.set(xlabel=SWEPT[kind], ylabel="held-out reward at the end", ylim=(-0.02, 1.02))
        plotting.label_ends(ax)
    grey = len([name for name in found.arms if name not in CLAIMED])
    others = f" Grey: {grey} other corrections, in the table." if grey else ""
    says = f"{found.field.name}: reward by the strength of each friction alone"
    plotting.head(figure, says, f"Mean over seeds, bar: one standard error.{others}")
    return figure


def _draw(ax: Axes, found: Outcomes, name: str, cells: Sequence[str]) -> None:
    known = [(x, found.reward(cell, name)) for x, cell in enumerate(cells)]
    there = [(x, own.mean, np.nan_to_num(own.se)) for x, own in known if own is not None]
    if not there:
        return
    colour, dash = look(name)
    xs, means, errors = zip(*there, strict=True)
    if name in CLAIMED:
        ax.errorbar(xs, means, errors, color=colour, linestyle=dash, label=name, marker="o", ms=3)
    else:
        ax.plot(xs, means, color=colour, linewidth=1)


def table(found: Outcomes) -> Figure:
    """Draw the mean reward at the end under every friction, a column for every arm."""
    cells, names = [cell.name for cell in found.cells], found.arms
    values = np.full((len(cells), len(names)), np.nan)
    for column, name in enumerate(names):
        for row, cell in enumerate(cells):
            own = found.reward(cell, name)
            values[row, column] = np.nan if own is None else own.mean
    width, height = max(6.4, 2.4 + 0.5 * len(names)), 2.3 + 0.24 * len(cells)
    figure, axes = plotting.grid(1, 1, width=width, height=height)
    ax = axes[0, 0]
    plotting.table(ax, values, cells, names)
    ax.tick_params(axis="x", top=True, bottom=False, labeltop=True, labelbottom=False)
    for label in ax.get_xticklabels():
        label.set(rotation=40, ha="left", rotation_mode="anchor")
    says = f"{found.field.name}: reward at the end by friction and correction"
    plotting.head(figure, says, "Mean held-out reward over seeds; bright is better, empty: not run")
    return figure


def curves(records: pd.DataFrame, settings: Settings) -> Figure | None:
    """Draw reward and entropy step by step, with the first frictions; None where nobody has both.

    Lines are means over seeds of the arms that the claims are about.
    """
    own = records[records["part"].isin(assignments.names(settings, settings.main))]
    own = own[own["metric"].isin([QUALITY, "entropy"])]
    means = own.groupby(["metric", "series", "step"])["value"].mean()
    there = {assignments.split(str(series))[1] for series in own["series"].unique()}
    cells = [cell.name for cell in FIRST if cell.name in there]
    if not cells:
        return None
    figure, axes = plotting.grid(len(cells), 2, width=4.4, height=2.1)
    labels = {QUALITY: "held-out reward", "entropy": "entropy, nats a token"}
    for row, cell in zip(axes, cells, strict=True):
        for ax, (metric, label) in zip(row, labels.items(), strict=True):
            for name in CLAIMED:
                place = (metric, f"{name}{assignments.UNDER}{cell}")
                if place in means.index:
                    line = means.loc[place]
                    colour, dash = look(name)
                    ax.plot(line.index, line, color=colour, linestyle=dash, label=name)
            if metric == QUALITY:
                ax.set_ylim(-0.02, 1.02)
            ax.set_title(f"{cell}: {label}", fontsize=9)
            plotting.label_ends(ax)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    says = f"{settings.main.name}: reward (left, higher is better) and entropy (right)"
    plotting.head(figure, says, "Means over seeds of the corrections that the claims are about.")
    return figure
