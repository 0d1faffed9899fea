"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, decided, furthest, percent, verdict_told
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.reversal_frictions.claim_lines import error_metric
from kondo_lab.studies.reversal_frictions.run import ALL, sweeps
from kondo_lab.studies.reversal_frictions.settings import Settings

TENTH = "DG ends with about a tenth of the error"


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], settings: Settings
) -> dict[str, str]:
    """Return a sentence for every figure."""
    found = {}
    for reward in settings.rewards:
        friction = next(iter(sweeps(settings)))
        metric = error_metric(reward, friction)
        strongest = furthest(lines, "DG", metric)
        claim = verdict_told(claims, f"{reward}, {friction} alone: {TENTH}", "of a tenth of it")
        found[f"error-by-friction-{reward}"] = compared(
            "" if strongest is None else f"At {friction} {strongest.x:g} DG ends at an error of",
            strongest,
            {"PG's": furthest(lines, "PG", metric)},
            otherwise="Learner error by friction.",
            show=percent,
            verdict=claim,
        )
        metric = error_metric(reward, ALL)
        claim = verdict_told(claims, f"{reward}, all frictions together: {TENTH}", "of a tenth")
        found[f"all-frictions-{reward}"] = compared(
            f"With all frictions at length {settings.length} DG ends at an error of",
            find(lines, "DG", metric, float(settings.length)),
            {"PG's": find(lines, "PG", metric, float(settings.length))},
            otherwise="Learner error with all frictions together, by length.",
            show=percent,
            verdict=claim,
        )
    why = [line for line in lines if line.metric == "learner error, why"]
    others = [line for line in why if line.series != "DG"]
    best = min(others, key=lambda line: line.ours) if decided(*others) else None
    found["why-bugs"] = compared(
        ""
        if best is None
        else f"Lowest error with bugs in {best.x:.0%} of the rows, {best.series}:",
        best,
        {"DG's": find(why, "DG", "learner error, why")},
        otherwise="Error and the push of bugs, by rule.",
        show=percent,
    )
    return found
