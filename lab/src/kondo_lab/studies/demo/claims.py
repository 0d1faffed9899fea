"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import above_zero, estimate_of, find
from kondo_lab.evidence.study import Claim, Estimate, Headline

GATE = "DG-K (3%)"


def claims(lines: Sequence[Headline]) -> list[Claim]:
    """Return, task by task, whether DG-K ends below PG, and its learner takes less time."""
    found = []
    for task in dict.fromkeys(line.figure for line in lines):
        own = [line for line in lines if line.figure == task]
        gated, dense = (find(own, series, "final error") for series in (GATE, "PG"))
        faster = find(own, GATE, "learner speed-up")
        if gated is None or dense is None or faster is None:
            continue
        apart = Estimate(
            dense.ours - gated.ours,
            (estimate_of(dense).error ** 2 + estimate_of(gated).error ** 2) ** 0.5,
            min(dense.seeds, gated.seeds),
        )
        found += [
            Claim(
                f"{task}: {GATE} ends below PG's error",
                above_zero(apart),
                f"{gated.ours:.3g} and {dense.ours:.3g}, {apart.seeds} seeds",
            ),
            Claim(
                f"{task}: its learner takes less time than PG's",
                "met" if faster.ours > 1 else "missed",
                f"{faster.ours:.3g} times faster",
            ),
        ]
    return found
