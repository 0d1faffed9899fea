"""The tables of docs/results/studies/mnist-dg.md; `page_tables` writes them."""

from functools import partial

import pandas as pd

from kondo_lab.evidence.page_tables import cell, lines, number
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.mnist_dg import appendix, paper
from kondo_lab.studies.mnist_dg.analysis import METHODS, ONLINE
from kondo_lab.studies.mnist_dg.run import BASELINES, TO_CE, TO_PG, series
from kondo_lab.studies.mnist_dg.settings import Settings

END = "online error at the end"


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by name, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    return {
        "fig 2": _curves(headline),
        "fig 3": _samples(headline, settings),
        "fig 4a": _directions(headline, "DG Fig 4a", TO_PG, paper.FIG_4A),
        "fig 4b": _directions(headline, "DG Fig 4b", TO_CE, paper.FIG_4B),
        "appendix": _appendix(headline),
    }


def _pair(known: float | None, ours: str) -> str:
    return f"{'-' if known is None else number(known)} / {ours}" if ours else ""


def _curves(headline: pd.DataFrame) -> str:
    rows = []
    for name, points in paper.FIG_2.items():
        at = partial(cell, headline, figure="DG Fig 2", series=name, metric=ONLINE)
        found = [_pair(points.get(step), at(x=step)) for step in paper.FIG_2_STEPS]
        rows.append([name, *found])
    return markdown(["paper / ours at step", *(f"{step:g}" for step in paper.FIG_2_STEPS)], rows)


def _samples(headline: pd.DataFrame, settings: Settings) -> str:
    rows = []
    for baseline in BASELINES:
        for method in METHODS:
            name = series(method, baseline)
            at = partial(cell, headline, figure="DG Fig 3", series=name, metric=END)
            found = [_pair(paper.FIG_3[name].get(s), at(x=s)) for s in settings.samples]
            rows.append([baseline, method, *found])
    exact = cell(headline, figure="DG Fig 3", series="exact PG", metric=END)
    rows.append(["", "exact PG", _pair(paper.EXACT_PG, exact), *[""] * (len(settings.samples) - 1)])
    columns = ["baseline", "paper / ours", *(f"S = {samples}" for samples in settings.samples)]
    return markdown(columns, rows)


def _directions(
    headline: pd.DataFrame,
    figure: str,
    metric: str,
    known: dict[tuple[str, int], dict[int, float]],
) -> str:
    rows = []
    for (method, samples), points in known.items():
        name = f"{method} S={samples}"
        at = partial(cell, headline, figure=figure, series=name, metric=metric)
        rows.append([name, *(_pair(value, at(x=step)) for step, value in points.items())])
    steps = next(iter(known.values()))
    return markdown(["paper / ours at step", *(f"{step:,}" for step in steps)], rows)


def _appendix(headline: pd.DataFrame) -> str:
    rows = []
    for name in (*appendix.SWEPT.values(), "eta"):
        metric = f"{ONLINE} by {name}"
        at = partial(cell, headline, figure=appendix.FIGURE)
        for x in lines(headline, figure=appendix.FIGURE, series="DG", metric=metric)["x"]:
            pg, dg = (at(series=method, metric=metric, x=float(x)) for method in METHODS)
            order = lines(headline, figure=appendix.FIGURE, metric=f"order of {metric}", x=float(x))
            title = "temperature eta" if name == "eta" else name
            rows.append([title, f"{float(x):g}", pg, dg, "".join(order["verdict"])])
    return markdown(["swept", "value", "PG", "DG", "DG below PG"], rows)
