"""Figures: reward by selection and loss, and what changes from step to step."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.evidence.study import Estimate


def selections(
    table: Mapping[str, Mapping[str, Estimate]], dense: Mapping[str, Estimate]
) -> Figure:
    """Draw rewards at the end: selection -> loss -> reward; dense ones as lines."""
    figure, axes = plotting.grid(1, 1, width=7.0, height=1.7 + 0.3 * len(table))
    ax = axes[0, 0]
    colours = dict(zip(dense, (plotting.VERMILLION, plotting.BLUE), strict=False))
    # Those with both losses first, the highest on top.
    names = sorted(table, key=lambda name: (-len(table[name]), -_highest(table[name])))
    for shift, (loss, colour) in zip((-0.14, 0.14), colours.items(), strict=False):
        there = [place for place, name in enumerate(names) if loss in table[name]]
        found = [table[names[place]][loss] for place in there]
        errors = np.nan_to_num([each.se for each in found])
        means, places = [each.mean for each in found], [place + shift for place in there]
        label = f"{loss} loss"
        ax.errorbar(means, places, xerr=errors, fmt="o", color=colour, markersize=4, label=label)
        own = f"dense {loss}, {dense[loss].mean:.2f}"
        ax.axvline(dense[loss].mean, color=colour, linewidth=1, linestyle="--", label=own)
    plotting.rows_axis(ax, names, size=9)
    ax.set_xlabel("held-out reward at the end: right is better")
    seeds = max(each.seeds for own in table.values() for each in own.values())
    note = f"Mean of up to {seeds} seeds, bar: one standard error. Dashed: no selection."
    says = "Reward at the end by what selects the samples to train on"
    plotting.head(figure, says, note, legend=ax)
    return figure


def _highest(by_loss: Mapping[str, Estimate]) -> float:
    return max(each.mean for each in by_loss.values())


def by_step(
    panels: Mapping[str, Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]],
    label: str,
    says: str,
) -> Figure:
    """Draw panel -> series -> (steps, values) of each seed: means, with a standard error."""
    figure, axes = plotting.grid(1, len(panels), width=max(4.2, 6.5 / len(panels)), height=3.6)
    names = list(dict.fromkeys(name for own in panels.values() for name in own))
    fewest, most = len(names) and 10**9, 0
    for ax, (title, by_series) in zip(axes[0], panels.items(), strict=True):
        for name, several in by_series.items():
            values = np.stack([value for _, value in several])
            errors = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0
            colour, dash = plotting.series_style(name, names)
            mean = values.mean(axis=0)
            ax.plot(several[0][0], mean, color=colour, linestyle=dash, label=name)
            plotting.band(ax, several[0][0], mean, errors * np.ones_like(mean), colour=colour)
            fewest, most = min(fewest, len(values)), max(most, len(values))
        ax.set(xlabel="steps", title=title)
        plotting.label_ends(ax)
    axes[0, 0].set_ylabel(label)
    seeds = f"{most}" if fewest == most else f"{fewest} to {most}"
    plotting.head(figure, says, f"Mean of {seeds} seeds, band: one standard error.")
    return figure
