"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, count, decided, seeds_told, verdict_told
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.scale.run import BYTES
from kondo_lab.studies.scale.settings import EVERY_ROW, SOURCE

RATIO, GAIN = "simulated / measured pace", "pace over that of send all"


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], tasks: Sequence[str], actors: int
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: of the study.
        tasks: names of those that were run.
        actors: of the real runs, the most.
    """
    return {
        "measured-against-simulated": _checked(lines, claims),
        **{f"{task}-actors": _gained(lines, task) for task in tasks},
        "staleness-and-bytes": compared(
            f"{tasks[0]}: with rows dropped at the source a simulated message has bytes of",
            find(lines, f"{tasks[0]}, {SOURCE}", BYTES, actors),
            {f"{EVERY_ROW}'s": find(lines, f"{tasks[0]}, {EVERY_ROW}", BYTES, actors)},
            otherwise="Staleness, traffic and idle time by actors, simulated.",
            show=count,
        ),
    }


def _checked(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    ratios = [line for line in lines if line.metric == RATIO]
    if not ratios:
        return "Measured on Ray against simulated."
    about = "that it is within 20%"
    verdict = verdict_told(claims, "paces real Ray runs", about) if decided(*ratios) else ""
    values = [line.ours for line in ratios]
    return (
        f"The simulated pace is {min(values):.2f} to {max(values):.2f} times the pace measured on "
        f"Ray over {len(ratios)} kinds of runs ({seeds_told(*ratios)} each{verdict})."
    )


def _gained(lines: Sequence[Headline], task: str) -> str:
    gains = [line for line in lines if line.metric == GAIN and line.series.startswith(f"{task}, ")]
    if not gains:
        return f"{task}: simulated rollouts per second by actors."
    values = [line.ours for line in gains]
    return (
        f"{task}: with {gains[0].x:,} simulated actors dropping at the source changes the pace by "
        f"{min(values):.2f}x to {max(values):.2f}x over {len(gains)} networks, designs, learners "
        "and rates."
    )
