"""What the study claims, judged by its headline lines."""

import math
from collections.abc import Sequence

from kondo_lab.evidence.claims import NOTHING
from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline

OUTSIDE, UNLIKELY = 0.05, 0.05
"""Share of equal errors that two standard errors leave out; what chance is not believed to do."""
ENDS = {
    "replayed": "one process that replays the ages ends with the errors of the real runs",
    "fixed delay": "asked: a fixed delay of the same mean age does so too",
    "uniform delay": "asked: a uniform delay of the same mean age does so too",
}


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return whether as many errors agree with the real runs' as chance leaves."""
    return [_same(lines, series, statement) for series, statement in ENDS.items()]


def _same(lines: Sequence[Headline], series: str, statement: str) -> Claim:
    shares = [
        line.ours
        for line in lines
        if line.series == series and line.metric.endswith("of those on Ray")
    ]
    compared = sum(line.series.endswith(f", {series}") for line in lines)
    if not shares or not compared:
        return Claim(statement, "open", NOTHING)
    outside = compared - round(sum(shares) / len(shares) * compared)
    verdict: ClaimVerdict = "met" if _at_least(outside, compared) > UNLIKELY else "missed"
    told = f"{compared - outside} of {compared} errors within two standard errors"
    return Claim(statement, verdict, told)


def _at_least(count: int, of: int) -> float:
    """Return the probability that chance puts `count` or more of `of` errors outside."""
    return sum(
        math.comb(of, k) * OUTSIDE**k * (1 - OUTSIDE) ** (of - k) for k in range(count, of + 1)
    )
