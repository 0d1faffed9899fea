"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.studies.agreement import judge
from kondo_lab.studies.claims import by_lines, estimate_of
from kondo_lab.studies.study import Claim, Headline

MOST = 0.5
"""More than this share of the rows is most of them."""
AGREED, ERROR = "kept agreement over training", "online error at the end"
COST = "counted cost to 5% test error, c = 2"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about rows kept, errors and costs, each over every screen and rate."""
    exact = {(line.metric, str(line.x)): line for line in lines if line.series == "exact"}

    def beside(metric: str) -> list[tuple[Headline, Headline]]:
        return [
            (line, exact[metric, str(line.x)])
            for line in lines
            if line.metric == metric and line.series != "exact" and (metric, str(line.x)) in exact
        ]

    kept = [
        line._replace(expected=MOST, verdict="matches" if line.ours > MOST else "differs")
        for line, _ in beside(AGREED)
    ]
    similar = [
        line._replace(expected=own.ours, verdict=judge(estimate_of(line), own.ours, "simulation"))
        for line, own in beside(ERROR)
    ]
    cheaper = [
        line._replace(expected=own.ours, verdict="matches" if line.ours < own.ours else "differs")
        for line, own in beside(COST)
    ]
    return [
        by_lines("every screen keeps most of the rows that the policy itself would keep", kept),
        by_lines("every screen ends at an error within 20% of the exact screen's", similar),
        by_lines(
            "every screen reaches 5% test error for a lower counted cost than the exact one",
            cheaper,
        ),
    ]
