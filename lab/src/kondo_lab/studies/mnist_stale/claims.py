"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about the order and about the factor."""
    stated = [line for line in lines if line.against == "abstract"]
    orders = [line for line in stated if line.metric.startswith("order of learner error")]
    return [
        by_lines(
            "DG ends below PG with importance weights and below REINFORCE at every delay", orders
        ),
        by_lines(
            "at the largest delay DG ends at about a quarter of the error of PG with exact "
            "importance weights, or less",
            [line for line in stated if line not in orders],
        ),
    ]
