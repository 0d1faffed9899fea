"""Tables of studies: for the terminal the headline of a run and the studies, and for pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from kondo_lab.studies.study import Claim, ClaimVerdict, Headline, Study

WIDTH = 100
_COLOURS = {"matches": "green", "differs": "yellow", "noisy": "dim", "": ""}
_CLAIM_COLOURS: dict[ClaimVerdict, str] = {"met": "green", "missed": "yellow", "open": "dim"}


MOST_METRICS = 6
"""That fit beside one another."""


def headline(lines: Sequence[Headline]) -> Table:
    """Return expected numbers beside ours; without any, one line per series if they fit."""
    metrics = list(dict.fromkeys(line.metric for line in lines))
    if len(metrics) <= MOST_METRICS and all(line.expected is None for line in lines):
        return _by_series(lines, metrics)
    table = _table()
    for name in ("figure", "series", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("x", "expected", "ours", "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for line in lines:
        names = [escape(name) for name in (line.figure, line.series, line.metric)]
        numbers = [_number(line.x), _number(line.expected), _with_error(line), str(line.seeds)]
        table.add_row(*names, *numbers, _verdict(line), style=_COLOURS[line.verdict])
    return table


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as pages have it.

    Example:
        >>> from kondo_lab.studies.table import markdown
        >>> print(markdown(["", "a"], [["b", "1"]]))
        | | a |
        |---|---|
        | b | 1 |
    """

    def line(cells: Sequence[str]) -> str:
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def _by_series(lines: Sequence[Headline], metrics: Sequence[str]) -> Table:
    """Return one line per figure, series and x, with a column per metric."""
    rows: dict[tuple[str, str, float | str], dict[str, str]] = {}
    for line in lines:
        rows.setdefault((line.figure, line.series, line.x), {})[line.metric] = _with_error(line)
    table = _table()
    for name in ("figure", "series"):
        table.add_column(name, overflow="fold")
    for name in ("x", *metrics):
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    before = None
    for (figure, series, x), found in rows.items():
        if before not in (None, figure):
            table.add_section()
        before = figure
        cells = [found.get(metric, "-") for metric in metrics]
        table.add_row(escape(figure), escape(series), _number(x), *cells)
    return table


def claims(several: Sequence[Claim]) -> Table:
    """Return one line per claim: what came of it, what it says, and the numbers."""
    table = _table()
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim", ratio=3)
    table.add_column("measured", ratio=2)
    for claim in several:
        cells = (claim.verdict, escape(claim.statement), escape(claim.measured))
        table.add_row(*cells, style=_CLAIM_COLOURS[claim.verdict])
    return table


def studies(known: Sequence[Study], verdicts: Mapping[str, str]) -> Table:
    """Return one line per study: its name, what it is about, its claim and what came of it.

    Args:
        verdicts: name of a study -> what came of its claims.
    """
    table = _table()
    table.expand = True  # shares of the width are counted only then
    table.add_column("study", no_wrap=True)
    table.add_column("paper", ratio=2)
    table.add_column("claim", ratio=5)
    table.add_column("verdicts", ratio=1, min_width=9)
    for study in known:
        came = verdicts.get(study.name) or "no verdict"
        table.add_row(study.name, escape(study.paper), escape(study.claim), escape(came))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), highlight=False)


def _with_error(line: Headline) -> str:
    ours = _number(line.ours)
    return ours if line.se is None else f"{ours} ±{line.se:.2g}"


def _verdict(line: Headline) -> str:
    """Return the verdict, and whose number it is about where that is not a paper's."""
    return line.verdict if line.against in ("", "paper") else f"{line.verdict} ({line.against})"


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float | int):
        return escape(str(value))
    whole = float(value).is_integer() and 1e4 <= abs(value) < 1e6
    return f"{value:,.0f}" if whole else f"{value:.4g}"
