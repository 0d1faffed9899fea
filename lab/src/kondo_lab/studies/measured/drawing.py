"""Speed-ups of every workload as a dot plot: of a step, and to a quality."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.studies.measured import run
from kondo_lab.studies.measured.quality import TARGET, StepGain
from kondo_lab.studies.measured.run import DG, EXACT, FREE, LEARNER, LOOP, PG
from kondo_lab.studies.measured.settings import BanditShape, Shape
from kondo_lab.studies.measured.timings import Spread, spread

COLOURS = {FREE: plotting.VERMILLION, EXACT: plotting.ORANGE, DG: plotting.BLUE}
MARKERS = {FREE: "o", EXACT: "s", DG: "D"}
TITLES = {LEARNER: "learner step", LOOP: "whole loop: with sampling and Adam"}
BARS = "Dot: median of {} rounds, bar: 20th to 80th percentile."


def per_step(records: pd.DataFrame, shapes: Sequence[Shape]) -> Figure:
    """Draw each workload's speed-up of a step over PG's, and what counting passes predicts."""
    ordered = _by_gain(records, shapes)
    figure, axes = _panels(records, ordered)
    for ax, metric in zip(axes, (LEARNER, LOOP), strict=True):
        for place, shape in enumerate(ordered):
            found = {name: spread(records, shape, name, metric) for name in (FREE, EXACT)}
            _draw(ax, place, found)
            if metric == LEARNER:
                counted = {name: spread(records, shape, name, run.COUNTED).p50 for name in found}
                _draw_counted(ax, place, counted)
    rounds = spread(records, shapes[0], FREE, LEARNER).rounds
    plotting.head(
        figure,
        "Speed-up of one step over PG's, by the clock: right of 1x is faster",
        f"{BARS.format(rounds)} Tick: speed-up by counted passes. "
        "In brackets: PG's learner step. Sorted by the learner's speed-up.",
        legend=axes[0],
    )
    return figure


def to_quality(records: pd.DataFrame, shapes: Sequence[BanditShape], gain: StepGain) -> Figure:
    """Draw each workload's speed-up to the target; ticks are counted at its cost ratio."""
    ordered = _by_gain(records, shapes)
    figure, axes = _panels(records, ordered)
    for ax, metric in zip(axes, (LEARNER, LOOP), strict=True):
        for place, shape in enumerate(ordered):
            found = {
                name: spread(records, shape, name, metric).times(steps)
                for name, steps in gain.by_series.items()
            }
            _draw(ax, place, found)
            ratio = spread(records, shape, PG, run.COST_RATIO).p50
            _draw_counted(ax, place, {EXACT: gain.counted(ratio)[EXACT]})
    rounds = spread(records, shapes[0], FREE, LEARNER).rounds
    plotting.head(
        figure,
        f"Speed-up over PG to {TARGET}, by the clock: right of 1x is faster",
        f"{BARS.format(rounds)} Tick: the same by counted passes, at the measured cost of a "
        "backward pass. In brackets: PG's learner step.",
        legend=axes[0],
    )
    return figure


def _by_gain(records: pd.DataFrame, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the workloads, that with the largest learner speed-up first."""
    return sorted(shapes, key=lambda shape: -spread(records, shape, FREE, LEARNER).p50)


def _panels(records: pd.DataFrame, ordered: Sequence[Shape]) -> tuple[Figure, Sequence[Axes]]:
    size = {"width": 5.6, "height": 1.7 + 0.27 * len(ordered)}
    figure, (axes,) = plotting.grid(1, 2, **size)
    for ax, title in zip(axes, TITLES.values(), strict=True):
        ax.axvline(1.0, color=plotting.DARK, linewidth=1)
        ax.set(xscale="log", xlabel="speed-up over PG (log scale)", title=title)
        plotting.ratio_ticks(ax.xaxis)
        plotting.rows_axis(ax, [_told(records, shape) for shape in ordered])
    axes[1].set_yticklabels([])
    return figure, axes


def _told(records: pd.DataFrame, shape: Shape) -> str:
    """Return a workload in words, with the milliseconds of PG's learner step."""
    milliseconds = 1e3 * spread(records, shape, PG, "seconds learner").p50
    if isinstance(shape, BanditShape):
        what = f"MNIST, width {shape.width}, batch {shape.batch:,}"
    else:
        what = (
            f"reversal, {shape.num_layers} layers of {shape.width}, length {shape.length}, "
            f"batch {shape.rows:,}"
        )
    return f"{what} ({milliseconds:.{0 if milliseconds >= 10 else 1}f} ms)"


def _draw(ax: Axes, place: float, found: Mapping[str, Spread]) -> None:
    """Draw a workload's speed-ups, one below the other so that no bar hides another."""
    for number, (name, own) in enumerate(found.items()):
        ax.errorbar(
            own.p50,
            place + 0.18 * (number - (len(found) - 1) / 2),
            xerr=[[own.p50 - own.p20], [own.p80 - own.p50]],
            fmt=MARKERS[name],
            color=COLOURS[name],
            markersize=4.5,
            linewidth=1.2,
            label=name if place == 0 else None,
        )


def _draw_counted(ax: Axes, place: float, counted: Mapping[str, float]) -> None:
    for number, (name, value) in enumerate(counted.items()):
        label = "counted" if (place, number) == (0, 0) else None
        ax.plot([value], [place], "|", label=label, color=COLOURS[name], ms=9, mew=1.5)
