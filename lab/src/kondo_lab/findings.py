"""Rows -> sentences. Every number is read from the rows; nothing is assumed to have worked."""

from collections.abc import Sequence

from kondo_lab.summary import Row
from kondo_lab.table import percent


def findings(rows: Sequence[Row]) -> list[str]:
    """Return a short paragraph for each gated method on each task."""
    return [_finding(row, rows) for row in rows if not row.dense]


def _finding(row: Row, rows: Sequence[Row]) -> str:
    dense = [other for other in rows if other.task == row.task and other.dense]
    baseline = next(other for other in dense if other.method == "PG")
    others = " and ".join(f"{other.method} {percent(other.error)}%" for other in dense)
    paid = row.backward_passes / baseline.backward_passes
    return (
        f"{row.task}: {row.method} paid for {paid:.1%} of the backward passes of dense PG. "
        f"Final error {percent(row.error)}% ({others}). {_speed(row, baseline, paid)}"
    )


def _speed(row: Row, baseline: Row, paid: float) -> str:
    choosing = 1e3 * row.seconds["gate"] / row.num_steps
    kept = 1e3 * row.learner_seconds / row.num_steps - choosing
    dense = 1e3 * baseline.learner_seconds / baseline.num_steps
    parts = (
        f"choosing units took {choosing:.1f} ms a step and the kept rows {kept:.1f} ms, against "
        f"{dense:.1f} ms dense"
    )
    loop = f"With sampling and Adam counted in, the whole loop ran at {row.loop_speed_up:.2f}x."
    if row.speed_up <= 1:
        return (
            f"Its learner was slower than dense, {row.speed_up:.2f}x: {parts}. Both are fixed "
            f"costs of a step, and this model is too small to earn them back. {loop}"
        )
    limit = f", where the count of kept rows alone would allow {1 / paid:.0f}x" if paid else ""
    return f"Its learner ran at {row.speed_up:.2f}x{limit}: {parts}. {loop}"
