"""Who trains with which friction, what their series and parts are called, and at which rates.

series = contender + " under " + friction        setting = learning rate
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import pandas as pd

from kondo_lab.language.contenders import Contender
from kondo_lab.language.frictions import Friction
from kondo_lab.language.population import Member
from kondo_lab.part import Context
from kondo_lab.studies.lm_frictions.settings import FrictionField, Settings
from kondo_lab.studies.lm_rl import tuning
from kondo_lab.studies.lm_rl.assignments import member, named_pieces

UNDER = " under "
Kind = Literal["first", "later", "lags"]


class Batch(NamedTuple):
    """Members of one seed of a field, trained together in as many parts as they need."""

    kind: Kind
    """The beginning of the parts' names."""
    cells: tuple[Friction, ...]
    seed: int


def with_friction(own: Member, cell: Friction) -> Member:
    """Return a member that trains with a friction."""
    return dataclasses.replace(own, series=f"{own.series}{UNDER}{cell.name}", friction=cell)


def split(series: str) -> tuple[str, str]:
    """Return the names of contender and friction.

    Example:
        >>> from kondo_lab.studies.lm_frictions.assignments import split
        >>> split("DG, eta 1 under refresh 64")
        ('DG, eta 1', 'refresh 64')
    """
    contender, _, cell = series.partition(UNDER)
    return contender, cell


def tune_members(settings: Settings) -> list[Member]:
    """Return every contender at every learning rate, with every friction that tunes."""
    field = settings.main
    return [
        with_friction(member(each, rate, seed), cell)
        for cell in settings.tuned_under
        for each in settings.of(field)
        for rate in field.learning_rates
        for seed in settings.tune_seeds(field)
    ]


def tune_names(settings: Settings) -> list[str]:
    """Return the names of the parts that tune."""
    return list(named_pieces("tune", settings, settings.main, tune_members(settings)))


def members(
    settings: Settings,
    field: FrictionField,
    batch: Batch,
    rates: Callable[[Contender], float] = lambda _: math.nan,
) -> list[Member]:
    """Return the members of a batch at their learning rates."""
    return [
        with_friction(member(each, rates(each), batch.seed), cell)
        for cell in batch.cells
        for each in settings.under(field, cell)
    ]


def batches(field: FrictionField, kind: Kind, seeds: Iterable[int]) -> list[Batch]:
    """Return the batches of one kind of frictions, of those seeds that there are."""
    cells: tuple[Friction, ...] = getattr(field, kind)
    there = set(range(field.num_seeds)) if cells else set()
    return [Batch(kind, cells, seed) for seed in seeds if seed in there]


def names(settings: Settings, field: FrictionField) -> list[str]:
    """Return the names of all parts that train what is reported of a field."""
    return [
        name
        for kind in get_args(Kind)
        for batch in batches(field, kind, range(field.num_seeds))
        for name, *_ in pieces(settings, field, batch)
    ]


def tuned_rewards(records: pd.DataFrame) -> dict[str, dict[str, dict[float, float]]]:
    """Return contender -> friction -> learning rate -> reward at the end, of tuning parts."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for series, rewards in tuning.rewards_by_rate(records).items():
        contender, cell = split(series)
        found.setdefault(contender, {})[cell] = rewards
    return found


def mean_by_rate(by_cell: Mapping[str, Mapping[float, float]]) -> dict[float, float]:
    """Return learning rate -> mean reward over the frictions that have it."""
    several: Sequence[Mapping[float, float]] = list(by_cell.values())
    common = set.intersection(*(set(rewards) for rewards in several))
    return {
        rate: sum(rewards[rate] for rewards in several) / len(several) for rate in sorted(common)
    }


def chosen_rates(records: pd.DataFrame) -> dict[str, float]:
    """Return contender -> its learning rate: that of the highest mean reward over frictions."""
    tuned = tuned_rewards(records).items()
    return {name: tuning.best_rate(mean_by_rate(by_cell)) for name, by_cell in tuned}


def rates_in(settings: Settings, context: Context) -> Callable[[Contender], float]:
    """Return who has which learning rate, as finished tuning parts of the same run say."""
    known = chosen_rates(tuning.finished(context, tune_names(settings)))
    return lambda contender: known[contender.name]


def pieces(
    settings: Settings, field: FrictionField, batch: Batch
) -> Iterator[tuple[str, slice, list[Member]]]:
    """Yield, part by part, its name, its place among the batch's members, and them."""
    everyone = members(settings, field, batch)
    most = settings.lag_rows if batch.kind == "lags" else settings.most_rows
    limited = dataclasses.replace(settings, most_rows=most)
    kind = f"{batch.kind} {batch.seed}"
    for name, piece in named_pieces(kind, limited, field, everyone).items():
        yield name, piece, everyone[piece]
