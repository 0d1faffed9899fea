"""One figure per rate: agreement over training, error by agreement, cost by screen cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.speculative.points import AGREEMENT, Point
from kondo_lab.studies.speculative.settings import Settings

# Okabe and Ito's colours, a marker each; the screens of a family differ by their dash.
LOOKS = {
    "exact": ("#5a5a5a", "s"),
    "noisy": ("#d55e00", "o"),
    "noisy alone": ("#f0a070", "o"),
    "stale": ("#0072b2", "^"),
    "quantised": ("#009e73", "D"),
    "narrow": ("#cc79a7", "v"),
    "advantage only": ("#e69f00", "P"),
}
DASHES = ("-", (0, (5, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
DENSE_COLOUR = "#999999"


def figure(
    records: pd.DataFrame,
    found: Sequence[Point],
    dense: Mapping[str, tuple[float, int]],
    settings: Settings,
    ratio: float,
) -> Figure:
    """Draw the screens at one rate."""
    drawn, axes = plotting.grid(1, 3, width=4.4, height=4.2)
    _draw_agreement(axes[0, 0], records, found, settings)
    _draw_error(axes[0, 1], found)
    _draw_cost(axes[0, 2], found, dense, settings, ratio)
    lines = axes[0, 0].get_legend_handles_labels()
    drawn.legend(*lines, loc="outside lower center", ncols=8, fontsize=7)
    return drawn


def _draw_agreement(
    ax: Axes, records: pd.DataFrame, found: Sequence[Point], settings: Settings
) -> None:
    seen: Counter[str] = Counter()
    for one in found:
        series, family = one.screen.series, one.screen.family
        curve = statistics.curve(records, settings.images, series, AGREEMENT, setting=one.rate)
        dash = DASHES[seen[family] % len(DASHES)]
        seen[family] += 1
        colour, _ = LOOKS[family]
        ax.plot(curve["step"], curve["mean"], color=colour, linestyle=dash, label=series)
    ax.set(xscale="log", ylim=(-0.03, 1.03), xlabel="step (log scale)")
    ax.set_ylabel("share of the exact rows kept")
    ax.set_title(f"rate {100 * found[0].rate:g}%: kept rows")


def _draw_error(ax: Axes, found: Sequence[Point]) -> None:
    for one in found:
        _mark(ax, one, one.agreement.mean, one.test.mean)
    plotting.log_percent(ax, "test error at the end")
    ax.set(xlabel="share of the exact rows kept, over training", title="error by agreement")


def _draw_cost(
    ax: Axes,
    found: Sequence[Point],
    dense: Mapping[str, tuple[float, int]],
    settings: Settings,
    ratio: float,
) -> None:
    for one in found:
        cost = one.cost(ratio)
        if not math.isnan(cost):
            reach = one.reach
            some = f" ({reach.reached} of {reach.seeds})" if reach.reached < reach.seeds else ""
            _mark(ax, one, one.screen.cost, cost, some)
    for series, (cost, _) in dense.items():
        ax.axhline(cost, color=DENSE_COLOUR, linestyle="--", linewidth=1)
        ax.annotate(f"{series}, no screen", (0, cost), fontsize=7, va="bottom")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(plotting.counts)
    ax.set_xlabel("counted cost of the screen, forward passes a sample")
    ax.set_ylabel("forward passes (log scale)")
    ax.set_title(f"counted cost to {100 * settings.target:g}% test error, c = {ratio:g}")


def _mark(ax: Axes, one: Point, x: float, y: float, note: str = "") -> None:
    colour, marker = LOOKS[one.screen.family]
    ax.plot([x], [y], marker, color=colour)
    name = one.screen.series + note
    ax.annotate(name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
