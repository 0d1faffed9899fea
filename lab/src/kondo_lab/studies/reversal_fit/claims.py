"""What the study claims, judged by the scores of its pairs."""

from collections.abc import Sequence

from kondo_lab.studies.claims import NOTHING
from kondo_lab.studies.study import Claim, Headline

FIGURES = ("Kondo Fig 8", "DG Fig 8", "DG Fig 9b", "Kondo Fig 10", "DG Fig 9a")
"""All must have been run before the claim is more than open."""
STATEMENT = "One pair of width and learning rate fits every figure better than all others"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return whether the same pair has the lowest score of every figure.

    Kondo Figure 10 is read in two ways; each counts as a figure of its own.

    Args:
        lines: those of the scores, one for each figure and pair.
    """
    by_figure: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.figure.startswith(FIGURES):
            by_figure.setdefault(line.figure, {})[line.series] = line.ours
    if not by_figure:
        return [Claim(STATEMENT, "open", NOTHING)]
    best = {figure: min(scores, key=scores.__getitem__) for figure, scores in by_figure.items()}
    told = "; ".join(f"{figure}: {pair}" for figure, pair in best.items())
    missing = [name for name in FIGURES if not any(own.startswith(name) for own in by_figure)]
    if len(set(best.values())) > 1:
        return [Claim(STATEMENT, "missed", told)]
    return [Claim(STATEMENT, "open" if missing else "met", told)]
