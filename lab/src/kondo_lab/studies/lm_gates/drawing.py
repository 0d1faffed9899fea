"""The figure: reward by rollouts and by learner seconds, and the share of the rows kept."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.language.step_seconds import PLAIN
from kondo_lab.studies import plotting
from kondo_lab.studies.lm_rl.drawing import draw_runs, look
from kondo_lab.studies.lm_rl.runs import LEARNER, ROLLOUTS, ROWS, Arena, Run, of_seeds


def rewards(arenas: Sequence[Arena]) -> Figure:
    """Draw a row of three panels for each field, of the seeds that all contenders have.

    Starts differ from seed to seed: means over different seeds are not to be compared.
    """
    figure, axes = plotting.grid(len(arenas), 3, width=4.6, height=3.6)
    for row, arena in zip(axes, arenas, strict=True):
        drawn = {name.removesuffix(PLAIN): own for name, own in _of_common_seeds(arena).items()}
        names = list(drawn)
        for name, several in drawn.items():
            draw_runs(row[0], several, ROLLOUTS, name, names)
            draw_runs(row[1], several, LEARNER, name, names)
            _draw_kept(row[2], several, name, names)
        row[0].set(ylabel="held-out reward", title=arena.field.name)
        row[2].set(ylabel="share of rows kept (log scale)", yscale="log")
        row[2].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        for ax, label in zip(row, (ROLLOUTS, LEARNER, ROLLOUTS), strict=True):
            ax.set_xlabel(label)
            ax.xaxis.set_major_formatter(plotting.counts)
    plotting.legend_below(figure, axes[0, 0], columns=5)
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
    colour, dash = look(name, among)
    shared = min(len(own.steps) for own in several)
    means = np.mean([kept_shares(own)[: shared - 1] for own in several], axis=0)
    ax.plot(several[0].costs[ROLLOUTS][1:shared], means, color=colour, linestyle=dash, label=name)
