"""One style for the figures of all studies: what a series looks like, axes, and the file."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo.run_files import atomically
from kondo_lab.studies import statistics
from kondo_lab.studies.study import Estimate

Axis = Literal["step", "forward", "backward"]
"""What a curve of `statistics.curve` can be drawn against."""
MAX_BYTES = 200_000
"""Of a figure's file: results are kept under version control."""
DPIS = (160, 130, 100, 80)
"""Tried in turn until the file is small enough."""

# Okabe and Ito's colours differ for colour-blind readers; dashes differ in black and white.
STYLES = {"PG": ("#5a5a5a", (0, (5, 2))), "DG": ("#0072b2", (0, (5, 1, 1, 1)))}
FURTHER_STYLES = [("#d55e00", "-"), ("#009e73", (0, (1, 1))), ("#cc79a7", (0, (3, 1, 1, 1)))]
WHEEL = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5a5a5a")
"""Okabe and Ito's colours, for series without a colour of their own."""
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


def series_style(series: str, among: Sequence[str]) -> tuple[str, Any]:
    """Return a series' colour and dash: fixed for the dense ones, by order for others."""
    if series in STYLES:
        return STYLES[series]
    others = [name for name in among if name not in STYLES]
    return FURTHER_STYLES[others.index(series) % len(FURTHER_STYLES)]


def sequential(share: float) -> Any:
    """Return a colour for something ordered, share in [0, 1] from least to most."""
    return mpl.colormaps["viridis"](0.9 * share)


def by_setting(ax: Axes, found: Mapping[float, Estimate], label: str, *, colour: Any) -> None:
    """Draw setting -> estimate as a line with points and bars of one standard error."""
    xs = sorted(found)
    means = [found[x].mean for x in xs]
    errors = np.nan_to_num([found[x].se for x in xs])
    ax.errorbar(xs, means, errors, color=colour, label=label, marker="o", markersize=3.5)


def sweep(
    ax: Axes, found: Mapping[str, Mapping[float, Estimate]], colours: Iterable[Any] = WHEEL
) -> None:
    """Draw series -> {setting: estimate}, each as `by_setting` does."""
    for (name, values), colour in zip(found.items(), colours, strict=False):
        by_setting(ax, values, name, colour=colour)


@contextmanager
def style() -> Iterator[None]:
    """Draw in the laboratory's style inside. An analysis is run in it."""
    with mpl.rc_context(RC):
        yield


def grid(rows: int, columns: int, *, width: float = 4.3, height: float = 3.4) -> tuple[Figure, Any]:
    """Return a figure and its axes, [rows, columns]; sizes in inches of one panel."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def line(
    ax: Axes,
    curve: pd.DataFrame,
    series: str,
    among: Sequence[str],
    *,
    x: Axis = "forward",
    **options: Any,
) -> None:
    """Draw a curve of `statistics.curve` with a band of one standard error.

    Args:
        series: its name in the legend.
        among: all series of the figure, in one order: gives each its colour and dash.
        options: of `Axes.plot`, to draw it otherwise.
    """
    colour, dash = series_style(series, among)
    drawn = ax.plot(
        curve[x], curve["mean"], **{"color": colour, "linestyle": dash, "label": series} | options
    )
    band(ax, curve[x], curve["mean"], curve["se"], colour=drawn[0].get_color())


def curves(
    ax: Axes,
    records: pd.DataFrame,
    part: str,
    names: Sequence[str],
    metric: str,
    *,
    x: Axis = "step",
    setting: float | None = None,
    colours: Iterable[Any] = WHEEL,
    known: Mapping[str, Mapping[float, float]] | None = None,
    **options: Any,
) -> None:
    """Draw the curves of several series, and the paper's numbers as crosses.

    Args:
        colours: one per series, in order.
        known: series -> {x: value}, read off the paper.
        options: of `line`.
    """
    for name, colour in zip(names, colours, strict=False):
        own = statistics.curve(records, part, name, metric, setting=setting)
        line(ax, own, name, names, x=x, **{"color": colour, "linestyle": "-"} | options)
        crosses(ax, (known or {}).get(name, {}), color=colour)


def crosses(ax: Axes, points: Mapping[Any, float], **options: Any) -> None:
    """Draw x -> value as read off the paper."""
    ax.plot(list(points), list(points.values()), "x", **options)


def band(ax: Axes, xs: Any, means: Any, errors: Any, *, colour: Any) -> None:
    """Shade one standard error around the means, never past half of one: axes may be log."""
    means, errors = np.asarray(means), np.nan_to_num(np.asarray(errors))
    low = np.maximum(means - errors, means - 0.5 * np.abs(means))
    ax.fill_between(xs, low, means + errors, color=colour, alpha=0.18, linewidth=0)


def legend_below(figure: Figure, ax: Axes, columns: int, size: float = 8) -> None:
    """Name each line of a panel once, below the figure."""
    handles, labels = ax.get_legend_handles_labels()
    once: dict[str, Any] = dict(zip(labels, handles, strict=True))
    figure.legend(
        once.values(), once.keys(), fontsize=size, loc="outside lower center", ncols=columns
    )


def log_percent(ax: Axes, label: str) -> None:
    """Make the y axis an error on a log scale, labelled in percent."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(f"{label} (log scale)")


def counts(value: float, _: float) -> str:
    """Return a number of passes for an axis: 0, 200k, 1M. A formatter of matplotlib's."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def save(figure: Figure, path: Path) -> None:
    """Write a PNG below 200 KB, as sharp as fits. The same figure gives the same bytes.

    Raises:
        ValueError: it is larger even at the lowest resolution.
    """
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has set
    size = math.inf
    for dpi in DPIS:
        with atomically(path) as partial:
            figure.savefig(partial, dpi=dpi, format="png", metadata={"Software": None})
            size = partial.stat().st_size
        if size < MAX_BYTES:
            return
    raise ValueError(
        f"figure {path.name} must fit {MAX_BYTES} bytes, got {size} at {DPIS[-1]} dpi; "
        "draw fewer panels or points."
    )
