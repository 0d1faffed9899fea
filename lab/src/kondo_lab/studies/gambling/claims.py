"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the proposition's probability and its two statements in words."""
    luck = [line for line in lines if line.metric.startswith("Pr(U > 0")]
    orders = [line for line in lines if line.metric.startswith("order of bad arms")]
    equal = [line for line in lines if "equal-noise, largest of the sweep" in line.metric]
    return [
        by_lines(
            "a noisy bad arm has a positive advantage with probability Phi(-p Delta / sigma)", luck
        ),
        by_lines(
            "DG and the gate learn to gamble: they end with more of the bad arm than PG", orders
        ),
        by_lines("with equal noise on all arms DG and PG degrade together", equal),
    ]
