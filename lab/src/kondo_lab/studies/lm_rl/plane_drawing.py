"""Figures of a plane: loop seconds to the target by point, and reward against loop seconds."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kondo_lab.evidence import plotting, runs
from kondo_lab.evidence.runs import LEARNER, LOOP, Run
from kondo_lab.studies.lm_rl.plane import Trial, rank
from kondo_lab.studies.lm_rl.settings import Point, Role

COLOURS = {"dense": plotting.BLACK, "gated": plotting.GREEN, "PODS": plotting.PINK}
"""By role."""
MARKERS = {0.01: "o", 0.03: "^", 0.1: "s", 0.3: "D", 1.0: "v"}
"""By rate, the same in all figures."""


def plane(
    tried: Sequence[Trial], reported: Mapping[Role, Sequence[Run]], target: float, name: str
) -> Figure:
    """Draw the seconds to the target by rows of a step, loop and learner, and the frontier."""
    figure, axes = plotting.grid(1, 3, width=4.0, height=3.8)
    chosen = _best_by_point(tried, target)
    for ax, axis in zip(axes[0], (LOOP, LEARNER), strict=False):
        _draw_times(ax, chosen, target, axis)
        ax.set_title(f"{axis}: lower is better")
        plotting.label_ends(ax)
    _draw_frontier(axes[0, 2], chosen, reported)
    axes[0, 2].axhline(target, color=plotting.GREY, linewidth=0.8, linestyle=":")
    plotting.label_ends(axes[0, 2])
    seeds = max((len(several) for several in reported.values()), default=0)
    plotting.head(
        figure,
        f"{name}: time to a held-out reward of {target:g}, by rows a step and share kept",
        "Left, middle: every point on the tuning seed; empty: target not reached, at least so "
        f"long. Right, thick: mean of {seeds} seeds; thin: the tuning seed; dotted: target.",
    )
    return figure


def _best_by_point(tried: Sequence[Trial], target: float) -> list[Trial]:
    """Return every point with its better learning rate."""
    found: dict[str, Trial] = {}
    for trial in sorted(tried, key=partial(rank, target=target)):
        found.setdefault(trial.point.name, trial)
    return list(found.values())


def _family(point: Point) -> tuple[str, float]:
    return point.role, point.rate


def _look(point: Point) -> dict[str, Any]:
    return {"color": COLOURS[point.role], "marker": MARKERS.get(point.rate, "P")}


def _label(point: Point) -> str:
    return point.name.rpartition(" of ")[0] or "dense"


def _draw_times(ax: Axes, chosen: Sequence[Trial], target: float, axis: str) -> None:
    """Draw a line for every rate; an empty marker is a bound: the run never got there."""
    for family in sorted({_family(trial.point) for trial in chosen}):
        own = [trial for trial in chosen if _family(trial.point) == family]
        own.sort(key=lambda trial: trial.point.num_rows)
        reaches = [runs.reach([trial.run], target, axis) for trial in own]
        heights, places = [each.paid[0] for each in reaches], [each.point.num_rows for each in own]
        look = _look(own[0].point)
        ax.plot(places, heights, linewidth=1, label=_label(own[0].point), **look)
        never = [number for number, each in enumerate(reaches) if not each.reached]
        for number in never:
            ax.plot(places[number], heights[number], markerfacecolor="white", zorder=3, **look)
    ax.set(xscale="log", yscale="log", xlabel="rows sampled a step (log)")
    ax.set_ylabel(f"{axis} to the target (log)")
    places = sorted({trial.point.num_rows for trial in chosen})
    ax.set_xticks(places, [str(place) for place in places], fontsize=7)
    ax.xaxis.set_minor_locator(NullLocator())
    plotting.log_ticks(ax.yaxis)


def _draw_frontier(
    ax: Axes, chosen: Sequence[Trial], reported: Mapping[Role, Sequence[Run]]
) -> None:
    """Draw all points' rewards against loop seconds, thin, and the best points' means, thick."""
    for point, _, run in chosen:
        colour = COLOURS[point.role]
        ax.plot(run.costs[LOOP], run.reward, color=colour, linewidth=0.6, alpha=0.35)
    for role, several in reported.items():
        grid = np.linspace(0, max(own.costs[LOOP][-1] for own in several), 60)
        # Beyond its end, at the target, a run stays where it was.
        means = np.mean([np.interp(grid, own.costs[LOOP], own.reward) for own in several], axis=0)
        ax.plot(grid, means, color=COLOURS[role], linewidth=2, label=several[0].series)
    longest = max((run.costs[LOOP][-1] for _, _, run in chosen), default=math.nan)
    ax.set(xlabel=LOOP, ylabel="held-out reward", xlim=(0, longest))
    ax.set_title("reward by loop seconds")
