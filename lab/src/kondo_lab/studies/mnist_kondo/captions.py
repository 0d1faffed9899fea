"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import (
    compared,
    furthest,
    percent,
    starting,
    stated,
    verdict_told,
)
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.mnist_kondo import speed_ups
from kondo_lab.studies.mnist_kondo.claims import BORNE

COST = 2
"""Forward passes that a backward pass costs, where one cost is told of."""


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], gated: str, rate: float
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        gated: the series of the gate.
        rate: its rate.
    """
    errors = {name: furthest(lines, name, "test error") for name in (gated, "PG", "DG")}
    speed = speed_ups.JUDGED.words
    ranked = [line for line in lines if line.figure == "Kondo Fig 5a"]
    return {
        "fig1-learning-curves": compared(
            f"{gated} ends at a test error of",
            errors[gated],
            {"PG's": errors["PG"], "DG's": errors["DG"]},
            otherwise="Error by forward passes and by backward passes.",
            show=percent,
            verdict=verdict_told(claims, "DG-K ends below PG", "on the order of online errors"),
        ),
        "fig3-speed-up": stated(
            f"Counted speed-up to 5% {speed_ups.JUDGED.metric} over PG where a backward pass costs "
            f"{COST} forward passes: {{0}}x for {gated}, {{1}}x for DG",
            [find(lines, name, speed, COST) for name in (gated, "DG")],
            otherwise="Counted speed-up over PG by the cost of a backward pass.",
            verdict=verdict_told(claims, "times cheaper than PG"),
        ),
        "fig2-rates": _rates(lines, claims),
        "fig4-noise": _noise(lines, claims, gated),
        "fig5-priorities": compared(
            f"At a rate of {100 * rate:g}% ranking by delight ends at an online error of",
            starting(ranked, "delight", "online error", rate),
            {"surprisal's": starting(ranked, "surprisal", "online error", rate)},
            otherwise="Online error by what ranks the samples.",
            show=percent,
        ),
    }


def _rates(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    own = [
        line
        for line in lines
        if line.figure == "Kondo Fig 2" and line.metric.startswith("online error after")
    ]
    otherwise = "Online error by rate, with the best learning rate of each."
    if not own:
        return otherwise
    least, most = (pick(own, key=lambda line: line.ours) for pick in (min, max))
    return stated(
        f"Rates end at an online error of {{0}} ({least.series}) to {{1}} ({most.series})",
        [least, most],
        otherwise=otherwise,
        show=percent,
        verdict=verdict_told(claims, "every rate ends", "that every rate ends at about 0.5%"),
    )


def _noise(lines: Sequence[Headline], claims: Sequence[Claim], gated: str) -> str:
    borne = [line for line in lines if line.metric.startswith(BORNE)]
    ways = [line.series.partition(", ")[2] for line in borne]
    way = ways[0] if ways else ""
    times = borne[0].metric.removeprefix(f"{BORNE} ").removesuffix("x") if borne else ""
    return compared(
        f"Error is {times} times that without noise at this {way}: {gated}",
        starting(borne, f"{gated}, {way}", BORNE),
        {"DG's": starting(borne, f"DG, {way}", BORNE)},
        otherwise="Online error by noise in the gate.",
        verdict=verdict_told(claims, "tolerates less noise than DG"),
    )
