"""The figure: reward by rollouts and by learner seconds, and the share of the rows kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.evidence.runs import LEARNER, ROLLOUTS, ROWS, Run
from kondo_lab.studies.lm_gates.arena import Arena, of_seeds
from kondo_lab.training.alone import PLAIN

SHOWN = ("GRPO", "unbiased 10%", "noise 1.5", "DG-K 10%", "PODS 10%")
"""Arms in colour and with a name; the others are grey."""
DASHES = ("-", "--", ":", "-.")
"""By rate, the lowest first."""


def rewards(arenas: Sequence[Arena]) -> Figure:
    """Draw a row of three panels for each field, of the seeds that all arms have.

    Starts differ from seed to seed: means over different seeds are not to be compared.
    """
    figure, axes = plotting.grid(len(arenas), 3, width=3.7, height=3.4)
    grey: list[str] = []
    for row, arena in zip(axes, arenas, strict=True):
        drawn = {name.removesuffix(PLAIN): own for name, own in _of_common_seeds(arena).items()}
        # A small run may have none of those: then all are told apart.
        names = [name for name in drawn if name in SHOWN] or list(drawn)
        grey += [name for name in drawn if name not in names and name not in grey]
        for name, several in drawn.items():
            draw_runs(row[0], several, ROLLOUTS, name, names)
            draw_runs(row[1], several, LEARNER, name, names)
            _draw_kept(row[2], several, name, names)
        row[0].set(ylabel="held-out reward", title=f"{arena.field.name}: by rollouts")
        row[1].set(title="by learner seconds")
        row[2].set(ylabel="share of rows kept (log)", yscale="log", title="rows kept")
        row[2].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        for ax, label in zip(row, (ROLLOUTS, LEARNER, ROLLOUTS), strict=True):
            ax.set_xlabel(label)
            ax.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(row[1])
        plotting.label_ends(row[2])
    others = f" Grey: {', '.join(grey)}." if grey else ""
    says = "Reward while training, and the share of rows that each gate keeps"
    note = f"Mean over the seeds that all have, band: one standard error.{others}"
    plotting.head(figure, says, note)
    return figure


def _of_common_seeds(arena: Arena) -> dict[str, list[Run]]:
    """Return the runs of the seeds that all series have; all runs where there is no such seed."""
    common = set.intersection(*({own.seed for own in runs} for runs in arena.runs.values()))
    if not common:
        return arena.runs
    return {name: of_seeds(several, common) for name, several in arena.runs.items()}


def kept_shares(run: Run) -> np.ndarray:
    """Return the share of the rows that was kept between evaluations, one number for each."""
    shares: np.ndarray = np.diff(run.costs[ROWS]) / np.diff(run.costs[ROLLOUTS])
    return shares


def _draw_kept(ax: Axes, several: Sequence[Run], name: str, among: Sequence[str]) -> None:
    shared = min(len(own.steps) for own in several)
    means = np.mean([kept_shares(own)[: shared - 1] for own in several], axis=0)
    xs = several[0].costs[ROLLOUTS][1:shared]
    if name in among:
        colour, dash = look(name, among)
        ax.plot(xs, means, color=colour, linestyle=dash, label=name)
    else:
        ax.plot(xs, means, color=plotting.FAINT, linewidth=1, zorder=1)


def family(series: str) -> str:
    """Return an arm's name without rate, noise or temperature.

    Example:
        >>> from kondo_lab.studies.lm_gates.drawing import family
        >>> family("DG-K exact 3%"), family("DG, eta 0.1"), family("PG"), family("noise 1.5")
        ('DG-K exact', 'DG', 'PG', 'noise')
    """
    head, _, tail = series.rpartition(" ")
    return head if tail.endswith("%") or head == "noise" else series.partition(",")[0]


def draw_runs(ax: Axes, runs: Sequence[Run], axis: str, name: str, among: Sequence[str]) -> None:
    """Draw the mean reward of a series' seeds against a cost, with a band of a standard error.

    A series that is not `among` those to be told apart is drawn thin, grey and without a name.
    """
    shared = min(len(own.steps) for own in runs)
    rewards = np.stack([own.reward[:shared] for own in runs])
    paid = np.mean([own.costs[axis][:shared] for own in runs], axis=0)
    means = rewards.mean(axis=0)
    # Step 0 costs nothing, which a log axis has no place for.
    first = 0 if axis == ROLLOUTS else 1
    if name not in among:
        ax.plot(paid[first:], means[first:], color=plotting.FAINT, linewidth=1, zorder=1)
        return
    errors = rewards.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else 0 * means
    colour, dash = look(name, among)
    ax.plot(paid[first:], means[first:], color=colour, linestyle=dash, label=name)
    plotting.band(ax, paid[first:], means[first:], errors[first:], colour=colour)


def look(name: str, among: Sequence[str]) -> tuple[Any, str]:
    """Return a series' colour, by method, and dash, by place within its family."""
    same = [other for other in among if family(other) == family(name)]
    return plotting.method_colour(family(name)), DASHES[same.index(name) % len(DASHES)]
