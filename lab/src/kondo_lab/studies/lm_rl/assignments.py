"""Who trains where, with which seeds, and what the parts are called."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from kondo.core.gates import Gate
from kondo_lab.language import loop
from kondo_lab.language.contenders import Contender
from kondo_lab.language.population import Member
from kondo_lab.studies.lm_rl import tuning
from kondo_lab.studies.lm_rl.settings import Field, Settings

PLAIN = "plain"
"""Behind a dense contender's name: the same update as somebody without a gate would write it."""


def slug(name: str) -> str:
    """Return a contender's name as parts have it.

    Example:
        >>> from kondo_lab.studies.lm_rl.assignments import slug
        >>> slug("DG-K exact 3%")
        'dg-k-exact-3'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def warm_name(field: Field) -> str:
    """Return the name of the part that makes a field's starts."""
    return f"warm-{field.name}"


def seconds_name(field: Field) -> str:
    """Return the name of the part that times steps in a field."""
    return f"seconds-{field.name}"


def wall_name(field: Field, contender: Contender, path: str, seed: int) -> str:
    """Return the name of the part that trains one contender by the clock."""
    return f"wall-{field.name}-{slug(titled(contender, path).name)}-{seed}"


def more_name(field: Field, contender: Contender, seed: int) -> str:
    """Return the name of the part whose saved time buys rollouts."""
    return f"more-{field.name}-{slug(contender.name)}-{seed}"


def titled(contender: Contender, path: str) -> Contender:
    """Return the contender named after its path through the product, or without it."""
    if path == "product":
        return contender
    return dataclasses.replace(contender, name=f"{contender.name} {PLAIN}")


def tune_members(settings: Settings, field: Field) -> list[Member]:
    """Return every contender that is tuned at every learning rate. Setting: the rate."""
    return [
        Member(series=each.name, seed=seed, learning_rate=rate, contender=each, setting=rate)
        for each in settings.of(field)
        if tuning.tuned_name(each) == each.name
        for rate in field.learning_rates
        for seed in settings.tune_seeds(field)
    ]


def grid_members(
    settings: Settings, field: Field, rates: Callable[[Contender], float]
) -> list[Member]:
    """Return every contender at its learning rate with its reported seeds. Setting: the rate."""
    return [
        Member(
            series=each.name,
            seed=seed,
            learning_rate=rates(each),
            contender=each,
            setting=rates(each),
        )
        for each in settings.of(field)
        for seed in settings.seeds(field, each)
    ]


def unrated(settings: Settings, field: Field) -> list[Member]:
    """Return the grid's members before their learning rates are known: for counting."""
    return grid_members(settings, field, lambda contender: math.nan)


def denominator_members(settings: Settings) -> list[Member]:
    """Return DG-K at every rate, learning rate and denominator. Setting: the learning rate."""
    return [
        Member(series=each.name, seed=seed, learning_rate=rate, contender=each, setting=rate)
        for each in denominators(settings)
        for rate in settings.denominator_learning_rates
        for seed in range(settings.denominator_seeds)
    ]


def denominators(settings: Settings) -> list[Contender]:
    """Return DG-K at every rate, divided by all tokens or by the kept ones."""
    return [
        Contender(
            name=f"DG-K {100 * rate:g}%, {kind} denominator",
            gate=Gate(rate=rate),
            denominator=kind,
        )
        for rate in settings.denominator_rates
        for kind in ("full", "kept")
    ]


def named_pieces(
    kind: str, settings: Settings, field: Field, members: Sequence[Member]
) -> dict[str, slice]:
    """Return part -> its members: no more than fit one population."""
    most = max(1, settings.most_rows // max(field.num_rows, settings.num_held_out))
    return {
        f"{kind}-{field.name}-{number + 1}": slice(first, first + most)
        for number, first in enumerate(range(0, len(members), most))
    }


def tune_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of the parts that tune a field's contenders."""
    field = settings.field(field.tuned_on) if field.tuned_on else field
    return list(named_pieces("tune", settings, field, tune_members(settings, field)))


def grid_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of the parts that train a field's population."""
    return list(named_pieces("grid", settings, field, unrated(settings, field)))


def denominator_names(settings: Settings) -> list[str]:
    """Return the names of the parts of the question after the denominator."""
    members = denominator_members(settings)
    return list(named_pieces("denominator", settings, settings.main, members))


def wall_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of all parts by the clock of a field."""
    return [
        wall_name(field, each, path, seed)
        for seed in range(field.num_seeds)
        for each in settings.clocked(field)
        for path in paths(field, each)
    ]


def more_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of the parts of a field whose saved time buys rollouts."""
    return [
        more_name(field, each, seed)
        for seed in range(settings.more_seeds)
        for each in with_more(settings, field)
    ]


def paths(field: Field, contender: Contender) -> tuple[loop.Path, ...]:
    """Return the ways a contender is trained by the clock: the dense ones also without the gate."""
    return field.dense_paths if contender.gate is None else ("product",)


def timed(settings: Settings, field: Field) -> list[Contender]:
    """Return whose steps are timed: everyone's in the first fields, in the others headliners'."""
    first = (settings.grids[0], settings.walls[0])
    return settings.everyone() if field in first else settings.present(field)


def evenly(num_steps: int, points: int) -> list[int]:
    """Return step 0, and about `points` steps evenly spaced to the last.

    Example:
        >>> from kondo_lab.studies.lm_rl.assignments import evenly
        >>> evenly(10, 3)
        [0, 3, 7, 10]
    """
    return sorted({0, *(round(num_steps * point / points) for point in range(1, points + 1))})


def with_more(settings: Settings, field: Field) -> list[Contender]:
    """Return whose saved time buys rollouts: DG-K's and PODS's, at the highest rate clocked."""
    return [
        each
        for each in settings.clocked(field)
        if each.rate == max(field.clocked_rates) and (each.kind == "variance" or each.by_delight)
    ]
