"""What the figure shows, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import known, seeds_told
from kondo_lab.evidence.claims import estimate_of, find, shown
from kondo_lab.evidence.study import Claim, Headline

APART = "reward at the end less dense GRPO's, seed by seed"


def caption(
    lines: Sequence[Headline],
    claims: Sequence[Claim],
    claimed: Sequence[str],
    fields: Sequence[str],
) -> str:
    """Return how far from dense GRPO the first claimed gate ends, field by field.

    Args:
        lines: of the headline.
        claims: of the study.
        claimed: gates that should end where dense GRPO does.
        fields: names of those that are drawn.
    """
    for name in claimed:
        told = []
        for field in fields:
            line = find(lines, name, APART, field)
            if line is not None and known(line):
                statement = f"{field}: {name} ends lower"
                verdict = next(
                    (f"; {own.verdict}" for own in claims if own.statement.startswith(statement)),
                    "",
                )
                apart = shown(estimate_of(line))
                told.append(f"{apart} on {field} ({seeds_told(line)}{verdict})")
        if told:
            return f"Reward at the end of {name} less dense GRPO's: {', '.join(told)}."
    return "Reward by rollouts and by learner seconds, and the share of rows that each gate keeps."
