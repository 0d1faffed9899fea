"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import (
    claimed,
    compared,
    furthest,
    percent,
    starting,
    verdict_told,
)
from kondo_lab.evidence.study import Claim, Headline

END = "online error at the end"


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    lengths = [line for line in lines if line.figure == "DG Fig 9a"]
    longest = furthest(lengths, "DG", END)
    variants = [line for line in lines if line.figure == "DG App D" and line.x == ""]
    varied = next((line.metric for line in variants if line.series == "DG"), "")
    return {
        "fig8-learning-curves": claimed(
            claims,
            "DG learns faster",
            [line for line in lines if line.figure == "DG Fig 8"],
            otherwise="Online error by step, lower is better.",
        ),
        "fig9-lengths-and-vocabularies": compared(
            "" if longest is None else f"At a length of {longest.x:g} DG ends at an error of",
            longest,
            {"PG's": furthest(lengths, "PG", END)},
            otherwise="Online error by length and by vocabulary.",
            show=percent,
            verdict=verdict_told(
                claims, "more slowly with the length", "that DG's grows more slowly"
            ),
        ),
        "variants": compared(
            f"{varied[:1].upper()}{varied[1:]}: DG",
            starting(variants, "DG", varied),
            {"PG's": starting(variants, "PG", varied)},
            otherwise="Average error of variants of the task.",
            show=percent,
        ),
    }
