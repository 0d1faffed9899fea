"""Figures in one style: error against what was paid, and where a learner step's time goes."""

import io
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo_lab.summary import CurvePoint, Row, RunResult, curve

# Okabe and Ito's colours differ for colour-blind readers; dashes differ in black and white.
STYLES = {"PG": ("#5a5a5a", (0, (5, 2))), "DG": ("#0072b2", (0, (5, 1, 1, 1)))}
FURTHER_STYLES = [("#d55e00", "-"), ("#009e73", (0, (1, 1))), ("#cc79a7", (0, (3, 1, 1, 1)))]
STAGES = {"gate": "#e69f00", "forward": "#56b4e9", "backward": "#0072b2"}
HATCHES = {"gate": "", "forward": "//", "backward": ""}

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.5,
}
DPI = 160


class Panel(NamedTuple):
    """One drawing with its title."""

    title: str
    draw: Callable[[Axes], None]


def panels(results: Sequence[RunResult], rows: Sequence[Row]) -> list[list[Panel]]:
    """Return the panels of each task, one list per task."""
    return [
        [
            Panel(f"{task}: error by samples", partial(_by_samples, task=task, results=results)),
            Panel(
                f"{task}: error by backward passes",
                partial(_by_backward, task=task, results=results),
            ),
            Panel(f"{task}: time of a step", partial(_times, task=task, rows=rows)),
        ]
        for task in dict.fromkeys(row.task for row in rows)
    ]


def write_figure(path: Path, grid: Sequence[Sequence[Panel]]) -> None:
    """Draw all panels into one PNG, a row of panels per task."""
    columns = max(len(line) for line in grid)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(4.3 * columns, 3.4 * len(grid)), layout="constrained")
        axes = figure.subplots(len(grid), columns, squeeze=False)
        for line, places in zip(grid, axes, strict=True):
            for panel, ax in zip(line, places, strict=True):
                panel.draw(ax)
                ax.set_title(panel.title)
        _save(figure, path)


def png(panel: Panel) -> bytes:
    """Draw one panel alone, without its title, as PNG."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(4.3, 3.2), layout="constrained")
        panel.draw(figure.subplots())
        buffer = io.BytesIO()
        _save(figure, buffer)
        return buffer.getvalue()


def _save(figure: Figure, target: Any) -> None:
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has set
    # Without the version in it, the same results give the same file.
    figure.savefig(target, dpi=DPI, format="png", metadata={"Software": None})


def _by_samples(ax: Axes, task: str, results: Sequence[RunResult]) -> None:
    _curves(ax, task, results, lambda point: point.samples)
    ax.set_xlabel("samples seen")
    ax.xaxis.set_major_formatter(_thousands)
    ax.legend()


def _by_backward(ax: Axes, task: str, results: Sequence[RunResult]) -> None:
    _curves(ax, task, results, lambda point: point.backward_passes)
    ax.set_xscale("log")
    ax.set_xlabel("backward passes paid (log scale)")


def _curves(
    ax: Axes, task: str, results: Sequence[RunResult], x: Callable[[CurvePoint], int]
) -> None:
    """Draw each method's mean error over seeds, with a band of one standard error."""
    chosen = [result for result in results if result.task == task]
    methods = list(dict.fromkeys(result.method for result in chosen))
    lowest = 1.0
    for method in methods:
        runs = [curve(result.records) for result in chosen if result.method == method]
        points = list(zip(*runs, strict=True))
        xs = [statistics.fmean(x(point) for point in seeds) for seeds in points]
        means = [statistics.fmean(point.error for point in seeds) for seeds in points]
        errors = [_standard_error([point.error for point in seeds]) for seeds in points]
        colour, dash = style(method, methods)
        ax.plot(xs, means, color=colour, linestyle=dash, label=method)
        low = [max(m - e, 0.5 * m) for m, e in zip(means, errors, strict=True)]
        high = [m + e for m, e in zip(means, errors, strict=True)]
        ax.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
        lowest = min([lowest, *(mean for mean in means if mean > 0)])
    ax.set_yscale("log")
    ax.set_ylim(0.7 * lowest, 1.15)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(_percent)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("online error (log scale)")


def _times(ax: Axes, task: str, rows: Sequence[Row]) -> None:
    """Draw the milliseconds of one learner step as stacked bars."""
    chosen = [row for row in rows if row.task == task][::-1]  # first method on top
    names = [row.method for row in chosen]
    left = [0.0] * len(chosen)
    for stage, colour in STAGES.items():
        widths = [1e3 * row.seconds[stage] / row.num_steps for row in chosen]
        ax.barh(
            names,
            widths,
            left=left,
            height=0.6,
            color=colour,
            hatch=HATCHES[stage],
            edgecolor="white",
            linewidth=0,
            label=stage,
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for name, end, row in zip(names, left, chosen, strict=True):
        text = f"{row.speed_up:.2f}x"
        ax.annotate(text, (end, name), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.2 * max(left))
    ax.set_xlabel("learner milliseconds per step (label: speed-up)")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=3, fontsize=9)


def style(method: str, methods: Sequence[str]) -> tuple[str, Any]:
    """Return a method's colour and dash: fixed for the dense ones, by order for others."""
    if method in STYLES:
        return STYLES[method]
    others = [name for name in methods if name not in STYLES]
    return FURTHER_STYLES[others.index(method) % len(FURTHER_STYLES)]


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))


def _percent(value: float, _: float) -> str:
    return f"{100 * value:g}%"


def _thousands(value: float, _: float) -> str:
    return f"{value / 1000:g}k" if value else "0"
