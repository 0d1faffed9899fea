"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines, estimate_of, find, lower, shown
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.measured.run import EXACT, FREE, LEARNER, PG

DENSE = "seconds learner"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return whether the clock follows the count, and where the gate pays."""
    counted = [line for line in lines if line.against == "formula" and line.series == EXACT]
    found = [by_lines("by the clock DG-K is as much faster to 5% test error as counted", counted)]
    steps = sorted(
        (line for line in lines if line.series == PG and line.metric == DENSE),
        key=lambda line: line.ours,
    )
    if not steps:
        return found
    for series in (FREE, EXACT):
        for where, step, pays in (("shortest", steps[0], False), ("longest", steps[-1], True)):
            own = find(lines, series, LEARNER, step.x)
            level = None if own is None else own._replace(ours=1.0, se=0.0)
            statement = (
                f"{series}: a step {'pays' if pays else 'does not pay'} where PG's is the {where}"
            )
            judged = lower(statement, *((level, own) if pays else (own, level)))
            told = judged.measured if own is None else f"{shown(estimate_of(own))}x, {step.x}"
            found.append(judged._replace(measured=told))
    return found
