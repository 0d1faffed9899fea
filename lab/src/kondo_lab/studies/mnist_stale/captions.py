"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, furthest, percent, verdict_told
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.mnist_stale.run import REINFORCE


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], metric: str, exact: str
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        metric: the error by delay that is told of.
        exact: PG with exact importance weights.
    """

    def ends(other: str, otherwise: str, verdict: str = "") -> str:
        own = furthest(lines, "DG", metric)
        return compared(
            "" if own is None else f"At a delay of {own.x:g} steps DG ends at a learner error of",
            own,
            {f"{other}'s": furthest(lines, other, metric)},
            otherwise=otherwise,
            show=percent,
            verdict=verdict,
        )

    quarter = verdict_told(claims, "about a quarter of the error", "of a quarter of it")
    return {
        "error-by-delay": ends(exact, "Learner error at the end, by delay.", quarter),
        "learning-curves": ends(REINFORCE, "Learner error while training, by delay."),
    }
