"""The table of a comparison: the same cells on the terminal and in the HTML report."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from kondo_lab.summary import Estimate, Row

HEADERS = (
    "method",
    "final error %",
    "test error %",
    "samples seen",
    "backward paid",
    "sampling s",
    "forward s",
    "backward s",
    "gate s",
    "speed up",
)

MEANINGS = {
    "final error %": "1 - mean reward of the sampled actions, over the last 5% of training; "
    "mean over seeds ± standard error.",
    "test error %": "the most likely action on the 20% of images held out; none for reversal, "
    "where every prompt is new.",
    "samples seen": "actions (digits) or answers (reversal) drawn in one seed's run.",
    "backward paid": "how many of them went through a backward pass.",
    "sampling s": "seconds of one seed's run to draw inputs and actions; not part of the speed-up.",
    "forward s": "seconds of forwards with a graph.",
    "backward s": "seconds of backwards.",
    "gate s": "seconds to compute delight, pick the units and gather their rows; dense "
    "methods choose nothing.",
    "speed up": "forward + backward + gate seconds of dense PG, over the same sum of this method.",
}


def cells(row: Row) -> list[str]:
    """Return a row's texts, in the order of HEADERS."""
    return [
        row.method,
        percent(row.error),
        percent(row.test_error) if row.test_error else "-",
        f"{row.samples:,.0f}",
        f"{row.backward_passes:,.0f}",
        f"{row.seconds['sampling']:.1f}",
        f"{row.seconds['forward']:.2f}",
        f"{row.seconds['backward']:.2f}",
        "-" if row.dense else f"{row.seconds['gate']:.2f}",
        f"{row.speed_up:.2f}x",
    ]


def percent(value: Estimate) -> str:
    """Return an error as percent with its standard error, if there is one."""
    digits = 1 if value.mean >= 0.1 else 2
    mean = f"{100 * value.mean:.{digits}f}"
    if math.isnan(value.standard_error):
        return mean
    return f"{mean} ±{100 * value.standard_error:.{digits}f}"


def build(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal; 100 columns are enough for it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in HEADERS:
        first, _, rest = header.partition(" ")
        left = header == "method"
        table.add_column(f"{first}\n{rest}", justify="left" if left else "right", no_wrap=True)
    for number, task in enumerate(dict.fromkeys(row.task for row in rows)):
        if number:
            table.add_section()
        table.add_row(f"[bold]{task}[/bold]")
        for row in rows:
            if row.task == task:
                name, *rest_of_row = cells(row)
                table.add_row(f"  {name}", *rest_of_row)
    return table
