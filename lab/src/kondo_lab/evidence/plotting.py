"""One style for the figures of all studies: what a series looks like, axes, labels and the file."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis as MatplotlibAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from kondo.run_files import atomically
from kondo_lab.evidence import statistics
from kondo_lab.evidence.end_labels import SMALL as SMALL
from kondo_lab.evidence.end_labels import Label as Label
from kondo_lab.evidence.end_labels import label_ends as label_ends
from kondo_lab.evidence.study import Estimate

Axis = Literal["step", "forward", "backward"]
"""What a curve of `statistics.curve` can be drawn against."""
MAX_BYTES = 150_000
"""Of a figure's file: results are kept under version control."""
DPIS = (120, 100, 80)
"""Tried in turn until the file is small enough."""
PALETTE_SIZE = 128
"""Colours of a file: enough for smooth edges, and a third of the bytes of full colour."""

# Okabe and Ito's colours differ for colour-blind readers. A method has one colour in all figures.
BLACK, DARK, BLUE, VERMILLION = "#000000", "#5a5a5a", "#0072b2", "#d55e00"
GREEN, PINK, ORANGE, SKY = "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
GREY, FAINT, PURPLE, BROWN = "#999999", "#cfcfcf", "#7b5ea7", "#8c510a"
METHODS = {
    "dense": BLACK,
    "GRPO": BLACK,
    "exact": BLACK,
    "CE": BLACK,
    "cross-entropy": BLACK,
    "PG": DARK,
    "REINFORCE": DARK,
    "DG": BLUE,
    "DG-K": VERMILLION,
    "delight": VERMILLION,
    "top": VERMILLION,
    "DG-K price": ORANGE,
    "price": ORANGE,
    "unbiased": GREEN,
    "noise": SKY,
    "PODS": PINK,
    "variance": PINK,
    "random": GREY,
    "uniform": GREY,
    "advantage": PURPLE,
    "|advantage|": PURPLE,
    "IS": PINK,
    "IS-PG": PINK,
    "IS-PG cap": PURPLE,
    "token ratios": PURPLE,
    "sequence ratios": PINK,
    "PPO": GREEN,
    "PMPO": SKY,
    "zero-advantage filter": BROWN,
}
"""Method -> colour. A series takes the colour of the longest of these names that begins it."""
WHEEL = (BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY, DARK)
"""For series that are no methods, such as settings of one method."""
DASHES = ("-", "--", ":", "-.")
"""Of series of one colour, in their order."""
RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.5,
}


def method_colour(series: str, otherwise: str = GREY) -> str:
    """Return the colour of the method that a series' name begins with.

    Example:
        >>> from kondo_lab.evidence import plotting
        >>> plotting.method_colour("DG-K 3%") == plotting.VERMILLION
        True
        >>> plotting.method_colour("DG, eta 0.5") == plotting.BLUE
        True
    """
    for name in sorted(METHODS, key=len, reverse=True):
        rest = series.removeprefix(name)
        # "DG-K" does not begin with the method DG, nor "PGX" with PG.
        if series.startswith(name) and (not rest or rest[0] in " ,(:="):
            return METHODS[name]
    return otherwise


def series_style(series: str, among: Sequence[str]) -> tuple[str, str]:
    """Return a series' colour and dash; those without a colour of their own have one by order."""
    unknown = [name for name in among if method_colour(name, "") == ""]
    taken = {method_colour(name, "") for name in among}
    free = [colour for colour in WHEEL if colour not in taken] or list(WHEEL)
    wheel = free[unknown.index(series) % len(free)] if series in unknown else GREY
    colour = method_colour(series, wheel)
    same = [name for name in among if method_colour(name, "") == colour]
    return colour, DASHES[same.index(series) % len(DASHES)] if series in same else DASHES[0]


def sequential(share: float) -> Any:
    """Return a colour for something ordered, share in [0, 1] from least to most."""
    # The bright end of the map cannot be read as text on white.
    return mpl.colormaps["viridis"](0.8 * share)


def shade(colour: str, share: float) -> Any:
    """Return a colour lighter or darker, share in [0, 1]: for settings of one method."""
    own = np.array(mpl.colors.to_rgb(colour))
    light, dark = own + 0.3 * (1 - own), 0.45 * own
    return tuple(light + share * (dark - light))


def by_setting(
    ax: Axes, found: Mapping[float, Estimate], label: str, *, colour: Any, **options: Any
) -> None:
    """Draw setting -> estimate as a line with points and bars of one standard error."""
    xs = sorted(found)
    means = [found[x].mean for x in xs]
    errors = np.nan_to_num([found[x].se for x in xs])
    ax.errorbar(
        xs, means, errors, **{"color": colour, "label": label, "marker": "o", "ms": 3.5} | options
    )


def sweep(
    ax: Axes,
    found: Mapping[str, Mapping[float, Estimate]],
    colours: Iterable[Any] | None = None,
) -> None:
    """Draw series -> {setting: estimate}, each as `by_setting` does, in its method's colour."""
    looks = [series_style(name, list(found)) for name in found]
    own = colours or [colour for colour, _ in looks]
    for (name, values), colour, (_, dash) in zip(found.items(), own, looks, strict=False):
        by_setting(ax, values, name, colour=colour, linestyle="-" if colours else dash)


@contextmanager
def style() -> Iterator[None]:
    """Draw in the laboratory's style inside. An analysis is run in it."""
    with mpl.rc_context(RC):
        yield


