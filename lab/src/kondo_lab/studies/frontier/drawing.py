"""One figure per task: error against backward passes, and what the target costs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo_lab.evidence import plotting
from kondo_lab.studies.frontier.points import Point, Task, front

REFERENCES = ("PG", "DG", "random")
"""Families named in every figure, beaten or not: no gate, and a gate that knows nothing."""


def figure(task: Task, points: Sequence[Point], ratios: Sequence[int]) -> Figure:
    """Draw a task's two panels."""
    drawn, axes = plotting.grid(1, 2, width=6.0, height=2.2 + 0.16 * len(points))
    _draw_frontier(axes[0, 0], task, points)
    _draw_costs(axes[0, 1], task, points, ratios)
    seeds = max(point.error.seeds for point in points)
    says = f"{task.part}: {len(points)} gates, those that no other beats in cost and error named"
    middle = ratios[len(ratios) // 2]
    plotting.head(
        drawn,
        says,
        f"Left: mean of {seeds} seeds, bars: one standard error; each grey line is one gate at "
        f"several rates or prices; orange: not beaten. Right: dot: a backward pass costs {middle} "
        f"forward passes; line: {ratios[0]} to {ratios[-1]}.",
    )
    return drawn


def _draw_frontier(ax: Axes, task: Task, points: Sequence[Point]) -> None:
    # A log axis cannot show an error of 0: such a point is drawn at the bottom and labelled.
    foot = 0.5 * min((point.error.mean for point in points if point.error.mean > 0), default=1e-6)
    for family in dict.fromkeys(point.line.family for point in points):
        own = [point for point in points if point.line.family == family]
        heights = [point.error.mean or foot for point in own]
        xs = [point.backward for point in own]
        ax.plot(xs, heights, color=plotting.FAINT, marker="o", markersize=4, linewidth=1)
    best = front(points)
    xs, heights = [own.backward for own in best], [own.error.mean or foot for own in best]
    ax.plot(xs, heights, drawstyle="steps-post", color=plotting.VERMILLION, lw=1.2, zorder=2.5)
    labels = []
    for point in points:
        name, y = point.line.series, point.error.mean or foot
        if point not in best and point.line.family not in REFERENCES:
            continue
        colour = plotting.VERMILLION if point in best else plotting.method_colour(name)
        error = 0.0 if point.error.se != point.error.se else min(point.error.se, 0.9 * y)
        ax.errorbar(point.backward, y, error, fmt="o", color=colour, markersize=6, zorder=3)
        says = "0" if point.error.mean == 0 else f"{100 * point.error.mean:.2g}%"
        labels.append(plotting.Label(f"{name}: {says}", point.backward, y, colour))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("backward passes of the run (log scale)")
    plotting.log_percent(ax, f"{task.metric} at the end")
    plotting.label_ends(ax, labels)
    ax.set_title("error by backward passes: lower left is better")


def _draw_costs(ax: Axes, task: Task, points: Sequence[Point], ratios: Sequence[int]) -> None:
    middle = ratios[len(ratios) // 2]
    # The most expensive at the bottom, and below it those that never reach the target.
    ordered = sorted(points, key=lambda point: (point.reach.reached == 0, point.cost(middle)))
    best = front(points)
    for place, point in enumerate(ordered):
        name = point.line.series
        colour = plotting.VERMILLION if point in best else plotting.GREY
        if point.line.family in REFERENCES and point not in best:
            colour = plotting.method_colour(name)
        costs = [point.cost(ratio) for ratio in (ratios[0], ratios[-1])]
        ax.plot(costs, [place, place], color=colour, linewidth=1.5, alpha=0.6)
        ax.plot([point.cost(middle)], [place], "o", color=colour, markersize=5)
    plotting.rows_axis(ax, [_with_seeds(point) for point in ordered])
    if any(point.reach.reached for point in points):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("forward + c x backward, in forward passes (log scale)")
    ax.set_title(f"cost to {task.label}: left is better")


def _with_seeds(point: Point) -> str:
    """Return the name, and how many seeds got there where not all did."""
    reach = point.reach
    if reach.reached == reach.seeds:
        return point.line.series
    return f"{point.line.series} ({reach.reached} of {reach.seeds} seeds)"
