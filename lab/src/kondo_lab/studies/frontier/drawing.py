"""One figure per task: error against backward passes, and what the target costs."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from kondo_lab.studies import plotting
from kondo_lab.studies.frontier.points import Point, Task, front

# Okabe and Ito's colours, and a marker each for readers without colour.
LOOKS = (
    ("#5a5a5a", "s"),
    ("#0072b2", "D"),
    ("#d55e00", "o"),
    ("#009e73", "^"),
    ("#cc79a7", "v"),
    ("#e69f00", "P"),
    ("#56b4e9", "X"),
    ("#000000", "*"),
    ("#999999", "p"),
)


def figure(task: Task, points: Sequence[Point], ratios: Sequence[int]) -> Figure:
    """Draw a task's two panels."""
    drawn, axes = plotting.grid(1, 2, width=6.2, height=2.4 + 0.17 * len(points))
    _draw_frontier(axes[0, 0], task, points)
    _draw_costs(axes[0, 1], task, points, ratios)
    left, right = (ax.get_legend_handles_labels() for ax in axes[0])
    drawn.legend(*left, loc="outside lower left", ncols=5, fontsize=7)
    drawn.legend(*right, loc="outside lower right", ncols=3, fontsize=7)
    return drawn


def _draw_frontier(ax: Axes, task: Task, points: Sequence[Point]) -> None:
    # A log axis cannot show an error of 0: such a point is drawn at the bottom and labelled.
    foot = 0.5 * min((point.error.mean for point in points if point.error.mean > 0), default=1e-6)
    families = list(dict.fromkeys(point.line.family for point in points))
    for family, (colour, marker) in zip(families, LOOKS, strict=False):
        own = [point for point in points if point.line.family == family]
        xs = [point.backward for point in own]
        ys = [point.error.mean or foot for point in own]
        ax.plot(xs, ys, color=colour, marker=marker, linewidth=0.8, alpha=0.9, label=family)
        for point, x, y in zip(own, xs, ys, strict=True):
            name = _short(point) + ("" if point.error.mean else " error 0")
            ax.annotate(name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    best = front(points)
    ax.plot(
        [point.backward for point in best],
        [point.error.mean or foot for point in best],
        color="#bbbbbb",
        linewidth=5,
        zorder=0,
        drawstyle="steps-post",
        label="not beaten",
    )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("backward passes of the run (log scale)")
    plotting.log_percent(ax, f"{task.metric} at the end")
    ax.set_title(f"{task.part}: quality and cost")


def _short(point: Point) -> str:
    """Return the rate or the price; the colour says the rest."""
    line = point.line
    if math.isnan(line.rate):
        return f"{line.price:g}"
    return "" if line.rate == 1 else f"{100 * line.rate:g}%"


def _draw_costs(ax: Axes, task: Task, points: Sequence[Point], ratios: Sequence[int]) -> None:
    middle = ratios[len(ratios) // 2]
    # The most expensive at the bottom, and below it those that never reach the target.
    ordered = sorted(points, key=lambda point: (point.reach.reached == 0, point.cost(middle)))
    names = [_with_seeds(point) for point in ordered]
    for ratio, (colour, marker) in zip(ratios, LOOKS[2:], strict=False):
        costs = [point.cost(ratio) for point in ordered]
        label = f"a backward pass costs {ratio}"
        ax.plot(costs, range(len(ordered)), marker, color=colour, markersize=4, label=label)
    ax.set_yticks(range(len(ordered)), names, fontsize=7)
    ax.invert_yaxis()
    if any(point.reach.reached for point in points):
        ax.set_xscale("log")
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("forward + c x backward, in forward passes")
    ax.set_title(f"{task.part}: counted cost to {task.label}")


def _with_seeds(point: Point) -> str:
    """Return the name, and how many seeds got there where not all did."""
    reach = point.reach
    if reach.reached == reach.seeds:
        return point.line.series
    return f"{point.line.series} ({reach.reached} of {reach.seeds} seeds)"
