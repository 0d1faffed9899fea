"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, starting, verdict_told
from kondo_lab.evidence.claims import estimate_of, shown
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.contamination import run
from kondo_lab.studies.contamination.run import PG, dg

USUAL = dg(1.0)
"""Whose numbers are told."""


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    return {
        "cosine-and-signal": _expected(lines, claims),
        "samples-and-second-moment": _sampled(lines),
        "sign-blind-weights": _sign_blind(lines, claims),
        "many-contexts": _contexts(lines),
    }


def _expected(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    ratio = f"{USUAL} / PG"
    signal, cosine = (starting(lines, ratio, f"{m}, ") for m in (run.STRENGTH, run.COSINE))
    if signal is None or cosine is None:
        return "Cosine, signal over contamination, and gates of the expected gradient, by policy."
    verdict = verdict_told(claims, "Corollary 1", "that the ratio of cosines grows")
    return (
        f"At delta = {signal.x:g} DG with temperature 1 has {shown(estimate_of(signal))} times "
        f"PG's signal over contamination and {shown(estimate_of(cosine))} times its cosine "
        f"(exact{verdict})."
    )


def _sampled(lines: Sequence[Headline]) -> str:
    metrics = [
        line.metric
        for line in lines
        if line.series == PG and line.metric.startswith("cosine, ") and " samples, " in line.metric
    ]
    otherwise = "Cosine of sampled gradients, and the second moment of failures, by policy."
    if len(metrics) < 2:
        return otherwise
    single = metrics[1]  # pooled samples come first, then a single batch
    deltas = [float(line.x) for line in lines if line.metric == single and line.series == PG]
    size = single.split(", ")[1]
    return compared(
        f"At delta = {min(deltas):g} DG with temperature 1 has in a batch of {size} a cosine of",
        starting(lines, USUAL, single, min(deltas)),
        {"PG's": starting(lines, PG, single, min(deltas))},
        otherwise=otherwise,
    )


def _sign_blind(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    dense = starting(lines, PG, run.FAILURE)
    return compared(
        ""
        if dense is None
        else f"At delta = {dense.x:g} DG with temperature 1 has a signal over "
        "contamination by a rare failure of",
        starting(lines, USUAL, run.FAILURE),
        {"PG's": dense},
        otherwise="Weights of rare successes and rare failures.",
        exact=True,
        verdict=verdict_told(claims, "Proposition 3", "on sign-blind weights"),
    )


def _contexts(lines: Sequence[Headline]) -> str:
    own = [line for line in lines if line.metric.endswith("of the contexts solved")]
    cosines = [line for line in own if line.metric.startswith(f"{run.COSINE}, ")]
    otherwise = "Cosine to the true gradient with many contexts, by policy."
    if not cosines:
        return otherwise
    last = cosines[-1]
    share = float(last.metric.removeprefix(f"{run.COSINE}, ").partition(" ")[0])
    return compared(
        f"With {100 * share:g}% of the contexts solved to delta = {last.x:g} DG with temperature 1 "
        "has a cosine of",
        starting(cosines, USUAL, last.metric, last.x),
        {"PG's": starting(cosines, PG, last.metric, last.x)},
        otherwise=otherwise,
        exact=True,
    )
