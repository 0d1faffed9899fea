"""Figures: reward against costs, by selection and loss, and what changes from step to step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting
from kondo_lab.studies.lm_rl.runs import ROLLOUTS, Run
from kondo_lab.studies.study import Estimate

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


def selections(
    table: Mapping[str, Mapping[str, Estimate]], dense: Mapping[str, Estimate]
) -> Figure:
    """Draw rewards at the end: selection -> loss -> reward; dense ones as lines."""
    figure, axes = plotting.grid(1, 1, width=6.0, height=1.2 + 0.35 * len(table))
    ax = axes[0, 0]
    colours = dict(zip(dense, ("#d55e00", "#0072b2"), strict=False))
    # Those with both losses first, the highest on top.
    names = sorted(table, key=lambda name: (-len(table[name]), -_highest(table[name])))
    for shift, (loss, colour) in zip((-0.12, 0.12), colours.items(), strict=False):
        there = [place for place, name in enumerate(names) if loss in table[name]]
        found = [table[names[place]][loss] for place in there]
        errors = np.nan_to_num([each.se for each in found])
        means, places = [each.mean for each in found], [place + shift for place in there]
        ax.errorbar(means, places, xerr=errors, fmt="o", color=colour, markersize=4, label=loss)
        ax.axvline(dense[loss].mean, color=colour, linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("held-out reward at the end; dashed: dense")
    ax.legend(fontsize=8, title="loss", title_fontsize=8)
    return figure


def _highest(by_loss: Mapping[str, Estimate]) -> float:
    return max(each.mean for each in by_loss.values())


def by_step(
    panels: Mapping[str, Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]], label: str
) -> Figure:
    """Draw panel -> series -> (steps, values) of each seed: means, with a standard error."""
    figure, axes = plotting.grid(1, len(panels), width=4.6, height=3.6)
    names = list(dict.fromkeys(name for own in panels.values() for name in own))
    for ax, (title, by_series) in zip(axes[0], panels.items(), strict=True):
        for name, several in by_series.items():
            values = np.stack([value for _, value in several])
            errors = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0
            number = names.index(name)
            colour, dash = plotting.WHEEL[number % len(plotting.WHEEL)], DASHES[number // 7 % 4]
            mean = values.mean(axis=0)
            ax.plot(several[0][0], mean, color=colour, linestyle=dash, label=name)
            plotting.band(ax, several[0][0], mean, errors, colour=colour)
        ax.set(xlabel="steps", title=title)
    axes[0, 0].set_ylabel(label)
    plotting.legend_below(figure, axes[0, 0], columns=2 * len(panels), size=7)
    return figure
