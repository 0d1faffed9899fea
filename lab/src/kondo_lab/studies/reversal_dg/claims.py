"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about speed, length and vocabulary."""

    def orders(*figures: str) -> list[Headline]:
        return [
            line for line in lines if line.figure in figures and line.metric.startswith("order of")
        ]

    return [
        by_lines("DG learns faster than PG, PPO and PMPO", orders("DG Fig 8")),
        by_lines("DG's error grows more slowly with the length", orders("DG Fig 9a", "DG Fig 9c")),
        by_lines(
            "DG's error grows more slowly with the vocabulary", orders("DG Fig 9b", "DG Fig 9d")
        ),
    ]
