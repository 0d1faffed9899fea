"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.agreement import judge
from kondo_lab.evidence.claims import LEAST_SEEDS, NOTHING, by_lines, estimate_of, shown
from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline
from kondo_lab.studies.mnist_kondo.speed_ups import DEFINITIONS

READINGS = [definition.words for definition in DEFINITIONS]
BORNE = "noise at which the error is"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims of the five figures."""
    papers = [line for line in lines if line.against == "paper"]

    def of(figure: str, metric: str = "") -> list[Headline]:
        return [
            line
            for line in papers
            if line.figure.startswith(figure) and line.metric.startswith(metric)
        ]

    borne = [_at_least(line) for line in of("Kondo Fig 4", BORNE)]
    return [
        by_lines(
            "with 3% of the backward passes DG-K ends below PG, and DG below DG-K",
            of("Kondo Fig 1", "order of"),
        ),
        by_lines("every rate ends at an error of about 0.5%", of("Kondo Fig 2")),
        _speed_up(lines),
        by_lines("DG tolerates as much noise in delight and in logits as the paper's", borne),
        by_lines("DG-K tolerates less noise than DG", of("Kondo Fig 4", "order of")),
        by_lines("no additive mix of advantage and surprisal replaces delight", of("Kondo Fig 5")),
    ]


def _speed_up(lines: Sequence[Headline]) -> Claim:
    """Return the claim about the gate's speed-up, judged by every reading of it.

    The paper does not say how it counts. Where its number fits some readings and not others, the
    claim is open.
    """
    statement = "counted in passes DG-K reaches 5% error 1.41 (1 + c) / (1 + 0.03 c) times cheaper"
    statement += " than PG, however that is counted"
    own = {
        line.metric: line
        for line in lines
        if line.series.startswith("DG-K") and str(line.x) == "0" and line.metric in READINGS
    }
    # The paper's number stands beside one reading of a full run, and beside none of a small one.
    expected = next((line.expected for line in own.values() if line.expected is not None), None)
    if expected is None:
        return Claim(statement, "open", NOTHING)
    found = {metric: estimate_of(line) for metric, line in own.items()}
    verdicts = [judge(ours, expected, "paper") for ours in found.values()]
    match = verdicts.count("matches")
    least, most = (pick(found.values(), key=lambda ours: ours.mean) for pick in (min, max))
    told = f"{match} of {len(found)} readings match: {shown(least)} to {shown(most)} at c = 0, "
    verdict: ClaimVerdict = "met" if match == len(found) else "open" if match else "missed"
    return Claim(statement, verdict, f"{told}expected {expected:.3g}")


def _at_least(line: Headline) -> Headline:
    """Return a line judged by "at least": tolerating more noise than the paper's DG is no miss.

    What was too noisy to tell is still no miss.
    """
    if line.expected is None or line.seeds < LEAST_SEEDS:
        return line
    verdict = judge(estimate_of(line), line.expected, line.against, "at least")
    unsure = verdict == "differs" and line.verdict == "noisy"
    return line if unsure else line._replace(verdict=verdict)
