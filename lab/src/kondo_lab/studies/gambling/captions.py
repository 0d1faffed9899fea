"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, percent, verdict_told
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.gambling.rules import priced
from kondo_lab.studies.gambling.run import FINAL

PG, GATE, UNBIASED, RANKED = "PG", priced(0.0).name, "unbiased 10%", "DG-K 10%"


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], noise: float, gamblers: Sequence[int]
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        noise: sigma / Delta that is told of.
        gamblers: numbers of noisy arms among many.
    """

    def ends(own: str, other: str, part: str, where: str, otherwise: str, verdict: str = "") -> str:
        metric = f"{FINAL}, {part}"
        return compared(
            f"With noise of {noise:g} times the gap{where} {own} ends with a share of bad arms of",
            find(lines, own, metric, noise),
            {f"{other}'s": find(lines, other, metric, noise)},
            otherwise=otherwise,
            show=percent,
            verdict=verdict,
        )

    most = max(gamblers, default=0)
    drawn = "Share of bad arms at the end, by"
    return {
        "noise-sweep": ends(
            GATE, PG, "two-arms", "", f"{drawn} noise.", verdict_told(claims, "learn to gamble")
        ),
        "many-arms": ends(
            GATE, PG, f"many-arms-{most}", f" and {most} noisy arms", f"{drawn} noise and arms."
        ),
        "mitigations": ends(UNBIASED, RANKED, "mitigations", "", f"{drawn} rule and noise."),
    }
