"""What a study is: a claim, parts that produce records, and an analysis that reads them.

    parts (run one by one, saved, resumed) -> records -> analysis -> claims, headline, figures

`kondo_lab.training.part` says what parts and records are.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from kondo_lab.evidence.agreement import Against, Rule, judge, judge_order
from kondo_lab.evidence.agreement import Estimate as Estimate
from kondo_lab.evidence.agreement import Verdict as Verdict
from kondo_lab.training.part import Part

if TYPE_CHECKING:
    import pandas
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")
Size = Literal["small", "full"]
"""`full` is the paper's; `small` shows in under two minutes on two cores that all of it works."""


def sized(size: Size, full: SettingsT, small: SettingsT, **seeds: int | None) -> SettingsT:
    """Return the settings of a size; `seeds` (field -> number) replaces what is not None."""
    chosen = full if size == "full" else small
    given = {name: number for name, number in seeds.items() if number is not None}
    return dataclasses.replace(chosen, **given)


class Headline(NamedTuple):
    """One line of headline.csv: an expected number beside ours."""

    figure: str
    """As the paper counts, e.g. "Kondo Fig 1"; "beyond the paper" where it has none."""
    series: str
    metric: str
    x: float | str
    """Where on the figure's axis; "" if nowhere."""
    expected: float | None
    ours: float
    se: float | None
    """Standard error over seeds; None where there is none."""
    seeds: int
    against: Against
    """Whose number `expected` is."""
    verdict: Verdict


def headline(
    figure: str,
    series: str,
    metric: str,
    x: float | str,
    ours: Estimate | float,
    *,
    expected: float | None = None,
    against: Against = "paper",
    rule: Rule = "equals",
) -> Headline:
    """Return a line with its verdict, by the rules of `agreement`.

    Args:
        expected: what ours should be; None where nobody says.
        against: whose number that is.
        rule: how it should be.

    Example:
        >>> from kondo_lab.evidence.study import headline
        >>> headline("Kondo Fig 1", "DG", "online error", 1e6, 0.0171, expected=0.0163).verdict
        'matches'
    """
    found = ours if isinstance(ours, Estimate) else Estimate(ours)
    se = None if math.isnan(found.se) else found.se
    verdict: Verdict = "" if expected is None else judge(found, expected, against, rule)
    source: Against = "" if expected is None else against
    at = (figure, series, metric, x)
    return Headline(*at, expected, found.mean, se, found.seeds, source, verdict)


def ordering(
    figure: str,
    metric: str,
    x: float | str,
    *,
    order: Sequence[str],
    ours: Mapping[str, Estimate] | Mapping[str, float],
    against: Against = "paper",
) -> Headline:
    """Return a line that says whether `ours` rises in an expected order of series, lowest first.

    The share of pairs in that order stands where a number does: 1 is the same order. The verdict
    is that of `agreement.judge_order`.
    """
    found = {n: v if isinstance(v, Estimate) else Estimate(v) for n, v in ours.items()}
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    same = sum(found[a].mean <= found[b].mean for a, b in pairs) / len(pairs)
    name, what = " < ".join(order), f"order of {metric}"
    seeds = min(found[series].seeds for series in order)
    verdict = judge_order(order, found)
    return Headline(figure, name, what, x, 1.0, same, None, seeds, against, verdict)


ClaimVerdict = Literal["met", "missed", "open"]


class Claim(NamedTuple):
    """One line of claims.csv: a statement that a study tests, and what came of it."""

    statement: str
    verdict: ClaimVerdict
    """By a rule of `claims`, never by hand."""
    measured: str
    """The numbers behind the verdict."""


class FrontierPoint(NamedTuple):
    """What a series pays to reach a quality; from it a cost ratio tells which one wins."""

    task: str
    series: str
    rate: float
    """Share of samples kept; NaN where it is not fixed. Dense series have rate 1."""
    target: str
    """The quality, e.g. "5% test error"."""
    forward: float
    """Samples seen until then, mean over seeds that reached it."""
    backward: float
    """Backward passes paid until then."""
    reached: int
    """Seeds that reached the target."""
    seeds: int
    final_error: float
    """At the end of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is read out of the records."""

    headline: list[Headline] = dataclasses.field(default_factory=list)
    figures: "dict[str, Figure]" = dataclasses.field(default_factory=dict)
    """File name without suffix -> figure."""
    captions: dict[str, str] = dataclasses.field(default_factory=dict)
    """File name without suffix -> what the figure shows, with measured numbers. A figure without
    one gets a caption from the headline or the findings."""
    findings: list[str] = dataclasses.field(default_factory=list)
    """Sentences with measured numbers in them, for the terminal, the report and the docs."""
    frontier: list[FrontierPoint] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        unknown = sorted(self.captions.keys() - self.figures.keys())
        if unknown:
            raise ValueError(
                f"captions must be of figures, got {', '.join(unknown)}; the figures are "
                f"{', '.join(self.figures) or '(none)'}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A claim and how it is tested."""

    name: str
    """As typed after `kondo run`."""
    title: str
    paper: str
    """Which figures or propositions of which paper; "beyond the papers" where none."""
    claim: str
    """What should come out, in one or two sentences."""
    differences: tuple[str, ...]
    """Where we do otherwise than the paper, or had to guess."""
    version: int
    """Rises when results can move; results/<name>-v<version>."""
    settings: Callable[[Size, int | None], Any]
    """(size, number of seeds or None for the default) -> a frozen dataclass of plain values, all
    that can change the results: goes into the manifest, and a run resumes only if it is equal."""
    parts: Callable[[Any], list[Part]]
    """settings -> parts."""
    analyse: "Callable[[pandas.DataFrame, Any], Analysis]"
    """(the runs, as `records.table` makes a table of them; settings) -> analysis. Some parts may be
    missing when a run was stopped early: skip what they feed."""
    cpu_only: bool = False
    """Whether it trains on the CPU wherever it runs."""
