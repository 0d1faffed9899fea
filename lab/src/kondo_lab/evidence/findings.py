"""Sentences that studies of fields share: starts, failures, learning rates at an edge."""

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from kondo_lab.evidence import failures
from kondo_lab.evidence.runs import Run
from kondo_lab.evidence.study import Analysis
from kondo_lab.training import tuning
from kondo_lab.training.arms import Arm
from kondo_lab.training.fields import Field, FieldSettings, tune_names, warm_name


def add_starts(found: Analysis, records: pd.DataFrame, settings: FieldSettings) -> None:
    """Say where supervised starts ended."""
    quality = records[records["metric"] == tuning.QUALITY]
    for field in settings.fields:
        own = quality[quality["part"] == warm_name(field)]
        if own.empty:
            continue
        enough = settings.start_reward(field)
        ends = start_rewards(own, enough).values()
        short = sum(reward < enough for reward in ends)
        missed = f"; {short} never got to {enough:g}" if short else ""
        found.findings.append(
            f"{field.name}: supervised starts of {len(ends)} seeds end at rewards of "
            f"{min(ends):.2f} to {max(ends):.2f}{missed}."
        )


def start_rewards(points: pd.DataFrame, enough: float) -> dict[int, float]:
    """Return seed -> its reward where its start ended: the first that is enough, or the last."""
    ends = {}
    for seed, own in points.sort_values("step").groupby("seed"):
        there = own[own["value"] >= enough]
        ends[int(seed)] = float((there if len(there) else own.iloc[-1:])["value"].iloc[0])
    return ends


def failure_findings(
    where: str,
    by_series: Mapping[str, Sequence[Run]],
    records: pd.DataFrame,
    arms: Sequence[Arm],
) -> list[str]:
    """Return a sentence for every kind of failure, which names all series that show it."""
    by_kind: dict[str, list[str]] = {}
    for failure in failures.found(by_series, records, arms):
        by_kind.setdefault(failure.kind, []).append(f"{failure.series} ({failure.evidence})")
    return [f"{where}: {kind}: {'; '.join(told)}." for kind, told in by_kind.items()]


def edge_findings(records: pd.DataFrame, settings: FieldSettings) -> Iterator[str]:
    """Yield, field by field, whose best learning rate is at the edge of those tried."""
    for field in settings.fields:
        if field.tuned_on:
            continue
        at_edge = edges(tuned_rewards(records, settings, field), field.learning_rates)
        if at_edge:
            yield (
                f"{field.name}: the best learning rate is at the edge of those tried for "
                f"{', '.join(at_edge)}."
            )


def tuned_rewards(
    records: pd.DataFrame, settings: FieldSettings, field: Field
) -> dict[str, dict[float, float]]:
    """Return series -> learning rate -> reward at the end of tuning."""
    own = records[records["part"].isin(tune_names(settings, field))]
    return tuning.rewards_by_rate(own) if len(own) else {}


def edges(tuned: Mapping[str, Mapping[float, float]], rates: tuple[float, ...]) -> list[str]:
    """Return whose best learning rate is the lowest or highest that was tried."""
    outer = {min(rates), max(rates)}
    return [
        series
        for series, rewards in tuned.items()
        if any(math.isclose(tuning.best_rate(rewards), rate, rel_tol=1e-5) for rate in outer)
    ]
