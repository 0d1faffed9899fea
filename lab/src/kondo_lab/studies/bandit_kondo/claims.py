"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.bandit_kondo.run import GATE, PG


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims of the propositions, one by one."""
    first = [line for line in lines if line.figure == "Kondo Prop 1"]
    gated = [line for line in first if line.series.startswith(GATE)]
    kept = [line for line in gated if "largest of any" in line.metric]
    second = [line for line in lines if line.figure == "Kondo Prop 2"]
    return [
        by_lines("at price 0 the direction stays and the perpendicular variance is 0", kept),
        by_lines(
            "pB backward passes are paid instead of B, and log(1/delta) of them have cosine 1 with "
            "probability 1 - delta",
            [line for line in gated if line not in kept],
        ),
        by_lines(
            "PG needs backward passes in proportion to 1 / p^2",
            [line for line in first if line.series == PG and "passes to cosine" in line.metric],
        ),
        by_lines(
            "an additive priority ranks failures above successes unless alpha > L / (1 + L); "
            "delight never does",
            second,
        ),
        by_lines(
            "sigmoid((chi - price) / eta) solves the gate's problem, with its limits at eta 0 and "
            "infinity",
            [line for line in lines if line.figure == "Kondo Eq 1"],
        ),
    ]
