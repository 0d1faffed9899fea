"""The tables of docs/results/studies/reversal-kondo.md; a test compares the two."""

import pandas as pd

from kondo_lab.studies import pages
from kondo_lab.studies.reversal_kondo.analysis import ONLINE, SOLVED_NOW, SOLVED_SO_FAR
from kondo_lab.studies.table import markdown

SPEED = "speed-up over PG to 25% error, "
BACKWARD = "backward passes at the end"


def tables(headline: pd.DataFrame) -> dict[str, str]:
    """Return, by what is in it, every table of numbers of the page.

    Args:
        headline: headline.csv of the run.
    """
    sizes = headline[headline["metric"].str.endswith("by M")]["metric"].iloc[0]
    return {
        "fig8": pages.by_series(headline, "Kondo Fig 8", ONLINE, "step"),
        "fig8 backward": _backward(headline),
        "fig10 now": pages.by_x(headline, "Kondo Fig 10", SOLVED_NOW, "forward passes"),
        "fig10 so far": pages.by_x(headline, "Kondo Fig 10", SOLVED_SO_FAR, "forward passes"),
        "speed-up": _speed(headline),
        "vocabularies": pages.by_x(headline, "Kondo section 5", sizes, "M"),
        "orders": pages.orders(headline),
    }


def _backward(headline: pd.DataFrame) -> str:
    own = headline[headline["metric"] == BACKWARD]
    rows = [[line.series, pages.cell(line), str(line.seeds)] for line in own.itertuples()]
    return markdown(["series", "backward passes of 1M", "seeds"], rows)


def _speed(headline: pd.DataFrame) -> str:
    """Return the speed-ups: a row for each task and series, a column for each cost."""
    own = headline[headline["metric"].str.startswith(SPEED)]
    own = own.assign(x=own["x"].astype(float))
    costs = sorted(own["x"].unique())
    rows = []
    for (metric, series), lines in own.groupby(["metric", "series"], sort=False):
        found = dict(zip(lines["x"], lines["ours"], strict=True))
        rows.append([metric.removeprefix(SPEED), series, *(f"{found[x]:.2f}" for x in costs)])
    return markdown(["task", "series", *(f"c = {cost:g}" for cost in costs)], rows)
