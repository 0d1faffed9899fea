"""What the study claims, judged by what every gate paid to the target."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import NOTHING, together
from kondo_lab.evidence.study import Claim, ClaimVerdict
from kondo_lab.studies.frontier.compared_gates import DG_K
from kondo_lab.studies.frontier.points import Point, Task

RANKED = (DG_K, "top", "rolling")
"""Families that keep the rows of highest delight."""


def claims(task: Task, points: Sequence[Point], ratios: Sequence[float]) -> list[Claim]:
    """Return the claims about a task.

    Args:
        task: where, and to which error.
        points: every gate on it.
        ratios: forward passes that a backward pass costs.
    """
    able = [point for point in points if point.reach.reached == point.reach.seeds]
    ranked = [point for point in points if point.line.family in RANKED]
    dense = [point for point in points if point.line.series in ("PG", "DG")]
    lots = {point.line.rate: point for point in points if point.line.family == "random"}
    fewer = [_fewer(own, other) for own in ranked for other in dense]
    drawn = [_fewer(own, lots[own.line.rate]) for own in ranked if own.line.rate in lots]
    where = f"{task.part}, to {task.label}"
    return [
        together(f"{where}: gates by delight pay fewer backward passes than PG and DG", fewer),
        together(f"{where}: and fewer than rows dropped by lot at the same rate", drawn),
        _depends(f"{where}: which gate is cheapest depends on what a backward costs", able, ratios),
    ]


def _fewer(own: Point, other: Point) -> Claim:
    """Return whether one gate got every seed to the target for fewer backward passes."""
    ours, theirs = own.reach, other.reach
    statement = f"{own.line.series} against {other.line.series}"
    if ours.reached < ours.seeds:
        return Claim(statement, "missed", f"{ours.reached} of {ours.seeds} seeds got there")
    if theirs.reached == 0:
        return Claim(statement, "met", f"{theirs.reached} of {theirs.seeds} seeds of the other did")
    paid, price = ours.mean.backward, theirs.mean.backward
    verdict: ClaimVerdict = "met" if paid < price else "missed"
    return Claim(statement, verdict, f"{paid:,.0f} and {price:,.0f}")


def _depends(statement: str, able: Sequence[Point], ratios: Sequence[float]) -> Claim:
    if not able:
        return Claim(statement, "open", NOTHING)
    best = {
        ratio: min(able, key=lambda point, c=ratio: point.cost(c)).line.series  # type: ignore[misc]
        for ratio in ratios
    }
    told = ", ".join(f"{series} at c = {ratio:g}" for ratio, series in best.items())
    return Claim(statement, "met" if len(set(best.values())) > 1 else "missed", told)
