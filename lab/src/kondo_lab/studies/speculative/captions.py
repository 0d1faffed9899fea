"""What the figure of a rate shows, by the headline's lines."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, decided, percent
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Headline
from kondo_lab.studies.speculative.claims import ERROR
from kondo_lab.studies.speculative.drafts import EXACT


def caption(lines: Sequence[Headline], rate: float, cost: str) -> str:
    """Return which screen costs the least to the target, and where it ends.

    Args:
        lines: of the headline.
        rate: of the figure.
        cost: the metric of the counted cost.
    """
    otherwise = f"Agreement, error and cost by screen at a rate of {100 * rate:g}%."
    own = [line for line in lines if line.metric == cost and line.x == rate]
    if not own:
        return otherwise
    most = max(line.seeds for line in own)
    # A cost of the few seeds that reach the target would flatter a screen.
    least = min((line for line in own if line.seeds == most), key=lambda line: line.ours)
    if not decided(least):
        return otherwise
    subject = (
        f"At a rate of {100 * rate:g}% the screen {least.series} has the least "
        f"{cost}, {least.ours:,.0f}, and ends at an online error of"
    )
    exact = find(lines, EXACT, ERROR, rate)
    others = {} if least.series == EXACT else {"the exact screen's": exact}
    return compared(
        subject,
        find(lines, least.series, ERROR, rate),
        others,
        otherwise=f"{subject.rpartition(', and ends')[0]}.",
        show=percent,
    )
