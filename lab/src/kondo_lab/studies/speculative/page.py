"""The table of docs/results/studies/speculative.md; `page_tables` writes it."""

from functools import partial

import pandas as pd

from kondo_lab.evidence.page_tables import cell, lines
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.speculative import drafts
from kondo_lab.studies.speculative.settings import Settings

COST = "counted cost to 5% test error, c = 2"


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by name, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    columns = ["screen"]
    for rate in settings.rates:
        name = f"{100 * rate:g}%"
        columns += [f"agreement, {name}", f"test error, {name}", f"cost, {name}"]
    rows = []
    for screen in drafts.screens(settings):
        row = [screen.series]
        for rate in settings.rates:
            row += _screen(headline, settings, screen.series, rate)
        rows.append(row)
    for series in drafts.DENSE:
        dense = _screen(headline, settings, series, 1.0)
        rows.append([f"{series}, every row", *dense, *[""] * 3 * (len(settings.rates) - 1)])
    return {"screens": markdown(columns, rows)}


def _screen(headline: pd.DataFrame, settings: Settings, series: str, rate: float) -> list[str]:
    """Return agreement, test error and cost; with the cost the seeds that got there if not all."""
    own = lines(headline, figure="beyond the paper", series=series, x=rate)
    told = partial(cell, own)
    cost = told(metric=COST)
    reached = lines(own, metric=COST)["seeds"].tolist()
    if reached and reached[0] < settings.num_seeds:
        cost += f" ({reached[0]} of {settings.num_seeds} seeds)"
    agreement = told(metric="kept agreement over training", error=False)
    return [agreement, told(metric="test error at the end"), cost]
