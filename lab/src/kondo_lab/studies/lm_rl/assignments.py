"""Who trains where, with which seeds, and what the parts are called."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from kondo.core.gates import Gate
from kondo_lab.language.contenders import Contender, percent
from kondo_lab.language.loop import Path
from kondo_lab.language.population import Member
from kondo_lab.language.step_seconds import PLAIN
from kondo_lab.studies.lm_rl import tuning
from kondo_lab.studies.lm_rl.settings import Field, Settings, Training


def slug(*words: object) -> str:
    """Return words as names of parts and figures have them.

    Example:
        >>> from kondo_lab.studies.lm_rl.assignments import slug
        >>> slug("wall", "sorting-3-25m", "DG-K exact 3%", 0)
        'wall-sorting-3-25m-dg-k-exact-3-0'
    """
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


def warm_name(field: Field) -> str:
    """Return the name of the part that makes a field's starts."""
    return slug("warm", field.name)


def seconds_name(field: Field) -> str:
    """Return the name of the part that times steps in a field."""
    return slug("seconds", field.name)


def wall_name(field: Field, contender: Contender, path: str, seed: int) -> str:
    """Return the name of the part that trains one contender by the clock."""
    return slug("wall", field.name, titled(contender, path), seed)


def titled(contender: Contender, path: str) -> str:
    """Return the contender's name as a series, by its path through the product or without it."""
    return contender.name if path == "product" else contender.name + PLAIN


def member(contender: Contender, learning_rate: float, seed: int) -> Member:
    """Return a run of a contender. Setting: the learning rate."""
    return Member(
        series=contender.name,
        seed=seed,
        learning_rate=learning_rate,
        contender=contender,
        setting=learning_rate,
    )


def tune_members(settings: Training, field: Field) -> list[Member]:
    """Return every contender that is tuned at every learning rate."""
    given = settings.given_rates(field)
    tuned = [
        each
        for each in settings.of(field)
        if tuning.tuned_name(each) == each.name and each.name not in given
    ]
    return _at_rates(tuned, field.learning_rates, settings.tune_seeds(field))


def grid_members(
    settings: Settings, field: Field, rates: Callable[[Contender], float] = lambda _: math.nan
) -> list[Member]:
    """Return every contender at its learning rate with its reported seeds."""
    return [
        member(each, rates(each), seed)
        for each in settings.of(field)
        for seed in settings.seeds(field, each)
    ]


def denominator_members(settings: Settings) -> list[Member]:
    """Return DG-K at every rate, learning rate and denominator."""
    seeds = range(settings.denominator_seeds)
    return _at_rates(denominators(settings), settings.denominator_learning_rates, seeds)


def _at_rates(
    contenders: Iterable[Contender], rates: Iterable[float], seeds: Iterable[int]
) -> list[Member]:
    return [member(each, rate, seed) for each in contenders for rate in rates for seed in seeds]


def denominators(settings: Settings) -> list[Contender]:
    """Return DG-K at every rate, divided by all tokens or by the kept ones."""
    return [
        Contender(
            name=f"DG-K {percent(rate)}, {kind} denominator",
            gate=Gate(rate=rate),
            denominator=kind,
        )
        for rate in settings.denominator_rates
        for kind in ("full", "kept")
    ]


def named_pieces(
    kind: str, settings: Training, field: Field, members: Sequence[Member]
) -> dict[str, slice]:
    """Return part -> its members: no more than fit one population."""
    most = max(1, settings.most_rows // max(field.num_rows, settings.num_held_out))
    return {
        slug(kind, field.name, number + 1): slice(first, first + most)
        for number, first in enumerate(range(0, len(members), most))
    }


def tune_names(settings: Training, field: Field) -> list[str]:
    """Return the names of the parts that tune a field's contenders."""
    field = settings.field(field.tuned_on) if field.tuned_on else field
    return list(named_pieces("tune", settings, field, tune_members(settings, field)))


def grid_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of the parts that train a field's population."""
    return list(named_pieces("grid", settings, field, grid_members(settings, field)))


def denominator_names(settings: Settings) -> list[str]:
    """Return the names of the parts of the question after the denominator."""
    members = denominator_members(settings)
    return list(named_pieces("denominator", settings, settings.main, members))


def wall_runs(
    settings: Training, field: Field, seeds: Iterable[int]
) -> dict[str, tuple[Contender, Path, int]]:
    """Return part -> contender, path and seed that are run by the clock in a field.

    Dense contenders are also run without kondo.
    """
    return {
        wall_name(field, each, path, seed): (each, path, seed)
        for seed in seeds
        for each in settings.clocked(field)
        if seed in settings.seeds(field, each)
        for path in (field.dense_paths if each.gate is None else ("product",))
    }


def wall_names(settings: Training, field: Field) -> list[str]:
    """Return the names of all parts by the clock of a field."""
    return list(wall_runs(settings, field, range(field.num_seeds)))


def more_runs(settings: Settings, field: Field) -> dict[str, tuple[Contender, int]]:
    """Return part -> contender and seed whose saved time buys rollouts.

    They are DG-K and PODS, at the highest rate that is clocked.
    """
    return {
        slug("more", field.name, each.name, seed): (each, seed)
        for seed in range(settings.more_seeds)
        for each in settings.clocked(field)
        if each.rate == max(field.clocked_rates) and (each.kind == "variance" or each.by_delight)
    }


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
