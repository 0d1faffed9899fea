"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.agreement import Verdict, judge, judge_order
from kondo_lab.evidence.claims import by_lines, estimate_of
from kondo_lab.evidence.study import Claim, Estimate, Headline

MOST = 0.5
"""More than this share of the rows is most of them."""
AGREED, ERROR = "kept agreement over training", "online error at the end"
COST = "counted cost to 5% test error, c = 2"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about rows kept, errors and costs, each over every screen and rate.

    Where not every seed reaches the target, a screen does not reach it: a mean over the seeds that
    do would flatter it.
    """
    seeds = {(line.series, str(line.x)): line.seeds for line in lines if line.metric == ERROR}
    exact = {(line.metric, str(line.x)): line for line in lines if line.series == "exact"}

    def beside(metric: str) -> list[tuple[Headline, Headline]]:
        return [
            (line, exact[metric, str(line.x)])
            for line in lines
            if line.metric == metric and line.series != "exact" and (metric, str(line.x)) in exact
        ]

    def cheaper_than(line: Headline, own: Headline) -> Verdict:
        if line.seeds < seeds[line.series, str(line.x)]:
            return "differs"
        return judge_order(["own", "exact"], {"own": estimate_of(line), "exact": estimate_of(own)})

    kept = [line._replace(expected=MOST, verdict=_most(line)) for line, _ in beside(AGREED)]
    similar = [
        line._replace(expected=own.ours, verdict=judge(estimate_of(line), own.ours, "simulation"))
        for line, own in beside(ERROR)
    ]
    cheaper = [
        line._replace(expected=own.ours, verdict=cheaper_than(line, own))
        for line, own in beside(COST)
    ]
    return [
        by_lines("every screen keeps most of the rows that the policy itself would keep", kept),
        by_lines("every screen ends at an error within 20% of the exact screen's", similar),
        by_lines(
            "every screen reaches 5% test error with every seed, for a lower counted cost than the "
            "exact one",
            cheaper,
        ),
    ]


def _most(line: Headline) -> Verdict:
    """Return whether a share is above one half, by more than two standard errors."""
    found = {"half": Estimate(MOST), "kept": estimate_of(line)}
    return judge_order(["half", "kept"], found)
