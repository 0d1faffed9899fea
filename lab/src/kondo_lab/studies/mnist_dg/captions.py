"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, furthest, percent, verdict_told
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.mnist_dg.claims import CLOSER

END = "online error at the end"
DG, PG = "DG, zero baseline", "PG, zero baseline"
"""Those of Figure 2."""


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    single = [line for line in lines if line.x == 1]
    closest = [line.series for line in lines if line.metric == CLOSER]
    own = next((name for name in closest if name.startswith("DG ")), "")
    other = "PG" + own.removeprefix("DG")
    swept = next((line.metric for line in lines if line.metric.startswith("online error by ")), "")
    return {
        "fig2-learning-curves": _ends(single, "Online error by step, lower is better."),
        "fig3-samples-per-image": _ends(
            lines,
            "Online error at the end, by samples per image.",
            verdict_told(claims, "DG ends below PG", "of every baseline and number of samples"),
        ),
        "fig4-directions": compared(
            f"At the last probe {CLOSER} is for {own}",
            furthest(lines, own, CLOSER),
            {f"{other}'s": furthest(lines, other, CLOSER)},
            otherwise="Directions of the gradients by step.",
            verdict=verdict_told(claims, "closer than PG's"),
        ),
        "appendix-sweeps": _swept(lines, swept),
    }


def _ends(lines: Sequence[Headline], otherwise: str, verdict: str = "") -> str:
    """Compare DG with PG at the most samples of an image among these lines."""
    own = furthest(lines, DG, END)
    samples = "" if own is None else f"{own.x} sample{'s' if own.x != 1 else ''}"
    return compared(
        f"With {samples} per image and a zero baseline DG ends at an online error of",
        own,
        {"PG's": furthest(lines, PG, END)},
        otherwise=otherwise,
        show=percent,
        verdict=verdict,
    )


def _swept(lines: Sequence[Headline], metric: str) -> str:
    own = furthest(lines, "DG", metric)
    what = metric.removeprefix("online error by ")
    return compared(
        "" if own is None else f"At a {what} of {own.x:g} DG ends at an online error of",
        own,
        {"PG's": furthest(lines, "PG", metric)},
        otherwise="Online error by learning rate, batch and width.",
        show=percent,
    )
