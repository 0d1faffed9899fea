"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import stated, verdict_told
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.measured.quality import TARGET
from kondo_lab.studies.measured.run import EXACT, FREE, LEARNER


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    return {
        "speed-up-per-step": _ranged(
            lines, FREE, LEARNER, "a learner step", "Speed-up of a step over PG's, by workload."
        ),
        "speed-up-to-quality": _ranged(
            lines,
            EXACT,
            f"{LEARNER} over PG to {TARGET}",
            f"the learner to {TARGET}",
            f"Speed-up over PG to {TARGET}, by workload.",
            verdict_told(claims, "as counted", "that it is as counted"),
        ),
    }


def _ranged(
    lines: Sequence[Headline],
    series: str,
    metric: str,
    what: str,
    otherwise: str,
    verdict: str = "",
) -> str:
    """Return the lowest and the highest speed-up over PG, and how many workloads are slower."""
    own = [line for line in lines if (line.series, line.metric) == (series, metric)]
    if not own:
        return otherwise
    least, most = (pick(own, key=lambda line: line.ours) for pick in (min, max))
    slower = sum(line.ours < 1 for line in own)
    return stated(
        f"{series}: the speed-up of {what} over PG is {{0}}x ({least.x}) to {{1}}x ({most.x}), "
        f"below 1x on {slower} of {len(own)} workloads",
        [least, most],
        otherwise=otherwise,
        verdict=verdict,
        unit="round",
    )
