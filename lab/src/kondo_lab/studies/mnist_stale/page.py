"""The tables of docs/results/studies/mnist-stale.md; `page_tables` writes them."""

from collections.abc import Sequence
from functools import partial

import pandas as pd

from kondo_lab.evidence.page_tables import cell
from kondo_lab.evidence.table import markdown
from kondo_lab.studies.mnist_stale.analysis import EXACT, FIGURE, NAMES
from kondo_lab.studies.mnist_stale.run import OLDEST, UNIFORM, methods
from kondo_lab.studies.mnist_stale.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR, capped


def tables(headline: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by name, every table of the page in Markdown.

    Args:
        headline: headline.csv of the run.
        settings: of the run.
    """
    return {
        OLDEST: _delays(headline, settings, OLDEST, settings.delays),
        UNIFORM: _delays(headline, settings, UNIFORM, settings.uniform_delays),
    }


def _delays(headline: pd.DataFrame, settings: Settings, part: str, delays: Sequence[int]) -> str:
    metric = f"{LEARNER_ERROR}, {NAMES[part]}, by delay"
    at = partial(cell, headline, figure=FIGURE, metric=metric)
    over = [EXACT, capped(settings.cap)]
    rows = [
        [
            str(delay),
            *(at(series=name, x=delay) for name in methods(settings)),
            *(at(series=f"{name} / DG", x=delay) for name in over),
        ]
        for delay in delays
    ]
    columns = [f"{NAMES[part]}, D", *methods(settings), *(f"{name} / DG" for name in over)]
    return markdown(columns, rows)
