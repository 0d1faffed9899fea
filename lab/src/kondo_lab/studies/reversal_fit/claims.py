"""What the study claims, judged by the scores of its pairs and by how sure their ranking is."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import LEAST_SEEDS, NOTHING
from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline

FIGURES = ("Kondo Fig 8", "DG Fig 8", "DG Fig 9b", "Kondo Fig 10", "DG Fig 9a")
"""All must have been run before the claim is more than open."""
WON = "share of resamples with the lowest score"
SURE = 0.95
STATEMENT = "The pair that the reversal studies use fits the figures better than every other pair"


def claims(lines: Sequence[Headline], used: str, few: Sequence[str] = ()) -> list[Claim]:
    """Return whether the pair in use has the lowest score of all figures together.

    | verdict | the pair in use has the lowest score                         |
    |---------|--------------------------------------------------------------|
    | met     | in the run, and in at least 95% of the resamples of seeds    |
    | missed  | in at most 5% of the resamples: other pairs in 95% or more   |
    | open    | in between; a figure was not run or has fewer than 3 seeds,  |
    |         | or the pair was not tried                                    |

    Kondo Figure 10 is read in two ways, and a pair counts with its better score. The best pair of
    every single figure is told and not judged: pairs near to each other take turns there.

    Args:
        lines: those of the scores, one for each figure and pair, and of the shares won.
        used: name of the pair in use.
        few: figures with fewer than `LEAST_SEEDS` seeds, whose spread no resample shows.
    """
    by_figure: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.figure.startswith(FIGURES):
            by_figure.setdefault(line.figure, {})[line.series] = line.ours
    won = {line.series: line.ours for line in lines if line.metric == WON}
    if not by_figure or not won:
        return [Claim(STATEMENT, "open", NOTHING)]
    totals: dict[str, float] = {}
    for line in lines:
        if line.figure.startswith("all figures, "):
            totals[line.series] = min(line.ours, totals.get(line.series, line.ours))
    lowest = min(totals, key=totals.__getitem__)
    complete = all(any(own.startswith(name) for own in by_figure) for name in FIGURES)
    best = {figure: min(own, key=own.__getitem__) for figure, own in by_figure.items()}
    told = [
        f"in use: {used}, lowest in {won[used]:.0%} of the resamples"
        if used in won
        else f"in use: {used}, not tried",
        f"lowest score: {lowest}, in {won[lowest]:.0%}",
        *(f"{figure}: {pair}" for figure, pair in best.items()),
    ]
    if few:
        told.append(f"fewer than {LEAST_SEEDS} seeds: {', '.join(few)}")
    verdict: ClaimVerdict = "open"
    if complete and not few and used in won:
        if used == lowest and won[used] >= SURE:
            verdict = "met"
        elif won[used] <= 1 - SURE:
            verdict = "missed"
    return [Claim(STATEMENT, verdict, "; ".join(told))]
