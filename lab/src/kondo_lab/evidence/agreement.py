"""Does a number of ours agree with one that it should equal? Rules with a verdict each.

    r = ours / expected,   e = sqrt((se / ours)^2 + (error of the expected number)^2)

| rule     | agrees where                     | for                                           |
|----------|----------------------------------|-----------------------------------------------|
| equals   | abs(log r) <= max(log 1.2, 2 e)  | numbers read off a figure, formulas           |
| at least | log r >= -max(log 1.2, 2 e)      | "at least twice"                              |
| about    | log r >= -max(log 2, 2 e)        | "about a factor of 10": half of it, or more   |

Ratios, not differences: errors of the papers span three decades. Twice a large standard error
agrees with everything, so where se > 0.3 ours a number that agrees is called noisy instead.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Verdict = Literal["matches", "differs", "noisy", ""]
"""noisy: it agrees, but our own error is so large that it would agree with much else too."""
Rule = Literal["equals", "at least", "about"]
Against = Literal["paper", "fitted", "abstract", "third party", "formula", "simulation", ""]
"""Whose number ours is compared with. "paper": a number or an order of one figure, appendix or
proposition, in its set-up as far as it is known; "fitted": a paper's, where the model or the way of
counting was fitted to that figure; "abstract": a factor or an order that an abstract states of an
experiment, at one of our strengths, delays or lengths; "" for none."""

WITHIN: dict[Rule, float] = {
    "equals": math.log(1.2),
    "at least": math.log(1.2),
    "about": math.log(2.0),
}
"""Rule -> the distance in logarithms that counts as agreement whatever the errors."""
READING_ERROR: dict[Against, float] = {"paper": 0.03, "fitted": 0.03, "third party": 0.03}
"""Relative error of a number that was read off a figure."""
NOISY = 0.3
"""Relative standard error above which ours tells too little."""
SURE = 2.0
"""Standard errors of a difference that count as one."""


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    se: float = math.nan
    """Standard error; NaN where there is none, as for a single seed."""
    seeds: int = 1

    @property
    def error(self) -> float:
        """The standard error, 0 where there is none."""
        return 0.0 if math.isnan(self.se) else self.se


def judge(ours: Estimate, expected: float, against: Against, rule: Rule = "equals") -> Verdict:
    """Return whether a number agrees with the expected one.

    Numbers of different sign, or 0, have no ratio: they agree within two standard errors of their
    difference. An infinite factor is at least any other.

    Example:
        >>> from kondo_lab.evidence.agreement import Estimate, judge
        >>> judge(Estimate(0.0171, 0.0003, 30), 0.0163, "paper")
        'matches'
        >>> judge(Estimate(0.11, 0.05, 3), 0.0163, "paper")
        'differs'
        >>> judge(Estimate(0.03, 0.015, 3), 0.0163, "paper")
        'noisy'
        >>> judge(Estimate(650.0), 10.0, "paper", "about")
        'matches'
    """
    reading = READING_ERROR.get(against, 0.0)
    if ours.mean == expected:
        return "matches"
    if math.isnan(ours.mean):
        return "differs"
    if ours.mean * expected <= 0 or math.isinf(ours.mean) or math.isinf(expected):
        beyond = rule != "equals" and ours.mean > expected
        distance = abs(ours.mean - expected)
        close = distance <= SURE * math.hypot(ours.error, reading * expected)
        return "matches" if beyond or close else "differs"
    own = ours.error / abs(ours.mean)
    distance = math.log(ours.mean / expected)
    allowed = max(WITHIN[rule], SURE * math.hypot(own, reading))
    close = (abs(distance) if rule == "equals" else -distance) <= allowed
    if not close:
        return "differs"
    return "noisy" if own > NOISY else "matches"


def judge_order(order: Sequence[str], ours: Mapping[str, Estimate]) -> Verdict:
    """Return whether numbers rise in an order, lowest first.

    It matches where every pair is in order by more than two standard errors of its difference,
    differs where a pair is reversed by more than that, and is noisy in between. Without standard
    errors every difference counts.

    Example:
        >>> from kondo_lab.evidence.agreement import Estimate, judge_order
        >>> judge_order(["DG", "PG"], {"DG": Estimate(0.01, 0.001), "PG": Estimate(0.03, 0.002)})
        'matches'
        >>> judge_order(["DG", "PG"], {"DG": Estimate(0.01, 0.01), "PG": Estimate(0.03, 0.02)})
        'noisy'
    """
    verdict: Verdict = "matches"
    for place, low in enumerate(order):
        for high in order[place + 1 :]:
            step = ours[high].mean - ours[low].mean
            limit = SURE * math.hypot(ours[high].error, ours[low].error)
            if step < -limit or math.isnan(step):
                return "differs"
            if step <= limit and not (limit == 0 and step >= 0):
                verdict = "noisy"
    return verdict
