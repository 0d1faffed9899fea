"""What the study claims, judged by its headline lines."""

import math
from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline

FEW, WITHIN, SLOWER = 10, 1.2, 0.01
"""Actors that are "a few"; the factor for a simulated pace; what dropping may cost."""


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about the pace, who sets it, dropping at the source and staleness."""

    def judged(metric: str, expected: float, least: float, most: float) -> list[Headline]:
        return [
            line._replace(
                expected=expected, verdict="matches" if least <= line.ours <= most else "differs"
            )
            for line in lines
            if line.metric == metric
        ]

    pace = judged("simulated / measured pace", 1.0, 1 / WITHIN, WITHIN)
    few = judged("actors for 90% of that", FEW, 1, FEW)
    dropped = judged("pace over that of send all", 1.0, 1.0 - SLOWER, math.inf)
    measured = [line for line in lines if line.figure == "measured on Ray / simulated"]
    return [
        by_lines("the simulation paces real Ray runs with 1 to 8 actors within 20%", pace),
        by_lines(f"beyond {FEW} actors more of them add no more than a tenth of the pace", few),
        by_lines(f"dropping at the source never costs more than {SLOWER:.0%} of the pace", dropped),
        by_lines(
            "staleness is actors x queue / rollouts per step - 1, as simulated",
            [line for line in measured if line.metric == "staleness"],
        ),
        by_lines(
            "a message has the bytes of its kept rows",
            [line for line in measured if line.metric == "bytes of a message"],
        ),
    ]
