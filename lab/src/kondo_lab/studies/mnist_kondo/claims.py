"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.studies.agreement import judge
from kondo_lab.studies.claims import LEAST_SEEDS, by_lines, estimate_of
from kondo_lab.studies.mnist_kondo.speed_ups import JUDGED
from kondo_lab.studies.study import Claim, Headline

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

    speed_ups_of_gate = [line for line in of("Kondo Fig 3") if line.series.startswith("DG-K")]
    borne = [_at_least(line) for line in of("Kondo Fig 4", BORNE)]
    return [
        by_lines(
            "with 3% of the backward passes DG-K ends below PG, and DG below DG-K",
            of("Kondo Fig 1", "order of"),
        ),
        by_lines("every rate ends at an error of about 0.5%", of("Kondo Fig 2")),
        by_lines(
            f"counted in passes DG-K reaches {_reading(speed_ups_of_gate)} 1.41 (1 + c) / "
            "(1 + 0.03 c) times cheaper than PG",
            speed_ups_of_gate,
        ),
        by_lines("DG tolerates as much noise in delight and in logits as the paper's", borne),
        by_lines("DG-K tolerates less noise than DG", of("Kondo Fig 4", "order of")),
        by_lines("no additive mix of advantage and surprisal replaces delight", of("Kondo Fig 5")),
    ]


def _reading(lines: Sequence[Headline]) -> str:
    """Return which error, of what curve, the judged speed-ups are counted to."""
    metric = lines[0].metric if lines else JUDGED.words
    error, _, rule = metric.removeprefix("speed-up over PG to ").partition(", ")
    return f"{error} ({rule})" if rule else error


def _at_least(line: Headline) -> Headline:
    """Return a line judged by "at least": tolerating more noise than the paper's DG is no miss.

    What was too noisy to tell is still no miss.
    """
    if line.expected is None or line.seeds < LEAST_SEEDS:
        return line
    verdict = judge(estimate_of(line), line.expected, line.against, "at least")
    unsure = verdict == "differs" and line.verdict == "noisy"
    return line if unsure else line._replace(verdict=verdict)
