"""The tables of docs/results/studies/mnist-kondo.md; `page_tables` writes them."""

from functools import partial

import pandas as pd

from kondo_lab.evidence.page_tables import cell, lines, number
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.mnist_kondo import paper, speed_ups
from kondo_lab.studies.mnist_kondo.analysis import BEARS, FALL
from kondo_lab.studies.mnist_kondo.run import NOISES, SIGNALS, levels
from kondo_lab.studies.mnist_kondo.settings import Settings
from kondo_lab.studies.mnist_kondo.speed_ups import ONLINE
from kondo_lab.training import arms

COSTS = (0, 1, 2, 4, 8)


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by name, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    return {
        "fig 1": _curves(headline),
        "fig 2": _rates(headline, settings),
        "fig 3": _speed_ups(headline),
        "fig 4": _noise(headline, settings),
        "fig 5a": _signals(headline, settings),
        "fig 5b": _mixes(headline, settings),
    }


def _curves(headline: pd.DataFrame) -> str:
    columns = ["forward passes"]
    for series in paper.FIG_1:
        columns += [f"{series}, paper", series]
    rows = []
    for passes in paper.FORWARD:
        row = [f"{passes / 1000:,.0f}k"]
        for series, points in paper.FIG_1.items():
            at = partial(cell, headline, figure="Kondo Fig 1", series=series, metric=ONLINE)
            row += [number(points[passes]), at(x=passes)]
        rows.append(row)
    return markdown(columns, rows)


def _rates(headline: pd.DataFrame, settings: Settings) -> str:
    columns = ["rate", "learning rate", "online error at the end", "paper"]
    columns.append("error at the end over that at two thirds of the steps")
    rows = []
    for rate in settings.rates:
        own = lines(headline, figure="Kondo Fig 2", series=arms.dg_k(rate))
        if not len(own):  # the part was not run
            continue
        (metric,) = own[own["metric"] != FALL]["metric"]
        chosen = metric.rpartition(" ")[2]
        ends, fall = (cell(own, metric=name) for name in (metric, FALL))
        rows.append([f"{100 * rate:g}%", chosen, ends, number(paper.FIG_2_EVENTUALLY, 1), fall])
    return markdown(columns, rows)


def _speed_ups(headline: pd.DataFrame) -> str:
    columns = ["series", "counted", *(f"c = {ratio}" for ratio in COSTS)]
    rows = []
    for series, known in paper.FIG_3.items():
        rows.append([series, "the paper", *(number(known[ratio]) for ratio in COSTS)])
        at = partial(cell, headline, figure="Kondo Fig 3", series=series)
        for definition in speed_ups.DEFINITIONS:
            name = f"{definition.metric}, {definition.rule}"
            if definition == speed_ups.JUDGED:
                name = f"**{name}**, compared"
            found = [at(metric=definition.words, x=ratio) for ratio in COSTS]
            rows.append([series, name, *found])
        own = speed_ups.OF_FIGURE_1
        read = at(metric=f"{own.words}, of the paper's own Fig 1", x=0)
        name = f"{own.metric}, {own.rule}, read off the paper's Figure 1"
        rows.append([series, name, read, *[""] * 4])
    return markdown(columns, rows)


def _noise(headline: pd.DataFrame, settings: Settings) -> str:
    every = sorted({level for way in NOISES for level in levels(settings, way)})
    bears = f"noise at which the error is {BEARS:g}x"
    rows = []
    for way in NOISES:
        for name in ("DG", arms.dg_k(settings.rate)):
            at = partial(cell, headline, series=f"{name}, {way}")
            found = [at(metric=ONLINE, x=level, error=False) for level in every]
            rows.append([f"{name}, {way}", *found, at(metric=bears)])
    return markdown(["noise of size", *(f"{level:g}" for level in every), bears], rows)


def _signals(headline: pd.DataFrame, settings: Settings) -> str:
    rows = []
    for signal in SIGNALS:
        at = partial(cell, headline, figure="Kondo Fig 5a", series=signal, metric=ONLINE)
        found = [at(x=rate) for rate in settings.priority_rates]
        rows.append([signal.replace("|", "\\|"), *found])
    return markdown(["signal", *(f"{100 * rate:g}%" for rate in settings.priority_rates)], rows)


def _mixes(headline: pd.DataFrame, settings: Settings) -> str:
    at = partial(cell, headline, figure="Kondo Fig 5b", series="additive mix", error=False)
    found = [at(metric=ONLINE, x=mix) for mix in settings.mixes]
    twice = at(metric="weight of surprisal at which the error is 2x")
    columns = ["weight of surprisal", *(f"{mix:g}" for mix in settings.mixes), "error 2x at"]
    return markdown(columns, [["online error", *found, twice]])
