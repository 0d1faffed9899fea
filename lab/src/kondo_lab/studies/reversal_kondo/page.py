"""The tables of docs/results/studies/reversal-kondo.md; `page_tables` writes them."""

import pandas as pd

from kondo_lab.evidence import page_tables
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.reversal_kondo.analysis import ONLINE, SOLVED_NOW, SOLVED_SO_FAR
from kondo_lab.studies.reversal_kondo.settings import Settings

SPEED = "speed-up over PG to 25% error, "
BACKWARD = "backward passes at the end"


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by what is in it, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    sizes = f"{ONLINE} at the end, H={settings.length}, by M"
    return {
        "fig8": page_tables.by_series(headline, "Kondo Fig 8", ONLINE, "step"),
        "fig8 backward": _backward(headline),
        "fig10 now": page_tables.by_x(headline, "Kondo Fig 10", SOLVED_NOW, "forward passes"),
        "fig10 so far": page_tables.by_x(headline, "Kondo Fig 10", SOLVED_SO_FAR, "forward passes"),
        "speed-up": _speed(headline),
        "vocabularies": page_tables.by_x(headline, "Kondo section 5", sizes, "M"),
        "orders": page_tables.orders(headline),
    }


def _backward(headline: pd.DataFrame) -> str:
    own = headline[headline["metric"] == BACKWARD]
    rows = []
    for series, seeds in zip(own["series"], own["seeds"], strict=True):
        rows.append([series, page_tables.cell(own, paper=True, series=series), str(seeds)])
    return markdown(["series", "backward passes of 1M", "seeds"], rows)


def _speed(headline: pd.DataFrame) -> str:
    """Return the speed-ups: a row for each task and series, a column for each cost."""
    own = headline[headline["metric"].str.startswith(SPEED)]
    own = own.assign(x=own["x"].astype(float))
    costs = sorted(own["x"].unique())
    rows = []
    for (metric, series), lines in own.groupby(["metric", "series"], sort=False):
        told = [page_tables.cell(lines, x=cost) for cost in costs]
        rows.append([metric.removeprefix(SPEED), series, *told])
    return markdown(["task", "series", *(f"c = {cost:g}" for cost in costs)], rows)
