"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import stated, verdict_told
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.bandit_kondo.run import GATE, PG, PG_FITTED

THRESHOLD, VARIANCE = "alpha*", "perpendicular variance"


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    return {
        "prop2-mixing-threshold": _threshold(lines, claims),
        "prop1-cosine": _cosine(lines, claims),
        "prop1-variance-and-passes": _variance(lines, claims),
    }


def _threshold(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    own = [line for line in lines if line.metric == THRESHOLD]
    highest = max(own, key=lambda line: line.ours, default=None)
    if highest is None:
        return "Weight of the advantage that an additive priority needs to rank successes first."
    arms = highest.series.rpartition("K=")[2]
    return stated(
        f"With {arms} arms and p = {highest.x} an additive priority needs a weight of {{0}} on the "
        "advantage to rank successes first",
        [highest],
        otherwise="",
        verdict=verdict_told(claims, "an additive priority"),
    )


def _cosine(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    slopes = [line for line in lines if line.metric.startswith("exponent of 1/p")]
    by_series = {line.series: line for line in slopes}
    target = slopes[0].metric.rpartition(" ")[2] if slopes else ""
    return stated(
        f"PG's backward passes to cosine {target} grow as 1/p to the power {{0}} with a constant "
        "baseline, and {1} with a baseline of p",
        [by_series.get(PG), by_series.get(PG_FITTED)],
        otherwise="Direction of PG's mean gradient by backward passes.",
        verdict=verdict_told(claims, "in proportion to 1 / p^2", "of a power of 2"),
    )


def _variance(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    dense = [
        line for line in lines if line.metric == VARIANCE and line.series.startswith(f"{PG}, K=")
    ]
    gated = [
        line
        for line in lines
        if line.series == GATE and line.metric.startswith(f"{VARIANCE}, largest of any")
    ]
    most = max(dense, key=lambda line: line.ours, default=None)
    return stated(
        f"Perpendicular variance is at most {{0}} for PG and {{1}} for {GATE}",
        [most, gated[0] if gated else None],
        otherwise="Perpendicular variance, and passes to the true direction, by policy.",
        verdict=verdict_told(claims, "perpendicular variance is 0"),
    )
