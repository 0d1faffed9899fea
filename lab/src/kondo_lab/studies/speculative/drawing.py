"""One figure per rate: agreement over training, and every screen's agreement, error and cost."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.speculative.points import AGREEMENT, Point
from kondo_lab.studies.speculative.settings import Settings

COLOURS = {
    "exact": plotting.BLACK,
    "noisy": plotting.VERMILLION,
    "noisy alone": plotting.ORANGE,
    "stale": plotting.BLUE,
    "quantised": plotting.GREEN,
    "narrow": plotting.PINK,
    "advantage only": plotting.PURPLE,
}
"""By family of screens."""
PANELS = {
    "noise on the logits": ("noisy", "noisy alone"),
    "old copies, advantage only": ("stale", "advantage only"),
    "fewer bits, narrower networks": ("quantised", "narrow"),
}
"""Panels of agreement over training, and the families in each."""


def figure(
    records: pd.DataFrame,
    found: Sequence[Point],
    dense: Mapping[str, Estimate],
    settings: Settings,
    ratio: float,
) -> Figure:
    """Draw the screens at one rate."""
    drawn, axes = plotting.grid(2, 3, width=4.2, height=max(3.2, 1.2 + 0.19 * len(found)))
    for ax, (title, families) in zip(axes[0], PANELS.items(), strict=True):
        own = [one for one in found if one.screen.family in families]
        _draw_agreement(ax, records, own, settings)
        ax.set_title(title)
    # The cheapest screen on top.
    ordered = sorted(found, key=lambda one: (np.nan_to_num(one.screen.cost), one.screen.series))
    _draw_rows(axes[1], ordered, dense, settings, ratio)
    seeds = max(one.test.seeds for one in found)
    plotting.head(
        drawn,
        f"{settings.images}, rate {100 * found[0].rate:g}%: screens that stand in for an exact one",
        f"Above: means of {seeds} seeds. Below: bars: one standard error; in brackets: the counted "
        "cost of the screen, forward passes a sample; the cheapest on top. c: cost of a backward "
        "pass in forward passes.",
    )
    return drawn


def _draw_agreement(
    ax: Axes, records: pd.DataFrame, found: Sequence[Point], settings: Settings
) -> None:
    for family in dict.fromkeys(one.screen.family for one in found):
        own = [one for one in found if one.screen.family == family]
        for place, one in enumerate(own):
            series = one.screen.series
            curve = statistics.curve(records, settings.images, series, AGREEMENT, setting=one.rate)
            colour = plotting.shade(COLOURS[family], place / max(1, len(own) - 1))
            ax.plot(curve["step"], curve["mean"], color=colour, linewidth=1.4, label=series)
    ax.set(xscale="log", ylim=(-0.03, 1.03), xlabel="step (log scale)")
    ax.set_ylabel("share of the exact rows kept")
    plotting.label_ends(ax)


def _draw_rows(
    axes: Sequence[Axes],
    ordered: Sequence[Point],
    dense: Mapping[str, Estimate],
    settings: Settings,
    ratio: float,
) -> None:
    """Draw a dot per screen: agreement, error at the end, and cost to the target."""
    agreement, error, cost = axes
    for place, one in enumerate(ordered):
        _dot(agreement, place, one, one.agreement)
        _dot(error, place, one, one.test)
        paid = one.cost(ratio)
        if math.isfinite(paid.mean):
            _dot(cost, place, one, paid)
    names = [_named(one) for one in ordered]
    for ax in axes:
        plotting.rows_axis(ax, names)
    error.set_yticklabels([])
    cost.set_yticks(range(len(ordered)), [_reached(one) for one in ordered], fontsize=7)
    agreement.set(xlim=(-0.03, 1.03), xlabel="share of the exact rows kept")
    agreement.set_title("agreement over training")
    error.set(xscale="log", xlabel="test error at the end (log scale)")
    error.set_title("error: left is better")
    error.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    error.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    error.xaxis.set_minor_formatter(NullFormatter())
    for series, found in dense.items():
        colour = plotting.method_colour(series)
        cost.axvline(found.mean, color=colour, linestyle="--", linewidth=1)
        says = cost.annotate(
            f"{series}, no screen",
            (found.mean, len(ordered) - 0.5),
            xytext=(-3, 3),
            textcoords="offset points",
        )
        says.set(color=colour, rotation=90, va="bottom", ha="right", fontsize=plotting.SMALL)
    cost.set(xscale="log", xlabel="forward passes (log scale)")
    cost.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    cost.xaxis.set_major_formatter(plotting.counts)
    cost.xaxis.set_minor_formatter(NullFormatter())
    cost.set_title(f"cost to {100 * settings.target:g}% test error, c = {ratio:g}")


def _dot(ax: Axes, place: int, one: Point, found: Estimate) -> None:
    bar = np.nan_to_num(found.se)
    ax.errorbar(found.mean, place, xerr=bar, fmt="o", ms=5, color=COLOURS[one.screen.family])


def _named(one: Point) -> str:
    """Return a screen's name with its cost, where it has one."""
    cost = one.screen.cost
    return one.screen.series if math.isnan(cost) else f"{one.screen.series} ({cost:.2g})"


def _reached(one: Point) -> str:
    """Return how many seeds got there, where not all did."""
    reach = one.reach
    return "" if reach.reached == reach.seeds else f"{reach.reached} of {reach.seeds}"
