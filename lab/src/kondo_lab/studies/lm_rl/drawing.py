"""Figures: reward against four costs, quality against cost by rate, speed-ups, learning rates."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo_lab.studies import plotting
from kondo_lab.studies.lm_rl.runs import AXES, LEARNER, ROLLOUTS, TOKENS, Arena, Run, SpeedUp

FAMILIES = {
    "GRPO": "#000000",
    "PG": "#5a5a5a",
    "DG": "#0072b2",
    "DG-K": "#d55e00",
    "PODS": "#009e73",
    "random": "#cc79a7",
    "advantage": "#56b4e9",
    "zero-advantage filter": "#e69f00",
    "unbiased": "#0072b2",
    "unbiased |delight|": "#56b4e9",
    "unbiased |advantage|": "#8073ac",
    "noise": "#e69f00",
}
"""Colours; other families have grey."""
BAR_EVERY = 4
"""Evaluations from one bar to the next."""
DASHES = ("-", "--", ":", "-.")
"""By rate, the lowest first."""


def family(series: str) -> str:
    """Return a contender's name without rate, noise or temperature.

    Example:
        >>> from kondo_lab.studies.lm_rl.drawing import family
        >>> family("DG-K exact 3%"), family("DG, eta 0.1"), family("PG"), family("noise 1.5")
        ('DG-K exact', 'DG', 'PG', 'noise')
    """
    head, _, tail = series.rpartition(" ")
    return head if tail.endswith("%") or head == "noise" else series.partition(",")[0]


def curves(arena: Arena, series: Sequence[str], levels: Mapping[str, float]) -> Figure:
    """Draw held-out reward against everything that was paid, with bars of a standard error."""
    known = _known(arena, AXES)
    figure, axes = plotting.grid(len(known) // 2, 2, width=5.2, height=3.4)
    for ax, axis in zip(axes.flat, known, strict=True):
        for name in series:
            if name in arena.runs:
                draw_runs(ax, arena.runs[name], axis, name, series)
        for level in levels.values():
            ax.axhline(level, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_xlabel(axis)
        if axis == ROLLOUTS:
            ax.xaxis.set_major_formatter(plotting.counts)
        else:
            _log(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("held-out reward")
    axes[0, 0].legend(fontsize=6, ncols=2)
    figure.suptitle(arena.name, fontsize=10)
    return figure


def draw_runs(ax: Axes, runs: Sequence[Run], axis: str, name: str, among: Sequence[str]) -> None:
    """Draw the mean reward of a series' seeds against a cost, with bars of a standard error."""
    shared = min(len(own.steps) for own in runs)
    rewards = np.stack([own.reward[:shared] for own in runs])
    paid = np.mean([own.costs[axis][:shared] for own in runs], axis=0)
    means = rewards.mean(axis=0)
    errors = rewards.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else 0 * means
    # Step 0 costs nothing, which a log axis has no place for.
    first = 0 if axis == ROLLOUTS else 1
    colour, dash = look(name, among)
    ax.errorbar(
        paid[first:],
        means[first:],
        errors[first:],
        # Bars of a dozen series stand beside each other, not on each other.
        errorevery=(among.index(name) % BAR_EVERY, BAR_EVERY),
        color=colour,
        linestyle=dash,
        label=name,
        linewidth=1.4,
        elinewidth=0.8,
    )


def look(name: str, among: Sequence[str]) -> tuple[Any, str]:
    """Return a series' colour, by family, and dash, by place within it."""
    same = [other for other in among if family(other) == family(name)]
    return FAMILIES.get(family(name), "#999999"), DASHES[same.index(name) % len(DASHES)]


def frontier(arena: Arena, rates: Mapping[str, float]) -> Figure:
    """Draw the reward at the end against what the run cost; lines join the rates of a family."""
    axes_known = _known(arena, (TOKENS, LEARNER))
    figure, axes = plotting.grid(1, len(axes_known), width=5.2, height=4.2)
    families = list(dict.fromkeys(family(name) for name in arena.runs))
    for ax, axis in zip(axes[0], axes_known, strict=True):
        for number, kind in enumerate(families):
            names = sorted(
                (name for name in arena.runs if family(name) == kind), key=lambda name: rates[name]
            )
            xs = [np.mean([own.costs[axis][-1] for own in arena.runs[name]]) for name in names]
            ys = [np.mean([own.end for own in arena.runs[name]]) for name in names]
            colour = FAMILIES.get(kind, plotting.sequential(number / len(families)))
            marker = "os^Dv<>P"[number % 8]
            ax.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=0.9, label=kind)
        _log(ax)
        ax.set_xlabel(f"{axis} of the run (log scale)")
    axes[0, 0].set_ylabel("held-out reward at the end")
    axes[0, -1].legend(fontsize=6, ncols=2)
    return figure


