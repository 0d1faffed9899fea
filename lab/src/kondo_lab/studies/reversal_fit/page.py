"""The tables of docs/results/studies/reversal-fit.md; `page_tables` writes them."""

import pandas as pd

from kondo_lab.evidence.table import markdown
from kondo_lab.studies.reversal_fit.analysis import SCORE
from kondo_lab.studies.reversal_fit.claims import WON
from kondo_lab.studies.reversal_fit.settings import Settings

ALL = "all figures, "


def tables(headline: pd.DataFrame, _: Settings) -> dict[str, str]:
    """Return the ranking: pairs by their better score, with those of every figure and what is won.

    Args:
        headline: headline.csv of the run.
    """
    scores = headline[headline["metric"] == SCORE]
    figures = list(scores["figure"].unique())
    figures.sort(key=lambda name: not name.startswith(ALL))
    rows = []
    for pair, own in scores.groupby("series", sort=False):
        found = dict(zip(own["figure"], own["ours"], strict=True))
        (share,) = headline[(headline["metric"] == WON) & (headline["series"] == pair)]["ours"]
        rows.append([str(pair), f"{share:.0%}", *(f"{found[name]:.2f}" for name in figures)])
    return {"ranking": markdown(["pair", "lowest in", *figures], rows)}
