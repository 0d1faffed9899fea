"""Sentences below figures, their numbers taken from the lines of headline.csv when it is made.

A caption says what its figure shows. Where a line is missing or has no number it says what is drawn
and claims nothing, and so it does with fewer seeds than decide a difference.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from kondo_lab.evidence.agreement import judge_order
from kondo_lab.evidence.claims import LEAST_SEEDS, NOTHING, estimate_of, shown
from kondo_lab.evidence.study import Analysis, Claim, Estimate, Headline

Show = Callable[[Estimate], str]
"""Estimate -> how it is written."""
LESS_MORE = ("below", "above")


def with_captions(found: Analysis, captions: Mapping[str, str]) -> Analysis:
    """Return an analysis with the captions of those figures that it has."""
    own = {name: captions[name] for name in found.figures if name in captions}
    return dataclasses.replace(found, captions=own)


def plain(found: Estimate) -> str:
    """Return a mean with its standard error, unless that is 0 or there is none."""
    return shown(found if found.se else found._replace(se=math.nan))


def percent(found: Estimate) -> str:
    """Return a share as a percentage with its standard error, if there is one.

    Example:
        >>> from kondo_lab.evidence.captions import percent
        >>> from kondo_lab.evidence.study import Estimate
        >>> percent(Estimate(0.0163, 0.0004, 10))
        '1.63 ± 0.04%'
    """
    scaled = Estimate(100 * found.mean, 100 * found.se, found.seeds)
    return f"{plain(scaled)}%"


def count(found: Estimate) -> str:
    """Return a number of passes, rows or bytes, rounded to units: "217,386"."""
    return f"{found.mean:,.0f}"


def starting(
    lines: Iterable[Headline], series: str, metric: str, x: object = None
) -> Headline | None:
    """Return the first line of a series whose metric starts so, at `x` if given; None if none."""
    for line in lines:
        at = x is None or str(line.x) == str(x)
        if line.series == series and line.metric.startswith(metric) and at:
            return line
    return None


def furthest(lines: Iterable[Headline], series: str, metric: str) -> Headline | None:
    """Return the line of a series and metric with the largest number as x; None if none."""
    own = [
        line
        for line in lines
        if line.series == series and line.metric == metric and not isinstance(line.x, str)
    ]
    return max(own, key=lambda line: float(line.x), default=None)


def known(*lines: Headline | None) -> bool:
    """Return whether all lines are there and have a finite number."""
    return all(line is not None and math.isfinite(line.ours) for line in lines)


def seeds_told(*lines: Headline, unit: str = "seed") -> str:
    """Return "one seed", "5 seeds" or "3 to 5 seeds", or the same of another unit."""
    least, most = min(line.seeds for line in lines), max(line.seeds for line in lines)
    if least < most:
        return f"{least} to {most} {unit}s"
    return f"one {unit}" if most == 1 else f"{most} {unit}s"


def decided(*lines: Headline) -> bool:
    """Return whether lines are of enough seeds to say more than what is drawn."""
    return bool(lines) and min(line.seeds for line in lines) >= LEAST_SEEDS


def verdict_told(claims: Iterable[Claim], words: str, about: str = "") -> str:
    """Return "; claim met" of the first claim with these words; nothing where there is none.

    Args:
        claims: of the study.
        words: a part of the statement.
        about: what is claimed, where the caption does not say it: "; claim ABOUT: met".
    """
    verdict = next((own.verdict for own in claims if words in own.statement), None)
    if verdict is None:
        return ""
    return f"; claim {about}: {verdict}" if about else f"; claim {verdict}"


def claimed(
    claims: Iterable[Claim], words: str, lines: Sequence[Headline], *, otherwise: str
) -> str:
    """Return the first claim with these words, its verdict and its numbers.

    `otherwise` where there is none, where nothing was measured, and with too few seeds.

    Args:
        claims: of the study.
        words: a part of the statement.
        lines: what it was judged by.
        otherwise: the caption without a claim.
    """
    own = next((claim for claim in claims if words in claim.statement), None)
    if own is None or own.measured == NOTHING or not decided(*lines):
        return otherwise
    statement = own.statement[:1].upper() + own.statement[1:]
    return f"{statement}: {own.verdict} ({own.measured}; {seeds_told(*lines)})."


def relation(
    one: Headline, other: Headline, words: tuple[str, str] = LESS_MORE, *, exact: bool = False
) -> str:
    """Return where one number is beside another: below or above it, by `judge_order`.

    "against" where too few seeds decide it, "not clearly different from" where noise hides it.

    Args:
        one: what is spoken of.
        other: what it is compared with.
        words: for a lower and for a higher number.
        exact: the numbers are computed and not sampled: one is enough.
    """
    if min(one.seeds, other.seeds) < LEAST_SEEDS and not exact:
        return "against"
    found = {"one": estimate_of(one), "other": estimate_of(other)}
    if found["one"].mean == found["other"].mean:
        return "equal to"
    order = judge_order(["one", "other"], found)
    return {"matches": words[0], "differs": words[1]}.get(order, "not clearly different from")


def compared(
    subject: str,
    one: Headline | None,
    others: Mapping[str, Headline | None],
    *,
    otherwise: str,
    show: Show = plain,
    words: tuple[str, str] = LESS_MORE,
    exact: bool = False,
    verdict: str = "",
) -> str:
    """Return "SUBJECT 0.02 ± 0.001, below PG's 0.03 ± 0.002 (10 seeds)."

    Args:
        subject: what `one` is, with a verb.
        one: the line that the sentence is about.
        others: whose number, e.g. "PG's" -> its line; those that are missing are left out.
        otherwise: the caption where `one` or all others are missing.
        show: how numbers are written.
        words: for a lower and for a higher number.
        exact: see `relation`; seeds are not told.
        verdict: of `verdict_told`, told after the seeds if they are enough.
    """
    there = {whose: line for whose, line in others.items() if line is not None and known(line)}
    if one is None or not known(one) or not there:
        return otherwise
    told = [
        f"{relation(one, line, words, exact=exact)} {whose} {show(estimate_of(line))}"
        for whose, line in there.items()
    ]
    note = "exact" if exact else seeds_told(one, *there.values())
    judged = verdict if exact or decided(one, *there.values()) else ""
    return f"{subject} {show(estimate_of(one))}, {' and '.join(told)} ({note}{judged})."


def stated(
    sentence: str,
    lines: Sequence[Headline | None],
    *,
    otherwise: str,
    show: Show = plain,
    verdict: str = "",
    unit: str = "seed",
) -> str:
    """Return a sentence with the lines' numbers at {0}, {1}, ..., and with its seeds.

    `otherwise` where a line is missing or has no number.
    """
    there = [line for line in lines if line is not None]
    if len(there) < len(lines) or not there or not known(*there):
        return otherwise
    numbers = [show(estimate_of(line)) for line in there]
    judged = verdict if decided(*there) else ""
    return f"{sentence.format(*numbers)} ({seeds_told(*there, unit=unit)}{judged})."