def _log(ax: Axes) -> None:
    """Make the x axis a log scale with few words on it."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.xaxis.set_minor_formatter(NullFormatter())


def _known(arena: Arena, axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if all(axis in own[0].costs for own in arena.runs.values())]


def speed_ups(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Draw learner and loop speed-ups of a step over dense: field -> series -> both."""
    most = max(map(len, found.values()))
    figure, axes = plotting.grid(1, len(found), width=4.6, height=1.2 + 0.16 * most)
    for ax, (name, by_series) in zip(axes[0], found.items(), strict=True):
        ordered = sorted(by_series, key=lambda series: by_series[series][0])
        places = range(len(ordered))
        learner, whole = zip(*(by_series[series] for series in ordered), strict=True)
        ax.plot(learner, places, "o", color="#d55e00", markersize=4, label="learner")
        ax.plot(whole, places, "s", color="#0072b2", markersize=4, label="whole loop")
        ax.axvline(1, color="#999999", linewidth=0.8)
        ax.set_yticks(places, ordered, fontsize=6)
        _log(ax)
        ax.set(xlabel="seconds of dense GRPO's step / own (log scale)", title=name)
    axes[0, 0].legend(fontsize=8)
    return figure


def sizes(found: Mapping[str, Mapping[str, Mapping[int, SpeedUp]]]) -> Figure:
    """Draw times to a target, dense's over own: axis -> series -> weights of the model -> ratio.

    A ratio that is at most so large, since seeds never got there, has a triangle that points down;
    one of a single seed, which has no error, an empty circle.
    """
    figure, axes = plotting.grid(1, len(found), width=5.2, height=3.8)
    for ax, (axis, by_series) in zip(axes[0], found.items(), strict=True):
        for name, ratios in by_series.items():
            colour, dash = look(name, list(by_series))
            places = sorted(ratios)
            known = [place for place in places if not ratios[place].bound]
            heights, errors = (
                [getattr(ratios[place], part) for place in known] for part in ("value", "se")
            )
            ax.errorbar(known, heights, np.nan_to_num(errors), color=colour, linestyle=dash)
            for place, height, error in zip(known, heights, errors, strict=True):
                face = "white" if np.isnan(error) else colour
                ax.plot(place, height, "o", color=colour, markerfacecolor=face, zorder=3)
            at_most = [place for place in places if ratios[place].bound == "at most"]
            heights = [ratios[place].value for place in at_most]
            ax.plot(at_most, heights, "v", color=colour, alpha=0.5)
            ax.plot([], [], color=colour, linestyle=dash, marker="o", label=name)
        ax.axhline(1, color="#999999", linewidth=0.8)
        _log(ax)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}x")
        ax.set_yticks([0.5, 1, 2, 5])
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("parameters of the model (log scale)")
        ax.set_title(f"{axis} to the target: dense GRPO's / own", fontsize=9)
    axes[0, 0].legend(fontsize=6, ncols=2)
    return figure


def learning_rates(
    tuned: Mapping[str, Mapping[float, float]],
    by_rate: Mapping[str, Mapping[float, float]],
) -> Figure:
    """Draw reward by learning rate of series, and the best learning rate by rate."""
    figure, axes = plotting.grid(1, 2, width=4.8, height=3.8)
    names = list(tuned)
    for name, rewards in tuned.items():
        colour, dash = look(name, names)
        rates = sorted(rewards)
        heights = [rewards[rate] for rate in rates]
        axes[0, 0].plot(rates, heights, color=colour, linestyle=dash, marker=".", label=name)
    axes[0, 0].set_ylabel("held-out reward at the end of tuning")
    axes[0, 0].set_xlabel("learning rate (log scale)")
    for (kind, best), colour in zip(by_rate.items(), plotting.WHEEL, strict=False):
        rates = sorted(best)
        axes[0, 1].plot(rates, [best[rate] for rate in rates], marker="o", color=colour, label=kind)
    axes[0, 1].set(ylabel="best learning rate (log scale)", xlabel="rate of DG-K (log scale)")
    axes[0, 0].set_xscale("log")
    if by_rate:
        axes[0, 1].set(xscale="log", yscale="log")
        axes[0, 1].legend(fontsize=8)
    axes[0, 0].legend(fontsize=6, ncols=2)
    return figure
