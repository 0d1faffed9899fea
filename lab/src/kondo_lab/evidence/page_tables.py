"""Tables of result pages, from a run's headline.csv; `kondo_lab.studies.pages` writes them.

A page has a place for each of its tables:

    <!-- table NAME -->
    ...
    <!-- end of table -->

Before the study is run, every place of its page holds `NOT_RUN`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kondo_lab.evidence.table import markdown

_PLACE = re.compile(r"(<!-- table (.+?) -->\n)(.*?)(<!-- end of table -->)", flags=re.DOTALL)
_ORDER = "order of "
MARKS = {"differs": "**differs**", "noisy": "noisy"}
"""What is added to a number; a match needs no word."""
NOT_RUN = "Not run yet."
"""What a place holds before the run."""


# Pages: places and what is in them.


def places(text: str) -> dict[str, str]:
    """Return, by its name, what each place of a page holds.

    Example:
        >>> from kondo_lab.evidence.page_tables import places
        >>> places("<!-- table a -->\\n| 1 |\\n<!-- end of table -->")
        {'a': '| 1 |'}
    """
    return {name: held.rstrip("\n") for _, name, held, _ in _PLACE.findall(text)}


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with its tables replaced.

    Raises:
        ValueError: a table has no place, or a place no table, or two places have one name.
    """
    names = [name for _, name, _, _ in _PLACE.findall(text)]
    if sorted(names) != sorted(tables):
        raise ValueError(
            f"text must have one place for each of the tables {sorted(tables)}, got places for "
            f"{sorted(names)}; write <!-- table NAME --> and <!-- end of table -->."
        )
    return _PLACE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[4]}", text)


def read(path: Path) -> pd.DataFrame:
    """Return a headline.csv; empty texts stay empty."""
    return pd.read_csv(path, keep_default_na=False, na_values={"se": "", "expected": ""})


# Tables of a figure.


def by_x(headline: pd.DataFrame, figure: str, metric: str, x_name: str) -> str:
    """Return a table of one metric of a figure: a row for each x, a column for each series."""
    own = lines(headline, figure=figure, metric=metric)
    names = list(dict.fromkeys(own["series"]))
    rows = []
    for x, of_x in own.assign(x=own["x"].astype(float)).groupby("x"):
        cells = {line["series"]: _told(line, paper=True) for _, line in of_x.iterrows()}
        rows.append([_place(float(str(x))), *(cells.get(name, "") for name in names)])
    return markdown([x_name, *names], rows)


def by_series(headline: pd.DataFrame, figure: str, metric: str, x_name: str) -> str:
    """Return a table of one metric of a figure with a row for each number."""
    rows = []
    for _, line in lines(headline, figure=figure, metric=metric).iterrows():
        known = "" if pd.isna(line["expected"]) else number(line["expected"])
        numbers = [_place(float(line["x"])), known, _number_and_error(line), str(line["seeds"])]
        verdict = MARKS.get(line["verdict"], line["verdict"])
        rows.append([line["series"], *numbers, verdict])
    return markdown(["series", x_name, "paper", "ours", "seeds", "verdict"], rows)


def by_metric(headline: pd.DataFrame, figure: str, first: str) -> str:
    """Return a table of a figure's numbers that have no x: a row for each metric."""
    own = lines(headline, figure=figure)
    own = own[~own["metric"].str.startswith(_ORDER)]
    names = list(dict.fromkeys(own["series"]))
    rows = []
    for metric, of_metric in own.groupby("metric", sort=False):
        cells = {line["series"]: _told(line, paper=True) for _, line in of_metric.iterrows()}
        rows.append([str(metric), *(cells.get(name, "") for name in names)])
    return markdown([first, *names], rows)


def orders(headline: pd.DataFrame) -> str:
    """Return a table of all orders of a run, with their verdicts."""
    own = headline[headline["metric"].str.startswith(_ORDER)]
    rows = [
        [line.figure, line.metric.removeprefix(_ORDER), line.series, str(line.seeds), line.verdict]
        for line in own.itertuples()
    ]
    return markdown(["figure", "of", "order in the paper", "seeds", "verdict"], rows)


# Cells.


def lines(headline: pd.DataFrame, **fields: Any) -> pd.DataFrame:
    """Return the lines with these fields; numbers of x within the digits of the file."""
    chosen = headline
    for name, value in fields.items():
        if isinstance(value, str):
            chosen = chosen[chosen[name] == value]
        else:
            numbers = pd.to_numeric(chosen[name], errors="coerce")
            chosen = chosen[np.isclose(numbers, value, rtol=1e-5, atol=0)]
    return chosen


def cell(headline: pd.DataFrame, *, error: bool = True, paper: bool = False, **fields: Any) -> str:
    """Return the number of a line with its verdict; "" if there is no such line.

    Args:
        headline: lines of headline.csv.
        error: whether its standard error is added.
        paper: whether the expected number is added.
        fields: which line, as in `lines`.
    """
    found = lines(headline, **fields)
    return _told(found.iloc[0], error=error, paper=paper) if len(found) else ""


def number(value: float, digits: int = 3) -> str:
    """Return a number as tables have it, without a 0 before the point.

    Example:
        >>> from kondo_lab.evidence.page_tables import number
        >>> number(0.01712), number(13.235), number(224845.0)
        ('.0171', '13.2', '225,000')
    """
    if not math.isfinite(value):
        return "never" if math.isinf(value) else "-"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return re.sub(r"^(-?)0\.", r"\1.", f"{rounded:,.{places}f}")


def _told(line: "pd.Series[Any]", *, error: bool = True, paper: bool = False) -> str:
    told = _number_and_error(line) if error else number(line["ours"])
    mark = MARKS.get(line["verdict"], "")
    if paper and not pd.isna(line["expected"]):
        remark = [f"paper {number(line['expected'])}", *([mark] if mark else [])]
        return f"{told} ({', '.join(remark)})"
    if mark == MARKS["noisy"]:
        mark = f"({mark})"
    return f"{told} {mark}".rstrip()


def _number_and_error(line: "pd.Series[Any]") -> str:
    told = number(line["ours"])
    return told if pd.isna(line["se"]) else f"{told} ± {number(line['se'], digits=2)}"


def _place(x: float) -> str:
    return f"{x:,.0f}" if x.is_integer() else f"{x:g}"
