"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims of the lemma, the corollary and the proposition."""
    corollary = [line for line in lines if line.figure == "Distributed Cor 1"]
    signal = [line for line in corollary if "signal over contamination" in line.metric]

    def of(figure: str) -> list[Headline]:
        return [line for line in lines if line.figure == figure]

    return [
        by_lines(
            "Lemma 1: DG passes at most pi(a)^(1/(2 eta)) of a failure", of("Distributed Lemma 1")
        ),
        by_lines(
            "what contaminates DG vanishes against what contaminates PG as delta falls, by signal "
            "over contamination",
            signal,
        ),
        by_lines(
            "Corollary 1: DG's cosine over PG's grows as delta falls, for every eta",
            [line for line in corollary if line not in signal],
        ),
        by_lines(
            "Proposition 3: a weight that ignores the reward's sign treats rare failures and rare "
            "successes alike",
            of("Distributed Prop 3"),
        ),
        by_lines(
            "the perpendicular second moment of failures falls as the formula has it",
            of("Distributed v2, second moment"),
        ),
    ]
