"""What the figures of a field show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, verdict_told
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.lm_frictions.settings import COMBINED
from kondo_lab.studies.lm_frictions.verdicts import PAPER, UNCORRECTED
from kondo_lab.training.fields import slug

REWARD, ENTROPY = "held-out reward at temperature 1, at the end", "entropy at the end"


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], field: str, refreshes: Sequence[str]
) -> dict[str, str]:
    """Return a sentence for every figure of a field.

    Args:
        lines: of the headline.
        claims: of the study.
        field: its name.
        refreshes: frictions that are rare refreshes alone, the rarest last.
    """

    def paired(cell: str, metric: str, what: str, otherwise: str, verdict: str = "") -> str:
        where = "all frictions together" if cell == COMBINED.name else f"the friction {cell}"
        return compared(
            f"{field}, under {where}: {PAPER} ends with {what} of",
            find(lines, PAPER, metric, f"{field}: {cell}"),
            {f"{UNCORRECTED}'s": find(lines, UNCORRECTED, metric, f"{field}: {cell}")},
            otherwise=f"{field}: {otherwise}",
            verdict=verdict,
        )

    statement = f"{field}, {COMBINED.name}: the error of {UNCORRECTED}"
    tenth = verdict_told(claims, statement, "of a tenth of the error")
    rarest = refreshes[-1] if refreshes else ""
    table = "reward at the end by friction and correction."
    strengths = "reward at the end by the strength of each friction alone."
    return {
        slug("table", field): paired(COMBINED.name, REWARD, "a reward", table, tenth),
        slug("strengths", field): paired(rarest, REWARD, "a reward", strengths),
        slug("curves", field): paired(
            COMBINED.name, ENTROPY, "an entropy in nats a token", "reward and entropy by step."
        ),
    }
