"""What a study is: a claim, parts that produce records, and an analysis that reads them.

    parts (run one by one, saved, resumed) -> records -> analysis -> headline, curves, figures

`kondo_lab.part` says what parts and records are.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from kondo_lab.part import Part

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


Verdict = Literal["matches", "differs", ""]


class Headline(NamedTuple):
    """One line of headline.csv: a number of the paper beside ours."""

    figure: str
    """As the paper counts, e.g. "Kondo Fig 1"; "beyond the paper" where it has none."""
    series: str
    metric: str
    x: float | str
    """Where on the figure's axis; "" if nowhere."""
    paper: float | None
    ours: float
    se: float | None
    """Standard error over seeds; None where there is none."""
    seeds: int
    verdict: Verdict


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    se: float = math.nan
    """Standard error; NaN where there is none, as for a single seed."""
    seeds: int = 1


def headline(
    figure: str,
    series: str,
    metric: str,
    x: float | str,
    ours: Estimate | float,
    *,
    paper: float | None = None,
) -> Headline:
    """Return a line with its verdict: within 20% of the paper's number, or 2 standard errors.

    Example:
        >>> from kondo_lab.studies.study import headline
        >>> headline("Kondo Fig 1", "DG", "online error", 1e6, 0.0171, paper=0.0163).verdict
        'matches'
    """
    found = ours if isinstance(ours, Estimate) else Estimate(ours)
    se = None if math.isnan(found.se) else found.se
    verdict: Verdict = ""
    if paper is not None:
        distance = abs(found.mean - paper)
        close = distance <= 0.2 * abs(paper) or (se is not None and distance <= 2 * se)
        verdict = "matches" if close else "differs"
    return Headline(figure, series, metric, x, paper, found.mean, se, found.seeds, verdict)


def ordering(
    figure: str,
    metric: str,
    x: float | str,
    *,
    paper: Sequence[str],
    ours: Mapping[str, Estimate] | Mapping[str, float],
) -> Headline:
    """Return a line that says whether `ours` rises in the order of the paper's series, best first.

    The share of pairs in the paper's order stands where a number does: 1 is the same order.
    """
    means = {n: v.mean if isinstance(v, Estimate) else v for n, v in ours.items()}
    pairs = [(a, b) for i, a in enumerate(paper) for b in paper[i + 1 :]]
    same = sum(means[a] <= means[b] for a, b in pairs) / len(pairs)
    verdict: Verdict = "matches" if same == 1.0 else "differs"
    name = " < ".join(paper)
    return Headline(figure, name, f"order of {metric}", x, 1.0, same, None, 1, verdict)


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
    findings: list[str] = dataclasses.field(default_factory=list)
    """Sentences with measured numbers in them, for the terminal, the report and the docs."""
    frontier: list[FrontierPoint] = dataclasses.field(default_factory=list)


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
    """(records, one column per field of Record; settings) -> analysis. Some parts may be missing
    when a run was stopped early: skip what they feed."""
    cpu_only: bool = False
    """Whether it trains on the CPU wherever it runs."""
