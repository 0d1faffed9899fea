"""Measured beside counted: speed-ups per step, and to a quality, against the paper's curve."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.measured import run
from kondo_lab.studies.measured.claims import claims
from kondo_lab.studies.measured.quality import PAPER_DG, TARGET, StepGain, paper_speed_up, step_gain
from kondo_lab.studies.measured.run import DG, EXACT, FREE, LEARNER, LOOP, PG
from kondo_lab.studies.measured.settings import BanditShape, Settings, Shape
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline

BEYOND, FIG_3 = "beyond the paper", "Kondo Fig 3, counted"
COLOURS = {FREE: "#d55e00", EXACT: "#009e73", DG: "#0072b2"}
P80_DEVIATIONS = 0.8416
"""Standard deviations between a normal's median and its 80th percentile."""


class Spread(NamedTuple):
    """Percentiles over rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int

    @property
    def se(self) -> float:
        """Of the median of a normal sample as wide: one slow round in twenty must not set it."""
        deviation = (self.p80 - self.p20) / (2 * P80_DEVIATIONS)
        return math.sqrt(math.pi / 2 / self.rounds) * deviation

    def times(self, factor: float) -> "Spread":
        """Return the percentiles of the metric times a constant."""
        return Spread(factor * self.p20, factor * self.p50, factor * self.p80, self.rounds)


def spread(records: pd.DataFrame, shape: Shape, series: str, metric: str) -> Spread:
    """Return the percentiles over rounds of a metric of a workload."""
    values = statistics.select(records, shape.name, series, metric)["value"]
    p20, p50, p80 = (float(values.quantile(share)) for share in (0.2, 0.5, 0.8))
    return Spread(p20, p50, p80, len(values))


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    timed = set(records[records["metric"] == LEARNER]["part"])
    shapes = [shape for shape in settings.shapes if shape.name in timed]
    if not shapes:
        return Analysis(headline=[], figures={}, findings=_left_out(records))
    gain = step_gain()
    bandits = [shape for shape in shapes if isinstance(shape, BanditShape)]
    figures = {"speed-up-per-step": _step_figure(records, shapes)}
    if bandits:
        figures["speed-up-to-quality"] = _quality_figure(records, bandits, gain)
    lines = [line for shape in shapes for line in _lines(records, shape, gain)]
    return Analysis(
        headline=lines,
        claims=claims(lines),
        figures=figures,
        findings=[*_findings(records, shapes, gain), *_left_out(records)],
    )


def _lines(records: pd.DataFrame, shape: Shape, gain: StepGain) -> list[Headline]:
    def line(
        series: str,
        metric: str,
        *,
        suffix: str = "",
        steps: float = 1.0,
        counted: float | None = None,
    ) -> Headline:
        found = spread(records, shape, series, metric).times(steps)
        figure = BEYOND if counted is None else FIG_3
        ours = Estimate(found.p50, found.se, found.rounds)
        # The paper counts passes and says nothing of seconds: its formula at our c is no claim of
        # its own about this clock.
        at = (figure, series, metric + suffix, shape.name)
        return headline(*at, ours, expected=counted, against="formula")

    lines = [line(PG, run.COST_RATIO), line(PG, "seconds learner")]
    lines += [line(series, metric) for metric in (LEARNER, LOOP) for series in (FREE, EXACT)]
    if isinstance(shape, BanditShape):
        # The paper's gate pays a forward for every sample, as an exact screen does.
        counted = {DG: PAPER_DG, EXACT: paper_speed_up(lines[0].ours)}
        for metric, by_count in ((LEARNER, counted), (LOOP, {})):
            lines += [
                line(
                    s, metric, suffix=f" over PG to {TARGET}", steps=steps, counted=by_count.get(s)
                )
                for s, steps in gain.by_series.items()
            ]
    return lines


def _findings(records: pd.DataFrame, shapes: Sequence[Shape], gain: StepGain) -> list[str]:
    ratios = {shape.name: spread(records, shape, PG, run.COST_RATIO).p50 for shape in shapes}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return [
        f"A backward costs {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most}) forwards, "
        f"by the clock.",
        *(
            _where_it_pays(records, shapes, series, metric, what)
            for metric, what in ((LEARNER, "learner"), (LOOP, "whole loop"))
            for series in (FREE, EXACT)
        ),
        f"Speed-ups to {TARGET} are those of a step times {gain.gate:.3g} (DG-K) and "
        f"{gain.dg:.3g} (DG), PG's steps over the method's, from {gain.source}.",
    ]


def _where_it_pays(
    records: pd.DataFrame, shapes: Sequence[Shape], series: str, metric: str, what: str
) -> str:
    """Name the workloads where a step takes longer than PG's, and the one that gains most."""
    found = {shape.name: spread(records, shape, series, metric).p50 for shape in shapes}
    slower = [f"{name} ({ratio:.2f}x)" for name, ratio in found.items() if ratio < 1]
    best = max(shapes, key=lambda shape: found[shape.name])
    says = f"{series}, {what}: at best {found[best.name]:.2f}x ({best.name}"
    if metric == LEARNER:
        says += f"; counted {spread(records, best, series, run.COUNTED).p50:.2f}x"
    if not slower:
        return f"{says}); no workload is slower than PG."
    return f"{says}). It does not pay on {len(slower)} of {len(shapes)}: {', '.join(slower)}."


