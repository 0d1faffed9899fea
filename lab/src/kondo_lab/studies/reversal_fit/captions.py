"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import claimed, seeds_told
from kondo_lab.evidence.study import Claim, Headline


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], statement: str, score: str
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        statement: what is claimed of the pair with the lowest score.
        score: its metric.
    """
    totals = [
        line for line in lines if line.metric == score and line.figure.startswith("all figures")
    ]
    best = min(totals, key=lambda line: line.ours, default=None)
    told = "Distance to the papers' numbers, by pair of settings, lower is better."
    if best is not None:
        told = (
            f"The lowest distance to the papers' numbers is {best.ours:.3g}, with {best.series} "
            f"({best.figure})."
        )
    curves = [line for line in lines if line.figure.endswith("Fig 8") and line.metric != score]
    seeds = f" ({seeds_told(*curves)})" if curves else ""
    return {
        "scores": told,
        "fig8-learning-curves": claimed(
            claims,
            statement,
            curves,
            otherwise=f"Online error by step at every pair, beside the paper's numbers{seeds}.",
        ),
    }
