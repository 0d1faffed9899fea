"""Closed form beside Monte Carlo, and two figures."""

import math
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import means
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.bandit_kondo.captions import captions
from kondo_lab.studies.bandit_kondo.claims import claims
from kondo_lab.studies.bandit_kondo.run import BEST, DRAWN, GATE, PG, PG_FITTED
from kondo_lab.studies.bandit_kondo.settings import Settings

BATCH = 100
"""B of the headline's pB."""
ROUNDING = 12
"""Decimals of a number that theory says is zero: below them is float64's rounding."""
VARIANCE = "perpendicular variance"
FEW = 10
"""A share is not compared where fewer kept samples are expected in all."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    lines, figures = found.headline, found.figures
    if "ranking" in there:
        lines += _ranking_lines(records, settings)
        figures["prop2-mixing-threshold"] = _ranking_figure(records, settings)
        found.findings.append(_ranking_finding(settings))
    if "moments" in there:
        lines += _moment_lines(records, settings)
    if "first-success" in there:
        lines += _success_lines(records, settings)
    if "cosine" in there:
        lines += _cosine_lines(records, settings)
        found.findings.append(_cosine_finding(records, settings))
        figures["prop1-cosine"] = _cosine_figure(records, settings)
    if "gate-problem" in there:
        lines += _gate_lines(records, settings)
    if {"moments", "cosine", "first-success"} <= there:
        figures["prop1-variance-and-passes"] = _gradient_figure(records, settings)
    found.claims.extend(claims(found.headline))
    return with_captions(found, captions(found.headline, found.claims))


def _ranking_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    for num_arms in settings.ranking_arms:
        for p in settings.ranking_probs:
            theory = bandit.mixing_threshold(p, num_arms)
            if theory <= 0:
                continue  # any alpha ranks successes first: there is nothing to search
            found = statistics.final(records, "ranking", f"K={num_arms}", "alpha*", setting=p)
            name, known = f"additive, K={num_arms}", round(theory, 3)
            lines.append(
                headline(
                    "Kondo Prop 2", name, "alpha*", p, found, expected=known, against="formula"
                )
            )
    kept = records[records["metric"] == "failures delight keeps"]["value"]
    metric = "failures kept before a success, most in any batch"
    ours = Estimate(float(kept.max()), seeds=settings.ranking_seeds)
    lines.append(
        headline("Kondo Prop 2", "delight", metric, "", ours, expected=0.0, against="formula")
    )
    return lines


def _ranking_finding(settings: Settings) -> str:
    thresholds = [
        bandit.mixing_threshold(p, k) for p in settings.ranking_probs for k in settings.ranking_arms
    ]
    return (
        f"alpha* runs from {min(thresholds):.2f} to {max(thresholds):.2f} over the policies tried; "
        f"delight ranked every success before every failure in all of them."
    )


def _moment_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    for num_arms in settings.moment_arms:
        for p in settings.moment_probs:
            series = f"{PG}, K={num_arms}"
            found = statistics.final(records, "moments", series, VARIANCE, setting=p)
            theory = bandit.perpendicular_variance(p, num_arms, settings.baseline)
            lines.append(_line(series, VARIANCE, p, theory, found))
    gated = records[(records["part"] == "moments") & records["series"].str.startswith(GATE)]
    for metric in (VARIANCE, "1 - cosine of the mean"):
        largest = float(gated[gated["metric"] == metric]["value"].abs().max())
        what = f"{metric}, largest of any p, K and seed, {ROUNDING} decimals"
        ours = Estimate(round(largest, ROUNDING), seeds=settings.seeds)
        lines.append(
            headline("Kondo Prop 1", GATE, what, "", ours, expected=0.0, against="formula")
        )
    for p in settings.moment_probs:
        series = f"{GATE}, K={settings.moment_arms[0]}"
        share = statistics.final(records, "moments", series, "kept share", setting=p)
        paid = Estimate(share.mean * BATCH, share.se * BATCH, share.seeds)
        lines.append(_line(series, f"backward passes of a batch of {BATCH}", p, p * BATCH, paid))
    return lines


def _gate_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """The best weight beside sigmoid((chi - price) / eta), and the share that a gate draws."""
    own = records[records["part"] == "gate-problem"]
    apart = [
        abs(value - _sigmoid(chi - price, eta))
        for price in settings.gate_prices
        for eta in settings.gate_etas
        for chi, value in own[
            (own["series"] == f"eta={eta:g}, price={price:g}") & (own["metric"] == BEST)
        ][["setting", "value"]].itertuples(index=False)
    ]
    steps = math.floor(max(apart) * settings.gate_grid)  # whole steps of the grid
    metric = f"{BEST}: whole steps of 1/{settings.gate_grid} off the sigmoid, most"
    line = partial(headline, "Kondo Eq 1", against="formula")
    lines = [line("every eta, price and delight", metric, "", float(steps), expected=0.0)]
    for eta in settings.gate_etas:
        for chi in settings.gate_delights:
            drawn = settings.gate_draws * settings.seeds
            # Our gate never keeps delight 0, which has no gradient; so few draws say nothing.
            if chi == 0 or _sigmoid(chi, eta) * drawn < FEW:
                continue
            series = f"eta={eta:g}, price=0"
            found = statistics.final(records, "gate-problem", series, DRAWN, setting=chi)
            lines.append(line(series, DRAWN, chi, found, expected=_sigmoid(chi, eta)))
    return lines


def _sigmoid(value: float, eta: float) -> float:
    return 0.5 * (1 + math.tanh(value / (2 * eta)))


def _line(series: str, metric: str, p: float, theory: float, found: Estimate) -> Headline:
    return headline("Kondo Prop 1", series, metric, p, found, expected=theory, against="formula")


def _success_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """With log(1/delta)/p samples a success is there 1 - delta of the time, for log(1/delta)."""
    lines, wait = [], math.log(1 / settings.miss)
    for p in settings.success_probs:
        size = math.ceil(wait / p)
        theory = {
            "share of batches with cosine 1": 1 - (1 - p) ** size,
            "backward passes": p * size,
        }
        for metric, expected in theory.items():
            found = statistics.final(records, "first-success", GATE, metric, setting=p)
            lines.append(_line(f"{GATE}, {wait:.3g} / p samples", metric, p, expected, found))
    return lines


def passes_needed(records: pd.DataFrame, series: str, p: float, target: float) -> float:
    """Return the samples after which the mean over seeds of 1 - cos falls to 1 - target.

    Interpolated in logarithms between two lengths tried; NaN if the longest is too short.
    """
    curve = statistics.curve(records, "cosine", series, "1 - cosine", setting=p)
    gaps, lengths = curve["mean"].to_numpy(), curve["step"].to_numpy()
    below = np.flatnonzero(gaps <= 1 - target)
    if len(below) == 0 or below[0] == 0:
        return math.nan
    pair = slice(below[0] - 1, below[0] + 1)
    # np.interp wants its x rising; gaps fall.
    found = np.interp(math.log(1 - target), np.log(gaps[pair])[::-1], np.log(lengths[pair])[::-1])
    return math.exp(found)


def _exponent(records: pd.DataFrame, series: str, settings: Settings) -> float:
    """Return the slope of log passes against log 1/p, over the p that reach the target."""
    needed = {
        p: passes_needed(records, series, p, settings.cosine_target) for p in settings.cosine_probs
    }
    known = {p: n for p, n in needed.items() if not math.isnan(n)}
    if len(known) < 2:
        return math.nan
    slope = np.polyfit(-np.log(list(known)), np.log(list(known.values())), 1)[0]
    return float(slope)


def _cosine_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    to_target = f"passes to cosine {settings.cosine_target:g}"
    for p in settings.cosine_probs:
        needed = passes_needed(records, PG, p, settings.cosine_target)
        if not math.isnan(needed):
            ours = Estimate(needed, seeds=settings.cosine_seeds)
            lines.append(
                _line(PG, f"backward {to_target}", p, _passes_by_theory(p, settings), ours)
            )
    metric = f"exponent of 1/p in the {to_target}"
    for figure, name, expected in (
        ("Kondo Prop 1", PG, 2.0),
        ("beyond the paper", PG_FITTED, None),
    ):
        ours = Estimate(_exponent(records, name, settings), seeds=settings.cosine_seeds)
        lines.append(headline(figure, name, metric, "", ours, expected=expected, against="formula"))
    return lines


def _passes_by_theory(p: float, settings: Settings) -> float:
    gap = bandit.pg_cosine_gap(p, settings.cosine_arms, settings.baseline, 1.0)
    return gap / (1 - settings.cosine_target)


def _cosine_finding(records: pd.DataFrame, settings: Settings) -> str:
    fixed, fitted = (_exponent(records, name, settings) for name in (PG, PG_FITTED))
    return (
        f"PG's backward passes to cosine {settings.cosine_target:g} grow as (1/p)^{fixed:.2f} with "
        f"the constant baseline b = {settings.baseline:g}, and as (1/p)^{fitted:.2f} with b = p: "
        f"one factor 1/p is the wait for a success, the other the price of a baseline that does "
        f"not follow the policy."
    )


def _gradient_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8)
    _draw_variance(axes[0, 0], records, settings)
    _draw_passes(axes[0, 1], records, settings)
    says = "Perpendicular variance and passes to the true direction: PG, gate at price 0"
    plotting.head(figure, says, "Lines: closed form. Dots and triangles: measured.")
    return figure


def _draw_variance(ax: Axes, records: pd.DataFrame, settings: Settings) -> None:
    ps, measured = np.linspace(0.005, 0.995, 100), settings.moment_probs
    for number, num_arms in enumerate(settings.moment_arms):
        for name, marker in ((PG, "o"), (GATE, "^")):
            colour = plotting.method_colour(name)
            if len(settings.moment_arms) > 1:
                colour = plotting.shade(colour, number / (len(settings.moment_arms) - 1))
            series = f"{name}, K={num_arms}"
            found = means(records, "moments", series, VARIANCE, measured)
            ax.plot(measured, found, marker, color=colour, label=None if name == PG else series)
            if name == PG:
                theory = [bandit.perpendicular_variance(p, num_arms, settings.baseline) for p in ps]
                ax.plot(ps, theory, color=colour, label=series)
    ax.set(title="variance: lower is better", xlabel="p, probability of the correct arm")
    ax.set_ylabel("perpendicular variance per sample")
    ax.legend()


def _cosine_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=6.4, height=4.0)
    ax, arms, baseline = axes[0, 0], settings.cosine_arms, settings.baseline
    for number, p in enumerate(settings.cosine_probs):
        colour = plotting.sequential(number / max(1, len(settings.cosine_probs) - 1))
        curve = statistics.curve(records, "cosine", PG, "1 - cosine", setting=p)
        ax.plot(curve["backward"], curve["mean"], color=colour, label=f"PG, p = {p:g}")
        theory = [bandit.pg_cosine_gap(p, arms, baseline, n) for n in curve["step"]]
        ax.plot(curve["step"], theory, ":", color=colour, linewidth=1)
    ax.axvline(1, color=plotting.method_colour(GATE), linestyle="--")
    ax.set(xscale="log", yscale="log", ylim=(1e-5, 1.5), xlabel="backward passes")
    ax.set_ylabel("1 - cosine to the true gradient: lower is better")
    plotting.label_ends(ax)
    plotting.head(
        figure,
        "Direction of PG's mean gradient by backward passes",
        f"Dotted: closed form. Dashed: {GATE} has the true direction from its first pass on.",
    )
    return figure


def _draw_passes(ax: Axes, records: pd.DataFrame, settings: Settings) -> None:
    probs, target = settings.cosine_probs, settings.cosine_target
    ps = np.geomspace(min(probs), max(probs), 50)
    theory = [_passes_by_theory(p, settings) for p in ps]
    looks = {PG: plotting.method_colour(PG), PG_FITTED: plotting.BLUE}
    ax.plot(ps, theory, color=looks[PG])
    for name, colour in looks.items():
        found = [passes_needed(records, name, p, target) for p in probs]
        ax.plot(probs, found, "o", color=colour, label=name)
    gate = means(records, "first-success", GATE, "backward passes", settings.success_probs)
    label = f"{GATE}, cosine 1 in {100 * (1 - settings.miss):g}% of batches"
    ax.plot(settings.success_probs, gate, "^", color=plotting.method_colour(GATE), label=label)
    ax.set(xscale="log", yscale="log", title=f"passes to cosine {target:g}: lower is better")
    ax.set(xlabel="p, probability of the correct arm (log)", ylabel="backward passes (log)")
    ax.set_ylim(top=10 * ax.get_ylim()[1])  # room for the names
    ax.legend(loc="upper right")


def _ranking_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=6.4, height=4.0)
    ax, probs = axes[0, 0], settings.ranking_probs
    ps = 1 - np.geomspace(0.5, 1e-3, 100)
    for number, num_arms in enumerate(settings.ranking_arms):
        colour = plotting.sequential(number / max(1, len(settings.ranking_arms) - 1))
        found = means(records, "ranking", f"K={num_arms}", "alpha*", probs)
        ax.plot(1 - np.array(probs), found, "o", color=colour)
        theory = [bandit.mixing_threshold(p, num_arms) for p in ps]
        ax.plot(1 - ps, theory, color=colour, label=f"{num_arms} arms")
    ax.set(xscale="log", ylim=(-0.02, 1.0), ylabel="smallest weight alpha of the advantage")
    ax.invert_xaxis()
    ax.set_xlabel("1 - p (log scale): better policies to the right")
    plotting.label_ends(ax)
    plotting.head(
        figure,
        "Weight that an additive priority needs to rank successes first",
        "Lines: closed form. Dots: searched.",
    )
    return figure
