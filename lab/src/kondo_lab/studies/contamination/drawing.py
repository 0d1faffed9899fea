"""Figures: what disfavoured actions do to gradients, and which weights undo it."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting
from kondo_lab.studies.contamination import run, theory
from kondo_lab.studies.contamination.numbers import Numbers
from kondo_lab.studies.contamination.run import dg

BETTER = "delta = 1 - pi(y*); better policy: right"
"""The axis of the figures."""


def _delta_axis(ax: Axes, label: str, **options: str) -> None:
    """Draw better policies to the right."""
    ax.set(xscale="log", **options)
    ax.invert_xaxis()
    ax.set_xlabel(label)


def _colours(numbers: Numbers) -> dict[str, Any]:
    """Return a colour per series: DG by its temperature."""
    etas = numbers.settings.etas
    shades = {dg(eta): plotting.sequential(n / len(etas)) for n, eta in enumerate(sorted(etas))}
    return {name: shades.get(name, plotting.method_colour(name)) for name in numbers.series}


def _draw_exact(ax: Axes, numbers: Numbers, part: str, metric: str) -> None:
    for name, colour in _colours(numbers).items():
        values = numbers.over_errors(name, metric, part)
        ax.plot(numbers.settings.errors, values, "o-", color=colour, markersize=3, label=name)
    _delta_axis(ax, BETTER)


def expected(numbers: Numbers) -> Figure:
    """Draw cosine, signal and gates of the expected gradient by policy."""
    figure, ((cosine, strength, gate),) = plotting.grid(1, 3, width=3.7)
    settings, colours = numbers.settings, _colours(numbers)
    _draw_exact(cosine, numbers, "expected", f"{run.COSINE}, {numbers.where}")
    limit = theory.limit_cosine(settings.arms)
    cosine.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    cosine.set(title="cosine: higher is better", ylabel="cosine to the true gradient")
    _draw_exact(strength, numbers, "expected", f"{run.STRENGTH}, {numbers.where}")
    strength.set(yscale="log", ylabel="|own part| / |contaminated part|")
    strength.set_title("signal: higher is better")
    for eta in settings.etas:
        gates, bounds = (numbers.over_errors(dg(eta), m) for m in (run.GATE, run.BOUND))
        gate.plot(settings.errors, gates, "o", color=colours[dg(eta)], markersize=3.5)
        gate.plot(settings.errors, bounds, "-", color=colours[dg(eta)], lw=1, label=dg(eta))
    _delta_axis(gate, BETTER, yscale="log", title="gate on a wrong arm", ylabel="gate")
    for ax in (cosine, strength, gate):
        plotting.label_ends(ax)
    plotting.head(
        figure,
        "What disfavoured actions do to the expected gradient as the policy improves",
        "Closed form. Left, dotted: PG's limit. Right, dots: the gate; lines: Lemma 1's bound.",
    )
    return figure


def sampled(numbers: Numbers) -> Figure:
    """Draw cosines of batches and the second moment of failures by policy."""
    figure, (axes,) = plotting.grid(1, 3, width=3.7)
    errors, colours = numbers.settings.sampled_errors, _colours(numbers)
    for ax, kind in zip(axes, run.SOURCES, strict=False):
        for name, colour in colours.items():
            found = {e: numbers.sampled(name, run.BATCH_COSINE, kind, e) for e in errors}
            plotting.by_setting(ax, found, name, colour=colour)
        _delta_axis(ax, BETTER, title=f"batches of {numbers.settings.batch}, {kind}")
        ax.set_ylabel("mean cosine to the true gradient")
    ax = axes[2]
    for eta in numbers.settings.etas:
        found = {error: numbers.moment_ratio(eta, error) for error in errors}
        plotting.by_setting(ax, found, dg(eta), colour=colours[dg(eta)])
        bounds = [numbers.overlap(eta, error) for error in errors]
        ax.plot(errors, bounds, ":", color=colours[dg(eta)])
    title, label = "second moment of failures", "DG / PG: lower is better"
    _delta_axis(ax, BETTER, yscale="log", title=title, ylabel=label)
    for ax in axes:
        plotting.label_ends(ax)
    plotting.head(
        figure,
        "What disfavoured actions do to gradients of batches as the policy improves",
        "Mean over seeds, bar: one standard error. Right, dotted: overlap factor, a bound.",
    )
    return figure


def sign_blind(numbers: Numbers) -> Figure:
    """Draw what each weight does to a rare failure and to a rare success."""
    figure, ((ax,),) = plotting.grid(1, 1, width=7.5, height=4.6)
    blind = run.sign_blind(numbers.settings)
    labels = []
    for name in numbers.worlds:
        x, y = (numbers.world(name, metric) for metric in (run.FAILURE, run.SUCCESS))
        if math.isinf(x):
            continue  # a threshold above the rare arms drops them all
        colour = plotting.GREY if name in blind else plotting.method_colour(name)
        ax.plot(x, y, "o" if name in blind else "D", color=colour)
        if name in blind:
            labels.append(plotting.Label(name, x, y, plotting.DARK))
        else:
            place = {"xytext": (2, 6), "textcoords": "offset points", "rotation": 30}
            ax.annotate(name, (x, y), fontsize=plotting.SMALL, color=colour, **place)
    ax.set(xscale="log", yscale="log")
    ax.margins(0.14)
    ax.set(xlabel=run.FAILURE, ylabel=run.SUCCESS)
    plotting.label_ends(ax, labels)
    plotting.head(
        figure,
        "Weights on rare failures and rare successes: upper right is better",
        "Grey: weights that see pi(a) alone, not the sign of the reward.",
    )
    return figure


def contexts(numbers: Numbers) -> Figure:
    """Draw cosines over many contexts by policy."""
    figure, (axes,) = plotting.grid(1, len(numbers.settings.solved), width=3.7)
    for ax, share in zip(axes, numbers.settings.solved, strict=True):
        _draw_exact(ax, numbers, "contexts", f"{run.COSINE}, {share:g} solved")
        title = f"{100 * share:g}% of the contexts solved"
        ax.set(ylim=(0, 1.03), title=title, ylabel="cosine to the true gradient")
        plotting.label_ends(ax)
    says = "Cosine to the true gradient over many contexts: higher is better"
    plotting.head(figure, says, "Closed form. delta is that of the solved contexts.")
    return figure
