"""The one table that says in which order, and under which heading, a report shows studies."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kondo_lab.evidence.result_folder import Result
from kondo_lab.evidence.study import Headline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A section of the report."""

    name: str
    """Of its anchor."""
    short: str
    """In the bar at the top."""
    title: str
    paper: str = ""
    """How the `paper` of its studies begins; a study that the table does not name goes there."""
    studies: tuple[str, ...] = ()
    """In the order they are shown."""


# Studies of a paper stand in the order of the paper's figures and propositions.
GROUPS = (
    Group(
        name="kondo",
        short="Kondo paper",
        title="Kondo paper: Does This Gradient Spark Joy?",
        paper="Kondo paper",
        studies=("mnist-kondo", "bandit-kondo", "gambling", "reversal-kondo", "reversal-fit"),
    ),
    Group(
        name="dg",
        short="DG paper",
        title="DG paper: Delightful Policy Gradient",
        paper="DG paper",
        studies=("mnist-dg", "bandit-dg", "reversal-dg"),
    ),
    Group(
        name="distributed",
        short="Distributed paper",
        title="Distributed paper: Delightful Distributed Policy Gradient",
        paper="Distributed paper",
        studies=("contamination", "mnist-stale", "reversal-frictions", "asynchrony"),
    ),
    Group(
        name="language",
        short="Language models",
        title="Language models",
        studies=("lm-rl", "lm-gates", "lm-frictions"),
    ),
    Group(
        name="performance",
        short="Performance",
        title="Performance",
        studies=("lm-step", "measured", "frontier", "speculative", "scale"),
    ),
)
REST = Group(name="more", short="More", title="More studies", studies=("control", "demo"))
EARLIER = Group(name="earlier", short="Earlier versions", title="Earlier versions of these studies")


class Pick(NamedTuple):
    """A line of headline.csv whose number a study shows first."""

    series: str
    metric: str
    x: str = ""
    """Empty for any."""
    figure: str = ""
    """How it begins; empty for any."""

    def finds(self, line: Headline) -> bool:
        """Return whether `line` is the one meant."""
        return (
            (line.series, line.metric) == (self.series, self.metric)
            and self.x in ("", str(line.x))
            and line.figure.startswith(self.figure)
        )


_STALE = "learner error, the oldest parameters, by delay"
_LONGEST = "longest length with error below 25%, all frictions"
_CREW = "learner error, crew slow, by mean age"
_REWARD, _COMBINED = "held-out reward at temperature 1, at the end", "sorting-3-25m: combined"
_PLANE, _STEP = "seconds to 0.92, speed-up over the best dense point", "speed-up over dense, p50"
_FREE, _EXACT = "DG-K 3% free screen", "DG-K 3% exact screen"
PICKS = {
    "gambling": [
        Pick(series, "bad arms at the end, two-arms", "10")
        for series in ("PG", "DG", "DG-K price 0")
    ],
    "mnist-stale": [Pick(series, _STALE, "1000") for series in ("DG", "IS-PG", "REINFORCE")],
    "reversal-frictions": [Pick(series, _LONGEST) for series in ("DG", "PMPO", "PG")],
    "asynchrony": [Pick(series, _CREW) for series in ("DG, on Ray", "DG, replayed", "PG, on Ray")],
    "contamination": [
        Pick(f"DG eta={eta} / PG", "signal over contamination, one arm, rho=0.1")
        for eta in ("0.5", "1", "2")
    ],
    "lm-rl": [
        Pick("unbiased 10% of 2048", f"learner {_PLANE}", "sorting-3-300m"),
        Pick("unbiased 10% of 2048", f"loop {_PLANE}", "sorting-3-300m"),
        Pick("delight by GRPO", _REWARD, "sorting-3-25m"),
    ],
    "lm-frictions": [
        Pick(series, _REWARD, _COMBINED)
        for series in ("sequence ratios, cap 2", "DG, eta 1", "GRPO uncorrected")
    ],
    "lm-step": [
        Pick("free, rate 3% by sequence", _STEP, figure="qwen2-0.5b, 1024 x"),
        Pick("free, rate 3% by sequence", _STEP, figure="qwen2-1.5b"),
        Pick("exact, rate 3% by sequence", _STEP, figure="qwen2-1.5b"),
    ],
    "measured": [
        Pick(_FREE, "learner speed-up", "reversal-h50-w512-l8-b512"),
        Pick(_FREE, "learner speed-up", "mnist-w512-b10000"),
        Pick(_EXACT, "learner speed-up", "reversal-h50-w512-l8-b512"),
        Pick(_EXACT, "learner speed-up", "mnist-w512-b10000"),
        Pick(_FREE, "learner speed-up", "mnist-w100-b100"),
    ],
    "speculative": [
        Pick("8 bits", "kept agreement over training", "0.03"),
        Pick("8 bits", "test error at the end", "0.03"),
        Pick("exact", "test error at the end", "0.03"),
    ],
    "scale": [
        Pick("digits, at source", "rollouts per second", "8"),
        Pick("reversal, at source", "rollouts per second", "8"),
    ],
    "control": [
        Pick(series, "cartpole: return at the end")
        for series in ("dense", "unbiased 10%", "delight 10%")
    ],
    "demo": [
        Pick("PG", "final error", figure="digits"),
        Pick("DG-K (3%)", "final error", figure="digits"),
        Pick("DG-K (3%)", "learner speed-up", figure="digits"),
    ],
}
"""Study -> the lines that say most, where `tables.key_numbers` would choose others. A line that a
folder does not have is passed over."""


def arrange(results: Sequence[Result]) -> list[tuple[Group, list[Result]]]:
    """Return the groups that have results, in order, with their results in order.

    A result is an earlier version if a run of a later version of its study is there too. A small
    run does not make a full one an earlier version.
    """
    grouped: dict[str, list[Result]] = {}
    for result in results:
        group = EARLIER if any(_replaces(other, result) for other in results) else group_of(result)
        grouped.setdefault(group.name, []).append(result)
    return [
        (group, sorted(grouped[group.name], key=lambda result: _place(group, result)))
        for group in (*GROUPS, REST, EARLIER)
        if group.name in grouped
    ]


def group_of(result: Result) -> Group:
    """Return the group that names the study, or that of its paper, or the rest."""
    study, paper = str(result.manifest["study"]), str(result.manifest["paper"])
    named = [group for group in (*GROUPS, REST) if study in group.studies]
    of_paper = [group for group in GROUPS if group.paper and paper.startswith(group.paper)]
    return (named or of_paper or [REST])[0]


def _replaces(other: Result, result: Result) -> bool:
    same = other.manifest["study"] == result.manifest["study"]
    later = _version(other) > _version(result)
    return same and later and (result.small or not other.small)


def _version(result: Result) -> int:
    version = result.manifest["version"]
    return version if isinstance(version, int) else 0


def _place(group: Group, result: Result) -> tuple[int, str, int, str]:
    """Return what sorts the results of a group; those that it does not name stand last."""
    study = str(result.manifest["study"])
    known = [*group.studies, *(name for each in (*GROUPS, REST) for name in each.studies)]
    index = known.index(study) if study in known else len(known)
    return index, study, -_version(result), result.name
