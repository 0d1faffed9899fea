"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims of both propositions and of the figures."""
    first = [line for line in lines if line.figure == "DG Prop 1"]
    small = [line for line in first if line.metric.endswith("B=100")]
    closer = [
        line
        for line in lines
        if line.figure == "DG Prop 2"
        or (line.figure == "DG Fig 6" and line.metric == "order of 1 - cosine")
    ]
    drawn = [line for line in lines if line.figure in ("DG Fig 5", "DG Fig 6")]
    return [
        by_lines(
            "one context: DG keeps PG's direction, and its cosine gap is (w- / c)^2 of PG's where "
            "the batch is large",
            [line for line in first if line not in small],
        ),
        by_lines("the same of the gap at the paper's batch of 100", small),
        by_lines(
            "many contexts, exact gradients: DG is closer than PG to the cross-entropy gradient "
            "for eta > 1/2",
            closer,
        ),
        by_lines(
            "DG's error and angle fall below PG's, and cross-entropy's error below both", drawn
        ),
    ]
