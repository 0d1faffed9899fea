"""What the study claims, judged by its headline lines."""

import math
from collections.abc import Sequence

from kondo_lab.evidence.agreement import judge, judge_order
from kondo_lab.evidence.claims import (
    LEAST_SEEDS,
    NOTHING,
    OF_ORDERS,
    by_lines,
    estimate_of,
    shown,
)
from kondo_lab.evidence.study import Claim, ClaimVerdict, Headline
from kondo_lab.studies.reversal_kondo.settings import Settings

LENGTH = "longest length with"
"""In the reading that is compared with the paper."""
GAIN = "speed-up over PG to 25% error"
GATES = ("DG-K 3%", "DG-K price 0")


def claims(lines: Sequence[Headline], length: int = Settings().length) -> list[Claim]:
    """Return the claims about passes, lengths and difficulty.

    Args:
        lines: of headline.csv.
        length: H of the vocabulary sweep.
    """
    papers = [line for line in lines if line.against == "paper"]
    return [
        by_lines(
            "DG-K pays 3% to 7% of the backward passes",
            [line for line in lines if line.metric == "backward passes at the end"],
        ),
        by_lines("DG-K solves about as long sequences as DG", _beside_dg(lines)),
        by_lines(
            "DG and DG-K solve longer sequences than PG, PPO and PMPO",
            [line for line in papers if line.metric.startswith("order of - longest length")],
        ),
        *(_growth(lines, gate, length) for gate in GATES),
    ]


def _beside_dg(lines: Sequence[Headline]) -> list[Headline]:
    """Return DG-K's lengths with DG's own at the same samples as what is expected."""
    lengths = {
        (line.series, str(line.x)): line
        for line in lines
        if line.metric.startswith(LENGTH) and line.against in ("paper", "fitted")
    }
    return [
        line._replace(
            expected=lengths["DG", x].ours,
            verdict=judge(estimate_of(line), lengths["DG", x].ours, "simulation", "at least"),
        )
        for (series, x), line in lengths.items()
        if series in GATES and ("DG", x) in lengths
    ]


def _growth(lines: Sequence[Headline], gate: str, length: int) -> Claim:
    """Return whether a gate's speed-up at the highest backward cost rises with the vocabulary.

    Open with fewer than two vocabularies, and where one has too few seeds or no standard error.
    Other lengths are another sweep.
    """
    sweep = f"{GAIN}, H={length} M="
    own = [line for line in lines if line.series == gate and line.metric.startswith(sweep)]
    statement = f"{gate}: the gain over PG grows with the vocabulary"
    if not own:
        return Claim(statement, "open", NOTHING)
    dearest = max(float(line.x) for line in own)
    gains = {
        int(line.metric.removeprefix(sweep)): estimate_of(line)
        for line in own
        if float(line.x) == dearest and not math.isnan(line.ours)
    }
    sizes = sorted(gains)
    told = ", ".join(f"M = {size}: {shown(gains[size])}" for size in sizes)
    verdict: ClaimVerdict = "open"
    known = all(g.seeds >= LEAST_SEEDS and not math.isnan(g.se) for g in gains.values())
    if len(sizes) > 1 and known:
        order = judge_order([str(size) for size in sizes], {str(m): gains[m] for m in sizes})
        verdict = OF_ORDERS.get(order, "open")
    return Claim(statement, verdict, f"{told} (c = {dearest:g})")
