"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, known, seeds_told, verdict_told
from kondo_lab.evidence.claims import estimate_of, find, shown
from kondo_lab.evidence.runs import LEARNER, LOOP
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.lm_rl.plane import AGAINST
from kondo_lab.training.fields import slug
from kondo_lab.training.language_arms import named

REWARD = "held-out reward at temperature 1, at the end"
ENTROPY = "entropy at the last evaluation, nats a token"
DELIGHT, RANDOM, DENSE = named("delight", "PG"), named("random", "PG"), "GRPO"


def captions(
    lines: Sequence[Headline],
    claims: Sequence[Claim],
    main: str,
    rare: Sequence[str],
    planes: Sequence[str],
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        main: name of the field where selections are compared.
        rare: fields whose starts are seldom right.
        planes: names of the planes.
    """

    def ends(metric: str, subject: str, otherwise: str, verdict: str = "") -> str:
        return compared(
            f"{main}: {DELIGHT} ends with {subject} of",
            find(lines, DELIGHT, metric, main),
            {f"{RANDOM}'s": find(lines, RANDOM, metric, main)},
            otherwise=otherwise,
            verdict=verdict,
        )

    return {
        "selections": ends(
            REWARD,
            "a reward",
            "Reward at the end by what selects the samples to train on.",
            verdict_told(claims, f"{main}, PG: rows of highest delight", "that it ends highest"),
        ),
        "entropy": ends(
            ENTROPY, "an entropy in nats a token", "Entropy by what selects the samples."
        ),
        "starts": _starts(lines, rare),
        **{slug("plane", plane): _plane(lines, claims, plane) for plane in planes},
    }


def _starts(lines: Sequence[Headline], rare: Sequence[str]) -> str:
    """Tell of the first rare start that has both."""
    for field in rare:
        own, dense = (find(lines, name, REWARD, field) for name in (DELIGHT, DENSE))
        if known(own, dense):
            subject = f"{field}: {DELIGHT} ends with a reward of"
            return compared(subject, own, {f"dense {DENSE}'s": dense}, otherwise="")
    return "Reward by step, by how often the first policy is right."


def _plane(lines: Sequence[Headline], claims: Sequence[Claim], plane: str) -> str:
    """Tell how much sooner than the best dense point the best gated one is."""
    ratios = [
        line
        for line in lines
        if line.x == plane
        and "speed-up over the best dense point" in line.metric
        and not line.series.startswith("PODS")
        and known(line)
    ]
    told = []
    for axis in (LEARNER, LOOP):
        for line in ratios:
            if line.metric.startswith(f"{axis} to "):
                bound = line.metric.partition("best dense point")[2].removeprefix(", ")
                verdict = next(
                    (
                        f" (aim {own.verdict})"
                        for own in claims
                        if own.statement.startswith(f"{plane}: ")
                        and f" in {axis} " in own.statement
                    ),
                    "",
                )
                least = f"{bound} " if bound else ""
                told.append(f"{least}{shown(estimate_of(line))}x in {axis}{verdict}")
    if not told:
        return f"{plane}: time to the target by rows a step and share kept."
    target = ratios[0].metric.partition(" to ")[2].partition(",")[0]
    return (
        f"{plane}: speed-up of {ratios[0].series} over the best dense point, to a reward of "
        f"{target}: {' and '.join(told)}; {seeds_told(*ratios)}. {AGAINST}"
    )
