"""Rules that say what came of a statement: met, missed or open.

| rule       | met                                       | missed               |
|------------|-------------------------------------------|----------------------|
| by_lines   | every line that is compared matches       | one differs          |
| above_zero | above 0 by more than chance is 1 in 20    | below 0 by that      |
| lower      | below another, by `agreement.judge_order` | above it, by that    |
| together   | every one of several is met               | one is missed        |

Everything else is open: too noisy, too few seeds, not measured.
`by_lines` reads the lines of headline.csv. What a claim says is thereby judged by numbers that are
shown, and a claim without numbers stays open.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kondo_lab.evidence.agreement import judge_order
from kondo_lab.evidence.study import Claim, ClaimVerdict, Estimate, Headline

LEAST_SEEDS = 3
"""Below, a difference stays open."""
CHANCE_ERRORS = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13}
"""Seeds -> standard errors that chance exceeds one time in twenty, by Student's t."""
NAMED = 3
"""Most lines that a claim names one by one."""
NOTHING = "not measured"
OF_ORDERS: dict[str, ClaimVerdict] = {"matches": "met", "differs": "missed", "noisy": "open"}


def chance_errors(seeds: int) -> float:
    """Return how many standard errors chance exceeds one time in twenty; of more seeds, two."""
    return CHANCE_ERRORS.get(seeds, 2.0)


def above_zero(apart: Estimate) -> ClaimVerdict:
    """Return whether a difference that should be above 0 is.

    Example:
        >>> from kondo_lab.evidence.claims import above_zero
        >>> from kondo_lab.evidence.study import Estimate
        >>> above_zero(Estimate(0.1, 0.01, 5)), above_zero(Estimate(0.1, 0.1, 5))
        ('met', 'open')
        >>> above_zero(Estimate(-0.1, 0.01, 5)), above_zero(Estimate(-0.1, 0.1, 5))
        ('missed', 'open')
        >>> above_zero(Estimate(0.1, 0.01, 2)), above_zero(Estimate(0.0, 0.0, 5))
        ('open', 'missed')
    """
    mean, se, seeds = apart
    if seeds < LEAST_SEEDS:
        return "open"
    by_chance = chance_errors(seeds) * se
    if mean > by_chance:
        return "met"
    return "missed" if mean < -by_chance or (mean <= 0 and se == 0) else "open"


class Difference(NamedTuple):
    """How much higher a number is than a baseline's, seed by seed."""

    estimate: Estimate

    @property
    def verdict(self) -> ClaimVerdict:
        """Whether it is lower by at most one standard error.

        Missed only if it is lower by more than chance alone makes it one time in twenty. Open
        between the two, and with fewer than three seeds.
        """
        mean, se, seeds = self.estimate
        if seeds < LEAST_SEEDS:
            return "open"
        if mean >= -se:
            return "met"
        return "missed" if mean < -chance_errors(seeds) * se else "open"

    @property
    def largest_loss(self) -> float:
        """What may be lost at most: a greater loss is excluded at 95%, one-sided."""
        mean, se, seeds = self.estimate
        return max(0.0, chance_errors(seeds) * se - mean)

    def __str__(self) -> str:
        mean, se, seeds = self.estimate
        return f"{mean:+.3f} ± {se:.3f} over {seeds} seeds" if seeds > 1 else f"{mean:+.3f}, 1 seed"


def by_lines(statement: str, lines: Iterable[Headline]) -> Claim:
    """Return the claim that every one of these lines agrees with what is expected of it."""
    judged = [line for line in lines if line.verdict]
    counts = Counter(line.verdict for line in judged)
    if not judged:
        return Claim(statement, "open", NOTHING)
    told = [f"{counts['matches']} of {len(judged)} match"]
    if counts["noisy"]:
        told.append(f"{counts['noisy']} too noisy to tell")
    differing = [line for line in judged if line.verdict == "differs"]
    if differing:
        shown = [_told(line) for line in differing[:NAMED]]
        more = len(differing) - len(shown)
        named = "; ".join([*shown, f"{more} more"] if more else shown)
        told.append(f"{len(differing)} {'differs' if len(differing) == 1 else 'differ'}: {named}")
    elif len(judged) <= NAMED:
        told = ["; ".join(map(_told, judged)), *told[1:]]
    verdict: ClaimVerdict = "missed" if differing else "open" if counts["noisy"] else "met"
    return Claim(statement, verdict, ", ".join(told))


def lower(statement: str, one: Headline | None, other: Headline | None) -> Claim:
    """Return the claim that one line's number is below another's, whoever they belong to."""
    if one is None or other is None:
        return Claim(statement, "open", NOTHING)
    found = {"one": estimate_of(one), "other": estimate_of(other)}
    verdict = OF_ORDERS.get(judge_order(["one", "other"], found), "open")
    return Claim(statement, verdict, f"{shown(found['one'])} and {shown(found['other'])}")


def together(statement: str, claims: Iterable[Claim]) -> Claim:
    """Return one claim of several that must all be met; it names those that are not."""
    several = list(claims)
    if not several:
        return Claim(statement, "open", NOTHING)
    short = [each for each in several if each.verdict != "met"]
    told = f"{len(several) - len(short)} of {len(several)} met"
    named = [f"{each.statement} {each.verdict} ({each.measured})" for each in short[:NAMED]]
    more = [f"{len(short) - NAMED} more"] if len(short) > NAMED else []
    missed = any(each.verdict == "missed" for each in short)
    verdict: ClaimVerdict = "missed" if missed else "open" if short else "met"
    return Claim(statement, verdict, "; ".join([told, *named, *more]))


def estimate_of(line: Headline) -> Estimate:
    """Return what a line measured."""
    return Estimate(line.ours, math.nan if line.se is None else line.se, line.seeds)


def find(lines: Sequence[Headline], series: str, metric: str, x: object = None) -> Headline | None:
    """Return the line of a series and metric, at `x` if that is given; None if there is none."""
    for line in lines:
        at = x is None or str(line.x) == str(x)
        if line.series == series and line.metric == metric and at:
            return line
    return None


def shown(found: Estimate) -> str:
    """Return a mean with its standard error, if there is one."""
    return f"{found.mean:.3g}" + ("" if math.isnan(found.se) else f" ± {found.se:.2g}")


def _told(line: Headline) -> str:
    at = "" if line.x == "" else f" at {line.x:g}" if isinstance(line.x, float) else f" at {line.x}"
    if line.metric.startswith("order of"):
        return f"{line.metric.removeprefix('order of ')}, {line.series}{at}"
    expected = "" if line.expected is None else f", expected {line.expected:.3g}"
    return f"{line.series}{at}: {shown(estimate_of(line))}{expected}"
