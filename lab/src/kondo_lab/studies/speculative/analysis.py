"""Agreement, error and counted cost of every screen."""

import math
from collections.abc import Sequence
from functools import partial

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.speculative import drafts, drawing
from kondo_lab.studies.speculative.captions import caption
from kondo_lab.studies.speculative.claims import claims
from kondo_lab.studies.speculative.drafts import EXACT
from kondo_lab.studies.speculative.points import ONLINE, TEST, Point, dense_cost, measure
from kondo_lab.studies.speculative.settings import Settings

COST_RATIO = 2.0
"""c: forward passes that a backward pass costs."""
PAPER_RATE, PAPER_ONLINE = 0.03, 0.0236
"""Of the exact screen on MNIST at a million forward passes, Kondo Fig 1."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figure."""
    part = settings.images
    found = [
        measure(records, part, screen, rate, settings.target)
        for rate in settings.rates
        for screen in drafts.screens(settings)
    ]
    dense = _dense_costs(records, settings)
    lines = [line for one in found for line in _lines(one, settings)]
    lines += _dense_lines(records, settings, dense) + _screen_costs(settings)
    if part == "mnist":
        at = ("Kondo Fig 1", "DG-K 3%", ONLINE, "1M forward passes")
        lines += [
            headline(*at, one.online, expected=PAPER_ONLINE)
            for one in found
            if one.screen.series == EXACT and math.isclose(one.rate, PAPER_RATE)
        ]
    analysis = Analysis(headline=lines)
    for rate in settings.rates:
        own = [one for one in found if one.rate == rate]
        figure = drawing.figure(records, own, dense, settings, COST_RATIO)
        name = f"{part}-{100 * rate:g}"
        analysis.figures[name] = figure
        analysis.captions[name] = caption(lines, rate, _cost_name(settings))
        analysis.findings.extend(_findings(own, settings))
    analysis.claims.extend(claims(analysis.headline))
    return analysis


def _cost_name(settings: Settings) -> str:
    return f"counted cost to {100 * settings.target:g}% test error, c = {COST_RATIO:g}"


def _lines(one: Point, settings: Settings) -> list[Headline]:
    """Return a screen's lines at a rate; x is the rate."""
    line = partial(headline, "beyond the paper", one.screen.series)
    estimates = {
        "kept agreement over training": one.agreement,
        "kept agreement at the end": one.last_agreement,
        "online error at the end": one.online,
        "test error at the end": one.test,
    }
    found = [line(name, one.rate, value) for name, value in estimates.items()]
    cost = one.cost(COST_RATIO)
    if not math.isnan(cost.mean):
        found.append(line(_cost_name(settings), one.rate, cost))
    return found


def _dense_costs(records: pd.DataFrame, settings: Settings) -> dict[str, Estimate]:
    """Return the cost to the target without a screen, over the seeds that got there, by series."""
    found = {}
    for series in drafts.DENSE:
        reach = statistics.first_reach(records, settings.images, series, TEST, settings.target)
        if reach.reached:
            found[series] = dense_cost(COST_RATIO, reach)
    return found


def _dense_lines(
    records: pd.DataFrame, settings: Settings, costs: dict[str, Estimate]
) -> list[Headline]:
    found = []
    for series in drafts.DENSE:
        line = partial(headline, "beyond the paper", series)
        for metric in (ONLINE, TEST):
            end = statistics.final(records, settings.images, series, metric)
            found.append(line(f"{metric} at the end", 1.0, end))
        if series in costs:
            found.append(line(_cost_name(settings), 1.0, costs[series]))
    return found


def _screen_costs(settings: Settings) -> list[Headline]:
    line = partial(headline, "beyond the paper")
    found = [
        line(screen.series, "screen cost, counted, in forward passes", "", ours=screen.cost)
        for screen in drafts.screens(settings)
        if not math.isnan(screen.cost)
    ]
    metric = "multiplications of a forward, share of the policy's"
    return found + [
        line(f"width {width}", metric, "", ours=drafts.narrow_share(settings, width))
        for width in settings.widths
    ]


def _findings(found: Sequence[Point], settings: Settings) -> list[str]:
    """Return what the screens keep and reach at one rate, and which is cheapest."""
    place = f"{settings.images}, rate {100 * found[0].rate:g}%"
    told = ", ".join(
        f"{one.screen.series} {100 * one.agreement.mean:.3g}% / {100 * one.test.mean:.3g}%"
        for one in found
    )
    first = f"{place}: share of the exact rows kept / test error at the end: {told}."
    target = f"{100 * settings.target:g}% test error"
    costs = {
        one.screen.series: one.cost(COST_RATIO).mean
        for one in found
        if one.reach.reached == one.reach.seeds and not math.isnan(one.screen.cost)
    }
    if not costs:
        return [first, f"{place}: no screen with a known cost got every seed to {target}."]
    best = min(costs, key=lambda series: costs[series])
    exact = f", exact at {costs[EXACT]:,.0f}" if EXACT in costs else ""
    return [
        first,
        f"{place}: {best} gets every seed to {target} for the least counted cost, "
        f"{costs[best]:,.0f} forward passes{exact} (c = {COST_RATIO:g}).",
    ]
