"""Figures: reward at the end by friction and by its strength, reward and entropy step by step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting
from kondo_lab.studies.lm_frictions import assignments
from kondo_lab.studies.lm_frictions.outcomes import Outcomes
from kondo_lab.studies.lm_frictions.settings import CLAIMED, FIRST, Settings
from kondo_lab.studies.lm_frictions.verdicts import SWEPT, sweep
from kondo_lab.studies.lm_rl.tuning import QUALITY

DASHES = ("-", "--", ":")
"""By turns of the colour wheel."""


def look(name: str, among: Sequence[str]) -> tuple[str, Any]:
    """Return a contender's colour and dash."""
    turn, place = divmod(list(among).index(name), len(plotting.WHEEL))
    return plotting.WHEEL[place], DASHES[turn % len(DASHES)]


def strengths(found: Outcomes) -> Figure | None:
    """Draw one panel per friction, a line per contender; None where no friction is swept."""
    sweeps = {kind: sweep(found, kind) for kind in SWEPT}
    sweeps = {kind: cells for kind, cells in sweeps.items() if len(cells) > 1}
    if not sweeps:
        return None
    figure, axes = plotting.grid(1, len(sweeps), width=3.6, height=4.0)
    for ax, (kind, cells) in zip(axes[0], sweeps.items(), strict=True):
        for name in found.contenders:
            _draw(ax, found, name, list(cells.values()))
        ax.set_xticks(range(len(cells)), [f"{value:g}" for value in cells])
        ax.set(xlabel=SWEPT[kind], ylim=(-0.02, 1.02))
    axes[0, 0].set_ylabel("held-out reward at the end")
    plotting.legend_below(figure, axes[0, 0], columns=2 * len(sweeps), size=7)
    figure.suptitle(found.field.name, fontsize=10)
    return figure


def _draw(ax: Axes, found: Outcomes, name: str, cells: Sequence[str]) -> None:
    known = [(x, found.reward(cell, name)) for x, cell in enumerate(cells)]
    there = [(x, own.mean, np.nan_to_num(own.se)) for x, own in known if own is not None]
    if there:
        colour, dash = look(name, found.contenders)
        xs, means, errors = zip(*there, strict=True)
        ax.errorbar(xs, means, errors, color=colour, linestyle=dash, label=name, linewidth=1.2)


def table(found: Outcomes) -> Figure:
    """Draw the mean reward at the end of every contender under every friction."""
    cells, names = [cell.name for cell in found.cells], found.contenders
    values = np.full((len(names), len(cells)), np.nan)
    for row, name in enumerate(names):
        for column, cell in enumerate(cells):
            own = found.reward(cell, name)
            values[row, column] = np.nan if own is None else own.mean
    width, height = 2.6 + 0.5 * len(cells), 1.9 + 0.26 * len(names)
    figure, axes = plotting.grid(1, 1, width=width, height=height)
    ax = axes[0, 0]
    ax.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if value < 0.5 else "black"
            ax.text(column, row, f"{value:.2f}", color=colour, ha="center", va="center", fontsize=7)
    ax.set_xticks(range(len(cells)), cells, rotation=40, ha="right", fontsize=7)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.grid(visible=False)
    ax.set_title(f"{found.field.name}: held-out reward at the end", fontsize=9)
    return figure


def curves(records: pd.DataFrame, settings: Settings) -> Figure | None:
    """Draw reward and entropy step by step, with the first frictions; None where nobody has both.

    Lines are means over seeds of the contenders that the claims are about.
    """
    own = records[records["part"].isin(assignments.names(settings, settings.main))]
    own = own[own["metric"].isin([QUALITY, "entropy"])]
    means = own.groupby(["metric", "series", "step"])["value"].mean()
    there = {assignments.split(str(series))[1] for series in own["series"].unique()}
    cells = [cell.name for cell in FIRST if cell.name in there]
    if not cells:
        return None
    figure, axes = plotting.grid(2, len(cells), width=2.5, height=2.3)
    for row, metric in enumerate((QUALITY, "entropy")):
        for ax, cell in zip(axes[row], cells, strict=True):
            for name in CLAIMED:
                place = (metric, f"{name}{assignments.UNDER}{cell}")
                if place in means.index:
                    line = means.loc[place]
                    colour, dash = look(name, CLAIMED)
                    ax.plot(line.index, line, color=colour, linestyle=dash, label=name)
            if row == 0:
                ax.set_title(cell, fontsize=8)
                ax.set_ylim(-0.02, 1.02)
        axes[row, 0].set_ylabel("held-out reward" if row == 0 else "entropy, nats a token")
    for ax in axes[-1]:
        ax.set_xlabel("step")
    plotting.legend_below(figure, axes[0, 0], columns=len(CLAIMED), size=8)
    return figure
