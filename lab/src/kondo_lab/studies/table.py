"""Tables of studies for the terminal: the headline of a run, and the studies there are."""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from kondo_lab.studies.study import Headline, Study

WIDTH = 100
_COLOURS = {"matches": "green", "differs": "yellow", "": ""}


def headline(lines: Sequence[Headline]) -> Table:
    """Return the paper's numbers beside ours."""
    table = _table()
    for name in ("figure", "series", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("x", "paper", "ours", "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for line in lines:
        names = [escape(name) for name in (line.figure, line.series, line.metric)]
        numbers = [_number(line.x), _number(line.paper), _with_error(line), str(line.seeds)]
        table.add_row(*names, *numbers, line.verdict, style=_COLOURS[line.verdict])
    return table


def studies(known: Sequence[Study]) -> Table:
    """Return one line per study: its name, what it is about and its claim."""
    table = _table()
    table.expand = True  # shares of the width are counted only then
    table.add_column("study", no_wrap=True)
    table.add_column("paper", ratio=2)
    table.add_column("claim", ratio=5)
    for study in known:
        table.add_row(study.name, escape(study.paper), escape(study.claim))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), highlight=False)


def _with_error(line: Headline) -> str:
    ours = _number(line.ours)
    return ours if line.se is None else f"{ours} ±{line.se:.2g}"


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float | int) else escape(str(value))