def _left_out(records: pd.DataFrame) -> list[str]:
    names = records[records["metric"] == run.LEFT_OUT]["part"].tolist()
    return [f"Too large for this device, not timed: {', '.join(names)}."] if names else []


def _step_figure(records: pd.DataFrame, shapes: Sequence[Shape]) -> Figure:
    """Draw speed-ups by PG's step; and measured against counted: on the diagonal both agree."""
    figure, ((learner, loop, diagonal),) = plotting.grid(1, 3, width=4.3, height=3.8)
    for series in (FREE, EXACT):
        for shape in shapes:
            dense = 1e3 * spread(records, shape, PG, "seconds learner").p50
            counted = spread(records, shape, series, run.COUNTED).p50
            by_step, by_loop = (spread(records, shape, series, m) for m in (LEARNER, LOOP))
            _point(learner, dense, by_step, series, shape)
            _point(loop, dense, by_loop, series, shape)
            _point(diagonal, counted, by_step, series, shape)
    for ax, metric in ((learner, LEARNER), (loop, LOOP)):
        _speed_up_axis(ax, f"{metric} over PG, per step")
        _log_x(ax, "PG's learner step, milliseconds")
        ax.set_title("learner alone" if metric == LEARNER else "with sampling and Adam")
    counts = [
        spread(records, s, series, run.COUNTED).p50 for s in shapes for series in (FREE, EXACT)
    ]
    ends = [1.0, max(counts)]
    diagonal.plot(ends, ends, color="#5a5a5a", linestyle=":", linewidth=1)
    _speed_up_axis(diagonal, "learner speed-up measured")
    _log_x(diagonal, "learner speed-up counted", "x")
    diagonal.set_title("measured against counted")
    plotting.legend_below(figure, learner, columns=4, size=9)
    return figure


def _quality_figure(records: pd.DataFrame, shapes: Sequence[BanditShape], gain: StepGain) -> Figure:
    """Kondo Fig 3 with a point for each workload, at the cost ratio the clock gives it."""
    figure, axes = plotting.grid(1, 2, width=5.6, height=4.4)
    measured = [spread(records, shape, PG, run.COST_RATIO).p50 for shape in shapes]
    ratios = np.linspace(0, max(8.0, *measured), 100)
    for ax, metric in zip(axes[0], (LEARNER, LOOP), strict=True):
        ax.plot(ratios, [paper_speed_up(c) for c in ratios], "k-", label="DG-K 3%, paper (counted)")
        ax.plot(ratios, np.full_like(ratios, PAPER_DG), "k--", label="DG, paper (counted)")
        for series, steps in gain.by_series.items():
            for ratio, shape in zip(measured, shapes, strict=True):
                _point(
                    ax, ratio, spread(records, shape, series, metric).times(steps), series, shape
                )
        _speed_up_axis(ax, f"{metric} over PG to {TARGET}")
        ax.set(xlabel="seconds of a backward / of a forward, c")
        ax.set_title("lines counted, dots by the clock")
    plotting.legend_below(figure, axes[0, 0], columns=3, size=9)
    return figure


def _point(ax: Axes, x: float, found: Spread, series: str, shape: Shape) -> None:
    bandit = isinstance(shape, BanditShape)
    ax.errorbar(
        x,
        found.p50,
        yerr=[[found.p50 - found.p20], [found.p80 - found.p50]],
        color=COLOURS[series],
        marker="o" if bandit else "s",
        markersize=5,
        linewidth=1,
        capsize=2,
        label=f"{series}, {'MNIST' if bandit else 'reversal'}",
    )


def _speed_up_axis(ax: Axes, label: str) -> None:
    ax.axhline(1.0, color="#5a5a5a", linewidth=1)
    ax.set_yscale("log")
    _plain_ticks(ax.yaxis, "x")
    ax.set_ylabel(label)


def _log_x(ax: Axes, label: str, sign: str = "") -> None:
    ax.set_xscale("log")
    _plain_ticks(ax.xaxis, sign)
    ax.set_xlabel(label)


def _plain_ticks(axis: Axis, sign: str) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}{sign}")
    axis.set_minor_formatter(NullFormatter())
