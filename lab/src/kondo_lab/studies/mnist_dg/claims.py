"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines, estimate_of, lower, together
from kondo_lab.evidence.study import Claim, Headline

CLOSER = "1 - cosine to the cross-entropy gradient"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return the claims about errors and about directions."""
    below = [
        line
        for line in lines
        if line.figure == "DG Fig 3" and line.metric.startswith("order of online error")
    ]
    angles = {(line.series, line.x): line for line in lines if line.metric == CLOSER}
    pairs = [
        lower(f"{series} at {x}", own, angles.get(("PG" + series.removeprefix("DG"), x)))
        for (series, x), own in angles.items()
        if series.startswith("DG") and estimate_of(own).seeds
    ]
    return [
        by_lines("DG ends below PG for every baseline and any number of samples per image", below),
        together("DG's gradient is closer than PG's to the cross-entropy gradient", pairs),
    ]
