"""Put the tables of a result folder into a study's page.

    python -m kondo_lab.studies.pages reversal-fit results/reversal-fit-v1 \\
        docs/results/studies/reversal-fit.md

A page marks where a table goes. Whatever stands between the marks is replaced:

    <!-- table: ranking -->
    <!-- end of table -->

The study's package has a module `page` with `tables(headline)`, name -> Markdown, where `headline`
is the table of headline.csv.
"""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kondo_lab.studies.result_folder import HEADLINE
from kondo_lab.studies.table import markdown

_END = "<!-- end of table -->"
_ORDER = "order of "


def by_x(headline: pd.DataFrame, figure: str, metric: str, x_name: str) -> str:
    """Return a table of one metric of a figure: a row for each x, a column for each series."""
    own = _of(headline, figure, metric)
    names = list(dict.fromkeys(own["series"]))
    rows = []
    for x, lines in own.groupby("x"):
        cells = {line.series: cell(line) for line in lines.itertuples()}
        rows.append([_place(float(x)), *(cells.get(name, "") for name in names)])
    return markdown([x_name, *names], rows)


def by_series(headline: pd.DataFrame, figure: str, metric: str, x_name: str) -> str:
    """Return a table of one metric of a figure with a row for each number."""
    rows = []
    for line in _of(headline, figure, metric).itertuples():
        numbers = [_place(line.x), _number(line.expected), _ours(line), str(line.seeds)]
        rows.append([line.series, *numbers, _verdict(line)])
    return markdown(["series", x_name, "paper", "ours", "seeds", "verdict"], rows)


def by_metric(headline: pd.DataFrame, figure: str, first: str) -> str:
    """Return a table of all numbers of a figure that stand nowhere: a row for each metric."""
    own = headline[(headline["figure"] == figure) & ~headline["metric"].str.startswith(_ORDER)]
    names = list(dict.fromkeys(own["series"]))
    rows = []
    for metric, lines in own.groupby("metric", sort=False):
        cells = {line.series: cell(line) for line in lines.itertuples()}
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


def cell(line: Any) -> str:
    """Return a number with its error and, where it is judged, the paper's and the verdict."""
    if pd.isna(line.expected):
        return _ours(line)
    return f"{_ours(line)} (paper {_number(line.expected)}{_unless_matching(line)})"


def _of(headline: pd.DataFrame, figure: str, metric: str) -> pd.DataFrame:
    own = headline[(headline["figure"] == figure) & (headline["metric"] == metric)]
    return own.assign(x=own["x"].astype(float))


def _place(x: float) -> str:
    return f"{x:,.0f}" if x.is_integer() else f"{x:g}"


def _ours(line: Any) -> str:
    if pd.isna(line.se):
        return _number(line.ours)
    return (
        f"{_number(line.ours)} ± {line.se:,.0f}"
        if line.se >= 10
        else (f"{_number(line.ours)} ± {line.se:.2g}")
    )


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(line: Any) -> str:
    return (
        ""
        if pd.isna(line.verdict)
        else "**differs**"
        if line.verdict == "differs"
        else line.verdict
    )


def _unless_matching(line: Any) -> str:
    return "" if line.verdict == "matches" else f", {_verdict(line)}"


def made(study: str, folder: Path) -> dict[str, str]:
    """Return the tables of a study's page from a result folder, name -> Markdown."""
    page = importlib.import_module(f"kondo_lab.studies.{study.replace('-', '_')}.page")
    tables: dict[str, str] = page.tables(pd.read_csv(folder / HEADLINE))
    return tables


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with each of the tables between its marks.

    Raises:
        ValueError: a table has no marks, or marks name no table.

    Example:
        >>> from kondo_lab.studies.pages import filled
        >>> print(filled("<!-- table: a -->\\nold\\n<!-- end of table -->", {"a": "new"}))
        <!-- table: a -->
        new
        <!-- end of table -->
    """
    marked = re.compile(rf"(<!-- table: (.+?) -->\n).*?({re.escape(_END)})", flags=re.DOTALL)
    names = [found[1] for found in marked.findall(text)]
    if sorted(names) != sorted(tables):
        raise ValueError(
            f"tables must be those the page marks, {sorted(names)}, got "
            f"{sorted(tables)}; mark each of them once."
        )
    return marked.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def main(arguments: Sequence[str]) -> None:
    """Fill a page: study, result folder, page."""
    study, folder, page = arguments
    path = Path(page)
    path.write_text(filled(path.read_text(encoding="utf-8"), made(study, Path(folder))), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