def grid(
    rows: int, columns: int, *, width: float = 4.3, height: float = 3.4, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its axes, [rows, columns]; sizes in inches of one panel."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def head(
    figure: Figure, says: str, note: str = "", *, legend: Axes | None = None, columns: int = 4
) -> None:
    """Write what the figure shows above it, and below it how to read bars, bands and marks.

    Args:
        legend: the panel whose lines are named below the note, in so many columns.
    """
    figure.suptitle(says, x=0.01, ha="left")
    if legend is not None:
        legend_below(figure, legend, columns, note)
    elif note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=SMALL, color=DARK)


def seeds_note(records: pd.DataFrame, what: str = "band: one standard error") -> str:
    """Return the number of seeds of the series and the meaning of bands, for the note of `head`."""
    series = records.groupby(["part", "series", "setting"], dropna=False)
    fewest, most = (int(count) for count in series["seed"].nunique().agg(["min", "max"]))
    told = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"Mean of {told} seeds, {what}." if most > 1 else "One seed."


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
    colours: Iterable[Any] | None = None,
    known: Mapping[str, Mapping[float, float]] | None = None,
    **options: Any,
) -> None:
    """Draw the curves of several series, and the paper's numbers as crosses.

    Args:
        colours: one per series, in order; those of their methods where it is None.
        known: series -> {x: value}, read off the paper.
        options: of `line`.
    """
    own = colours or [series_style(name, names)[0] for name in names]
    for name, colour in zip(names, own, strict=False):
        curve = statistics.curve(records, part, name, metric, setting=setting)
        line(ax, curve, name, names, x=x, **{"color": colour} | options)
        crosses(ax, (known or {}).get(name, {}), color=colour)


def crosses(ax: Axes, points: Mapping[Any, float], **options: Any) -> None:
    """Draw x -> value as read off the paper."""
    ax.plot(list(points), list(points.values()), "x", **options)


def band(ax: Axes, xs: Any, means: Any, errors: Any, *, colour: Any) -> None:
    """Shade one standard error around the means, never past half of one: axes may be log."""
    means, errors = np.asarray(means), np.nan_to_num(np.asarray(errors))
    low = np.maximum(means - errors, means - 0.5 * np.abs(means))
    ax.fill_between(xs, low, means + errors, color=colour, alpha=0.18, linewidth=0)


def legend_below(figure: Figure, ax: Axes, columns: int, note: str = "") -> None:
    """Name each line of a panel once, below the figure and a note."""
    handles, labels = ax.get_legend_handles_labels()
    once: dict[str, Any] = dict(zip(labels, handles, strict=True))
    # The layout gives a note of its own and a legend the same place: the note is its title.
    drawn = figure.legend(
        once.values(), once.keys(), loc="outside lower center", ncols=columns, title=note or None
    )
    drawn.get_title().set(fontsize=SMALL, color=DARK)


def rows_axis(ax: Axes, names: Sequence[str], size: float = SMALL) -> None:
    """Name the rows of a dot plot on the y axis, the first on top."""
    ax.set_yticks(range(len(names)), names, fontsize=size)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="x", which="minor")


def table(
    ax: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    digits: int = 2,
    cmap: str = "cividis",
) -> None:
    """Draw shares in [0, 1] as shaded cells with their numbers; NaN is left empty."""
    ax.imshow(values, vmin=0, vmax=1, cmap=cmap, aspect="auto")
    shades = mpl.colormaps[cmap]
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            red, green, blue, _ = shades(value)
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            colour = "white" if dark else "black"
            text = f"{value:.{digits}f}"
            ax.text(column, row, text, color=colour, ha="center", va="center", fontsize=SMALL)
    ax.set_xticks(range(len(columns)), columns, fontsize=SMALL)
    ax.set_yticks(range(len(rows)), rows, fontsize=SMALL)
    ax.grid(visible=False)


class _LogTicks(Locator):
    """1, 2, 5 of every decade; round steps where an axis spans less than a decade."""

    def __call__(self) -> Any:
        return self.tick_values(*self.axis.get_view_interval())  # type: ignore[union-attr]

    def tick_values(self, vmin: float, vmax: float) -> Any:
        low, high = sorted((vmin, vmax))
        # Of less than a decade 1, 2 and 5 may leave a single label.
        steps = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
        decades = LogLocator(subs=(1.0, 2.0, 5.0), numticks=20)
        chosen = steps if high < 10 * low else decades
        return [tick for tick in chosen.tick_values(low, high) if low <= tick <= high]


def log_ticks(axis: MatplotlibAxis) -> None:
    """Label a log axis with plain numbers, several of them even if it spans less than a decade."""
    axis.set_major_locator(_LogTicks())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def ratio_ticks(axis: MatplotlibAxis, sign: str = "x") -> None:
    """Label a log axis with plain numbers: 0.5x, 1x, 2x, 5x."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}{sign}")
    axis.set_minor_formatter(NullFormatter())


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
    """Write a PNG of few colours below 150 KB, as sharp as fits. Same figure, same bytes.

    Raises:
        ValueError: it is larger even at the lowest resolution.
    """
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has set
    size = math.inf
    for dpi in DPIS:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=dpi, format="png", metadata={"Software": None})
        with atomically(path) as partial, Image.open(drawn) as image:
            few = image.convert("RGB").quantize(PALETTE_SIZE, method=Image.Quantize.MEDIANCUT)
            few.save(partial, format="png", optimize=True)
            size = partial.stat().st_size
        if size < MAX_BYTES:
            return
    raise ValueError(
        f"figure {path.name} must fit {MAX_BYTES} bytes, got {size} at {DPIS[-1]} dpi; "
        "draw fewer panels or points."
    )
