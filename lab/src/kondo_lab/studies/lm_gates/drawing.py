"""The figure: reward by rollouts and by learner seconds, and the share of the rows kept."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.studies.lm_rl.drawing import draw_runs, look
from kondo_lab.studies.lm_rl.runs import LEARNER, ROLLOUTS, ROWS, Arena, Run, of_seeds
from kondo_lab.training.step_seconds import PLAIN

SHOWN = ("GRPO", "unbiased 10%", "noise 1.5", "DG-K 10%", "PODS 10%")
"""Arms in colour and with a name; the others are grey."""


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
