"""What the study claims: whose return at the end is dense's, and whose is not."""

import math
from collections.abc import Sequence

from kondo_lab.evidence.claims import above_zero
from kondo_lab.evidence.study import Claim, ClaimVerdict, Estimate
from kondo_lab.studies.control.settings import Task


def verdict(own: Estimate, dense: Estimate) -> ClaimVerdict:
    """Return "met" if a return is above dense's less one standard error of their difference.

    Open where a standard error is not known. A higher return is no miss.

    Example:
        >>> from kondo_lab.studies.control.claims import verdict
        >>> from kondo_lab.evidence.study import Estimate
        >>> verdict(Estimate(480.0, 9.0, 10), Estimate(494.0, 12.0, 10))
        'met'
    """
    se = math.hypot(own.se, dense.se)
    if math.isnan(se) or math.isnan(own.mean - dense.mean):
        return "open"
    return "met" if own.mean >= dense.mean - se else "missed"


def task_claims(
    task: Task, dense: Estimate, promised: dict[str, Estimate], highest: dict[str, Estimate]
) -> Sequence[Claim]:
    """Return the claims about a task.

    Args:
        task: where.
        dense: return at the end without a gate.
        promised: contender that should end where dense does -> its return.
        highest: contender that keeps the highest delight, and should not learn -> its return.
    """
    where = task.training.task
    kept = [
        Claim(
            f"on {where}, {name} ends within one standard error of dense",
            verdict(own, dense),
            f"{told(own)} and {told(dense)}",
        )
        for name, own in promised.items()
    ]
    lost = [
        Claim(
            f"on {where}, {name} ends below dense",
            above_zero(_apart(dense, own)),
            f"{told(own)} and {told(dense)}",
        )
        for name, own in highest.items()
    ]
    return [*kept, *lost]


def _apart(dense: Estimate, own: Estimate) -> Estimate:
    seeds = min(dense.seeds, own.seeds)
    return Estimate(dense.mean - own.mean, math.hypot(dense.se, own.se), seeds)


def told(found: Estimate) -> str:
    """Return a return with its standard error, if there is one."""
    spread = "" if math.isnan(found.se) else f" ± {found.se:.1f}"
    return f"{found.mean:.1f}{spread}"
