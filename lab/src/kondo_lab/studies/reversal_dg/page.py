"""The tables of docs/results/studies/reversal-dg.md; a test compares the two."""

import pandas as pd

from kondo_lab.studies import pages
from kondo_lab.studies.reversal_dg.analysis import ONLINE, SWEEPS

END = f"{ONLINE} at the end"


def tables(headline: pd.DataFrame) -> dict[str, str]:
    """Return, by what is in it, every table of numbers of the page.

    Args:
        headline: headline.csv of the run.
    """
    found = {"fig8": pages.by_series(headline, "DG Fig 8", ONLINE, "step")}
    for part, (final, average, axis) in SWEEPS.items():
        found[part] = pages.by_x(headline, final, END, axis)
        found[f"{part} exponents"] = pages.by_metric(headline, average, axis)
    found["variants"] = pages.by_metric(headline, "DG App D", "variant")
    found["orders"] = pages.orders(headline)
    return found
