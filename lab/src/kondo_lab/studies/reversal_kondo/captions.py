"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import (
    claimed,
    compared,
    count,
    furthest,
    percent,
    stated,
    verdict_told,
)
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.reversal_kondo.claims import GAIN


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], gated: str, solved: str
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        gated: the series of the gate.
        solved: the metric of the longest length that is solved.
    """
    longest = furthest(lines, gated, solved)
    seen = "" if longest is None else f"{float(longest.x):,.0f}"
    by_size = next((line.metric for line in lines if line.metric.endswith(", by M")), "")
    largest = furthest(lines, gated, by_size)
    return {
        "fig8-learning-curves": stated(
            f"{gated} pays {{0}} backward passes",
            [find(lines, gated, "backward passes at the end")],
            otherwise="Error by step and by backward passes.",
            show=count,
            verdict=verdict_told(claims, "3% to 7%", "of 3% to 7%"),
        ),
        "fig10-lengths": compared(
            f"After {seen} forward passes {gated} solves a length of",
            longest,
            {"DG's": furthest(lines, "DG", solved), "PG's": furthest(lines, "PG", solved)},
            otherwise="Longest length that is solved, by forward passes.",
        ),
        "speed-up-by-backward-cost": _gain(lines, claims, gated),
        "vocabularies": compared(
            "" if largest is None else f"With {largest.x:g} tokens {gated} ends at an error of",
            largest,
            {"PG's": furthest(lines, "PG", by_size)},
            otherwise="Error at the end, by vocabulary.",
            show=percent,
        ),
    }


def _gain(lines: Sequence[Headline], claims: Sequence[Claim], gated: str) -> str:
    otherwise = "Counted speed-up over PG to the solved level, by the cost of a backward pass."
    own = [line for line in lines if line.series == gated and line.metric.startswith(GAIN)]
    if not own:
        return otherwise
    return claimed(claims, f"{gated}: the gain over PG grows", own, otherwise=otherwise)
