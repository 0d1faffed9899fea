"""Who trains with which friction, what their series and parts are called, and at which rates.

series = arm + " under " + friction        setting = learning rate
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd

from kondo_lab.studies.lm_frictions.settings import Settings, Sweep
from kondo_lab.training import tuning
from kondo_lab.training.arms import Arm
from kondo_lab.training.fields import Field, member, named_pieces, slug
from kondo_lab.training.member import Frictions, Member
from kondo_lab.training.part import Context

UNDER = " under "
DECAYED = " with decay"
"""Ending of a series' name whose learning rate falls to 0."""
Rates = Callable[[Arm], float]


def with_friction(own: Member, cell: Frictions) -> Member:
    """Return a member that trains with a friction."""
    return dataclasses.replace(own, series=f"{own.series}{UNDER}{cell.name}", frictions=cell)


def split(series: str) -> tuple[str, str]:
    """Return the names of arm and friction.

    Example:
        >>> from kondo_lab.studies.lm_frictions.assignments import split
        >>> split("DG, eta 1 under refresh 64")
        ('DG, eta 1', 'refresh 64')
    """
    arm, _, cell = series.partition(UNDER)
    return arm, cell


def tune_members(settings: Settings) -> list[Member]:
    """Return every arm at every learning rate, with every friction that tunes."""
    return [
        with_friction(member(each, rate, seed), cell)
        for cell in settings.tuned_under
        for each in settings.of(settings.main)
        for rate in settings.main.learning_rates
        for seed in settings.tune_seeds(settings.main)
    ]


def tune_names(settings: Settings) -> list[str]:
    """Return the names of the parts that tune."""
    return list(named_pieces("tune", settings, settings.main, tune_members(settings)))


def further_name(settings: Settings) -> str:
    """Return the name of the part that tries learning rates beyond the edge, and a decay."""
    return slug("further", settings.main.name)


def beyond_members(settings: Settings, means: Mapping[str, Mapping[float, float]]) -> list[Member]:
    """Return arms whose best rate is the lowest or highest, at rates beyond it.

    Args:
        settings: of the study.
        means: arm -> learning rate -> mean reward of tuning.
    """
    found = []
    for each in settings.of(settings.main):
        for rate in rates_beyond(means.get(each.name, {}), settings.beyond):
            for cell in settings.tuned_under:
                for seed in settings.tune_seeds(settings.main):
                    found.append(with_friction(member(each, rate, seed), cell))
    return found


def rates_beyond(rewards: Mapping[float, float], count: int) -> list[float]:
    """Return rates beyond the best, in steps of half a decade; none if it is not at the edge.

    Example:
        >>> from kondo_lab.studies.lm_frictions.assignments import rates_beyond
        >>> [f"{rate:.1g}" for rate in rates_beyond({1e-6: 0.5, 3e-6: 0.4}, 2)]
        ['3e-07', '1e-07']
        >>> rates_beyond({1e-6: 0.3, 3e-6: 0.4, 1e-5: 0.2}, 2)
        []
    """
    if len(rewards) < 2:
        return []
    best = tuning.best_rate(rewards)
    if best not in (min(rewards), max(rewards)):
        return []
    sign = -0.5 if best == min(rewards) else 0.5
    return [float(f"{best * 10 ** (sign * place):.0e}") for place in range(1, count + 1)]


def decay_members(settings: Settings, rates: Rates) -> list[Member]:
    """Return arms whose learning rate falls linearly to 0, from multiples of their best."""
    field = settings.main
    return [
        dataclasses.replace(
            with_friction(member(each, float(f"{rates(each) * factor:.2g}"), seed), cell),
            series=f"{each.name}{DECAYED}{UNDER}{cell.name}",
            decay_steps=field.tune_steps,
        )
        for cell in settings.tuned_under
        for each in settings.of(field)
        if each.name in settings.decayed
        for factor in settings.decay_factors
        for seed in settings.tune_seeds(field)
    ]


def members(
    settings: Settings, sweep: Sweep, seed: int, rates: Rates = lambda _: math.nan
) -> list[Member]:
    """Return the members of one seed of a sweep at their learning rates."""
    return [
        with_friction(member(each, rates(each), seed), cell)
        for cell in sweep.cells
        for each in settings.under(sweep, cell)
    ]


def names(settings: Settings, field: Field) -> list[str]:
    """Return the names of all parts that train what is reported of a field."""
    return [
        name
        for sweep in settings.sweeps_in(field)
        for seed in sweep.seeds
        for name, *_ in pieces(settings, sweep, seed)
    ]


def tuned_rewards(records: pd.DataFrame) -> dict[str, dict[str, dict[float, float]]]:
    """Return arm -> friction -> learning rate -> reward at the end, of tuning parts."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for series, rewards in tuning.rewards_by_rate(records).items():
        arm, cell = split(series)
        found.setdefault(arm, {})[cell] = rewards
    return found


def mean_rewards(records: pd.DataFrame) -> dict[str, dict[float, float]]:
    """Return arm -> learning rate -> mean reward over the frictions that tune."""
    tuned = tuned_rewards(records).items()
    return {arm: mean_by_rate(by_cell) for arm, by_cell in tuned}


def mean_by_rate(by_cell: Mapping[str, Mapping[float, float]]) -> dict[float, float]:
    """Return learning rate -> mean reward over the frictions that have it."""
    several: Sequence[Mapping[float, float]] = list(by_cell.values())
    common = set.intersection(*(set(rewards) for rewards in several))
    return {
        rate: sum(rewards[rate] for rewards in several) / len(several) for rate in sorted(common)
    }


def chosen_rates(records: pd.DataFrame) -> dict[str, float]:
    """Return arm -> its learning rate: that of the highest mean reward over frictions."""
    means = mean_rewards(records).items()
    return {name: tuning.best_rate(rewards) for name, rewards in means}


def tuned_means(settings: Settings, context: Context) -> dict[str, dict[float, float]]:
    """Return `mean_rewards` of the finished tuning parts of the same run."""
    return mean_rewards(context.finished(tune_names(settings)))


def rates_in(settings: Settings, context: Context) -> Rates:
    """Return who has which learning rate, as finished tuning parts of the same run say."""
    means = tuned_means(settings, context)
    return lambda arm: tuning.best_rate(means[arm.name])


def pieces(
    settings: Settings, sweep: Sweep, seed: int
) -> Iterator[tuple[str, slice, list[Member]]]:
    """Yield, part by part, its name, its place among a seed's members, and them."""
    everyone = members(settings, sweep, seed)
    lagging = any(cell.delay for cell in sweep.cells)
    most = settings.lag_rows if lagging else settings.most_rows
    limited = dataclasses.replace(settings, most_rows=most)
    kind = f"{sweep.kind} {seed}"
    for name, piece in named_pieces(kind, limited, sweep.field, everyone).items():
        yield name, piece, everyone[piece]
