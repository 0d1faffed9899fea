"""The tables of docs/results/studies/reversal-dg.md; `page_tables` writes them."""

import pandas as pd

from kondo_lab.evidence import page_tables
from kondo_lab.studies.reversal_dg.analysis import ONLINE, SWEEPS
from kondo_lab.studies.reversal_dg.settings import Settings

END = f"{ONLINE} at the end"


def tables(headline: pd.DataFrame, _: Settings) -> dict[str, str]:
    """Return, by what is in it, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
    """
    found = {"fig8": page_tables.by_series(headline, "DG Fig 8", ONLINE, "step")}
    for part, (final, average, axis) in SWEEPS.items():
        found[part] = page_tables.by_x(headline, final, END, axis)
        found[f"{part} exponents"] = page_tables.by_metric(headline, average, axis)
    found["variants"] = page_tables.by_metric(headline, "DG App D", "variant")
    found["orders"] = page_tables.orders(headline)
    return found
