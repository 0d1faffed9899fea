"""Tables of studies: for the terminal the headline of a run and the studies, and for pages."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from rich import box
from rich.markup import escape
from rich.table import Table

from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline, Study, Verdict

_COLOURS = {"matches": "green", "differs": "yellow", "noisy": "dim", "": ""}
_CLAIM_COLOURS: dict[ClaimVerdict, str] = {"met": "green", "missed": "yellow", "open": "dim"}

MOST_METRICS = 6
"""That fit beside one another."""
MOST_LINES = 12
"""Lines of a table that is printed without --full."""


def first_lines(lines: Sequence[Headline]) -> Sequence[Headline]:
    """Return the lines to read first: all if they are few, else the first that differ.

    Lines that nobody expects anything of are read in figures and in headline.csv.
    """
    if len(_rows(lines) if _fit(lines) else lines) <= MOST_LINES:
        return lines
    return [line for line in lines if line.verdict == "differs"][:MOST_LINES]


def numbers(lines: Sequence[Headline]) -> str:
    """Return how many numbers there are, and how many of them are as expected.

    Example:
        >>> from kondo_lab.evidence.study import headline
        >>> from kondo_lab.evidence.table import numbers
        >>> line = headline("Fig 1", "DG", "error", 1.0, 0.0171, expected=0.0163)
        >>> numbers([line, headline("Fig 1", "PG", "error", 1.0, 0.1)])
        '2, of which 1 has an expected value: 1 matches'
    """
    judged = [line.verdict for line in lines if line.verdict]
    if not judged:
        return f"{len(lines)}, none with an expected value"
    have = "1 has an expected value" if len(judged) == 1 else f"{len(judged)} have expected values"
    counts = Counter(judged)
    each = ", ".join(f"{counts[name]} {name}" for name in get_args(Verdict) if counts[name])
    return f"{len(lines)}, of which {have}: {each}"


def headline(lines: Sequence[Headline]) -> Table:
    """Return expected numbers beside ours; without any, one line per series if they fit."""
    if _fit(lines):
        return _by_series(lines)
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
        >>> from kondo_lab.evidence.table import markdown
        >>> print(markdown(["", "a"], [["b", "1"]]))
        | | a |
        |---|---|
        | b | 1 |
    """

    def line(cells: Sequence[str]) -> str:
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def _metrics(lines: Sequence[Headline]) -> list[str]:
    return list(dict.fromkeys(line.metric for line in lines))


def _fit(lines: Sequence[Headline]) -> bool:
    """Return whether the metrics fit beside one another: few, and without expected values."""
    return len(_metrics(lines)) <= MOST_METRICS and all(line.expected is None for line in lines)


def _rows(lines: Sequence[Headline]) -> dict[tuple[str, str, float | str], dict[str, str]]:
    """Return (figure, series, x) -> metric -> number."""
    rows: dict[tuple[str, str, float | str], dict[str, str]] = {}
    for line in lines:
        rows.setdefault((line.figure, line.series, line.x), {})[line.metric] = _with_error(line)
    return rows


def _by_series(lines: Sequence[Headline]) -> Table:
    """Return one line per figure, series and x, with a column per metric."""
    rows, metrics = _rows(lines), _metrics(lines)
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


def studies(
    known: Sequence[Study], counts: Mapping[str, Mapping[str, Mapping[str, int]]], *, full: bool
) -> Table:
    """Return a line per study and result folder: name, what is tested, and claims by verdict.

    Args:
        counts: name of a study -> result folder, without version -> verdict -> number of claims.
        full: whether to print the paper and the claim; else the title, in one line.
    """
    rows = [
        (study, _folder_name(study.name, folder), found)
        for study in known
        for folder, found in (counts.get(study.name) or {study.name: {}}).items()
    ]
    table = _table()
    table.expand = True  # shares of the width are counted only then
    table.add_column("study", min_width=max((len(name) for _, name, _ in rows), default=0))
    if full:
        table.add_column("paper", ratio=2)
        table.add_column("claim", ratio=5)
    else:
        table.add_column("title", no_wrap=True, overflow="ellipsis", ratio=1)
    verdicts = get_args(ClaimVerdict)
    for verdict in verdicts:
        table.add_column(verdict, justify="right", no_wrap=True, min_width=len(verdict))
    for study, name, found in rows:
        texts = (study.paper, study.claim) if full else (study.title,)
        numbers = [str(found[verdict]) if found else "-" for verdict in verdicts]
        table.add_row(escape(name), *map(escape, texts), *numbers)
    return table


def _folder_name(study: str, folder: str) -> str:
    """Return the study's name, and the device in brackets where its folder has one.

    Example:
        >>> _folder_name("measured", "measured-cpu")
        'measured (cpu)'
    """
    device = folder.removeprefix(study).removeprefix("-")
    return f"{study} ({device})" if device else study


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
