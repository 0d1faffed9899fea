"""Names beside the ends of lines, none on top of another. `plotting` gives them to studies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

SMALL = 8
"""Points of the smallest text of a figure."""


class Label(NamedTuple):
    """A name to write beside what it names."""

    text: str
    x: float
    y: float
    colour: Any


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places at least `gap` apart, in the same order and as near to `wanted` as can be.

    They stay inside [low, high] where that has room for all, and start at `low` where it has not.

    Example:
        >>> from kondo_lab.evidence.end_labels import spread
        >>> spread([0.5, 0.5], gap=0.25, low=0.0, high=1.0)
        [0.375, 0.625]
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    # Less its share of gaps, a place must not fall below its neighbour's: isotonic regression,
    # by pooling neighbours that do into their mean.
    pools: list[list[float]] = []
    for rank, number in enumerate(order):
        pools.append([wanted[number] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    top = max(low, high - gap * (len(wanted) - 1))
    placed = [min(max(each, low), top) + rank * gap for rank, each in enumerate(level)]
    return [placed[order.index(number)] for number in range(len(wanted))]


def label_ends(ax: Axes, labels: Sequence[Label] | None = None, size: float = SMALL) -> None:
    """Write names to the right of a panel, each beside its line's end, none on another.

    Call it when the panel's lines, scales and limits are final. A thin line leads from a name to
    its end where the two are apart.

    Args:
        labels: what to name; the last points of the panel's labelled lines where it is None.
    """
    if labels is None:
        labels = line_ends(ax)
    if not labels:
        return
    ax.get_ylim()  # settles the limits of data drawn so far
    to_share = ax.transScale + ax.transLimits
    ends = [to_share.transform((label.x, label.y)) for label in labels]
    inches = ax.get_figure(root=True).get_size_inches()[1]  # type: ignore[union-attr]
    spec = ax.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec else 1
    # Titles and axis labels leave about three quarters of a panel's height.
    gap = 1.25 * size / 72 / (0.72 * inches / rows)
    places = spread([float(np.clip(end[1], 0, 1)) for end in ends], gap, 0.0, 1.0)
    for label, end, place in zip(labels, ends, places, strict=True):
        ax.annotate(
            label.text,
            xy=(float(end[0]), float(np.clip(end[1], 0, 1))),
            xytext=(1.04, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            fontsize=size,
            va="center",
            # It starts left of the names: from the middle of one it would cross others.
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "lw": 0.5,
                "relpos": (0.0, 0.5),
                "shrinkB": 2,
            },
            annotation_clip=False,
        )


def line_ends(ax: Axes) -> list[Label]:
    """Return the name, colour and rightmost point of every labelled line of a panel."""
    found: dict[str, Label] = {}
    handles, names = ax.get_legend_handles_labels()
    for handle, name in zip(handles, names, strict=True):
        drawn: Any = handle[0] if isinstance(handle, tuple) else handle  # of an error bar
        points = np.asarray(drawn.get_xydata(), dtype=np.float64)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            end = np.argmin(points[:, 0]) if ax.xaxis_inverted() else np.argmax(points[:, 0])
            x, y = points[end]
            found[name] = Label(name, float(x), float(y), drawn.get_color())
    return list(found.values())
