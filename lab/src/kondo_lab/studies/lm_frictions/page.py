"""The tables of docs/results/studies/lm-frictions.md; a test compares the two."""

from collections.abc import Sequence

import pandas as pd

from kondo_lab.evidence.table import markdown
from kondo_lab.studies.lm_frictions.outcomes import Outcomes, outcomes
from kondo_lab.studies.lm_frictions.settings import CLAIMED, FIRST, Settings

RARE_CELLS = ("no friction", "combined", "discovered 1%", "discovered 5%")
ONE_SEED_CELLS = (
    "refresh 16",
    "refresh 16, wrong log-probs",
    "refresh 16, probability one",
    "refresh 16, no log-probs",
    "int8",
    "int4",
    "temperature 0.8",
    "flipped 10%",
    "flipped 20%",
    "flipped 30%",
    "biased 10%",
    "biased 20%",
    "biased 40%",
    "coin 60%",
)


def tables(records: pd.DataFrame, settings: Settings) -> dict[str, str]:
    """Return, by what is in it, every table of rewards at the end, in Markdown."""
    found = {field.name: outcomes(records, settings, field) for field in settings.fields}
    known = {name: own for name, own in found.items() if own is not None}
    first, wrong = [cell.name for cell in FIRST], [cell.name for cell in FIRST[1:3]]
    sorting, addition = known["sorting-3-25m"], known["addition-3-25m"]
    queues = [cell.name for cell in sorting.cells if cell.queue]
    lags = [cell.name for cell in sorting.cells if "lag" in cell.name]
    few, fewest = known["sorting-3-25m-from-5%"], known["sorting-3-25m-from-1%"]
    return {
        "sorting, claims": table(sorting, first, CLAIMED),
        "sorting, others": table(sorting, first, _others(sorting)),
        "sorting, 85m": table(known["sorting-3-85m"], wrong, CLAIMED),
        "addition, claims": table(addition, first, CLAIMED),
        "addition, others": table(addition, first, _others(addition)),
        "multiplication": table(known["multiplication-2-25m"], first, CLAIMED),
        "queues": table(sorting, queues, CLAIMED),
        "lags": table(sorting, lags, CLAIMED),
        "one seed": table(sorting, ONE_SEED_CELLS, CLAIMED),
        "from 5%": table(few, RARE_CELLS, few.arms),
        "from 1%": table(fewest, RARE_CELLS, fewest.arms),
    }


def table(found: Outcomes, cells: Sequence[str], names: Sequence[str]) -> str:
    """Return arms by frictions, mean ± standard error; of one seed the reward alone."""
    rows = [[name, *(_told(found, cell, name) for cell in cells)] for name in names]
    return markdown(["", *cells], rows)


def _told(found: Outcomes, cell: str, name: str) -> str:
    reward = found.reward(cell, name)
    if reward is None:
        return ""
    return f"{reward.mean:.3f} ± {reward.se:.3f}" if reward.seeds > 1 else f"{reward.mean:.3f}"


def _others(found: Outcomes) -> list[str]:
    return [name for name in found.arms if name not in CLAIMED]
