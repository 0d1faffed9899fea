"""Who trains where, with which seeds, and what the parts are called."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from kondo_lab.studies.lm_rl import tuning
from kondo_lab.studies.lm_rl.settings import Field, Plane, Point, Role, Settings, Training
from kondo_lab.training.alone import Path
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member
from kondo_lab.training.step_seconds import PLAIN


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


def wall_name(field: Field, arm: Arm, path: str, seed: int) -> str:
    """Return the name of the part that trains one arm by the clock."""
    return slug("wall", field.name, titled(arm, path), seed)


def titled(arm: Arm, path: str) -> str:
    """Return the arm's name as a series, by its path through the product or without it."""
    return arm.name if path == "product" else arm.name + PLAIN


def member(arm: Arm, learning_rate: float, seed: int) -> Member:
    """Return a run of an arm. Setting: the learning rate."""
    return Member(
        series=arm.name,
        seed=seed,
        learning_rate=learning_rate,
        arm=arm,
        setting=learning_rate,
    )


def tune_members(settings: Training, field: Field) -> list[Member]:
    """Return every arm that is tuned at every learning rate."""
    given = settings.given_rates(field)
    tuned = [
        each
        for each in settings.of(field)
        if tuning.tuned_name(each) == each.name and each.name not in given
    ]
    return _at_rates(tuned, field.learning_rates, settings.tune_seeds(field))


def grid_members(
    settings: Settings,
    field: Field,
    seeds: Iterable[int],
    rates: Callable[[Arm], float] = lambda _: math.nan,
) -> list[Member]:
    """Return every arm at its learning rate with those of the seeds that it has."""
    return [
        member(each, rates(each), seed)
        for seed in seeds
        for each in settings.of(field)
        if seed in settings.seeds(field, each)
    ]


def _at_rates(arms: Iterable[Arm], rates: Iterable[float], seeds: Iterable[int]) -> list[Member]:
    return [member(each, rate, seed) for each in arms for rate in rates for seed in seeds]


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
    """Return the names of the parts that tune a field's arms."""
    field = settings.field(field.tuned_on) if field.tuned_on else field
    return list(named_pieces("tune", settings, field, tune_members(settings, field)))


def grid_pieces(settings: Settings, field: Field, seeds: range) -> dict[str, slice]:
    """Return part -> its members, of some reported seeds of a population."""
    kind = f"grid {seeds.start}-{seeds.stop - 1}"
    return named_pieces(kind, settings, field, grid_members(settings, field, seeds))


def seed_blocks(settings: Settings, field: Field) -> list[range]:
    """Return a field's reported seeds, in blocks that are run one after the other."""
    first = min(settings.first_seeds, field.num_seeds)
    blocks = [range(first), range(first, field.num_seeds)]
    return [block for block in blocks if len(block)]


def grid_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of the parts that train what is reported of a population."""
    blocks = seed_blocks(settings, field)
    return [name for block in blocks for name in grid_pieces(settings, field, block)]


def point_name(plane: Plane, point: Point) -> str:
    """Return the name of the part that tries a point's learning rates by the clock."""
    return slug("plane", plane.name, point.name)


def best_name(plane: Plane, role: Role) -> str:
    """Return the name of the part that runs a role's best point with all seeds."""
    return slug("best", plane.name, role)


def rival_name(plane: Plane, point: Point) -> str:
    """Return the name of the part that runs a rival with all seeds."""
    return slug("rival", plane.name, point.name)


def roles(plane: Plane) -> list[Role]:
    """Return the roles that points of a plane are candidates for, each once."""
    return list(dict.fromkeys(point.role for point in plane.points))


def wall_runs(
    settings: Training, field: Field, seeds: Iterable[int]
) -> dict[str, tuple[Arm, Path, int]]:
    """Return part -> arm, path and seed that are run by the clock in a field.

    Dense arms are also run without kondo.
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


def evenly(num_steps: int, points: int) -> list[int]:
    """Return step 0, and about `points` steps evenly spaced to the last.

    Example:
        >>> from kondo_lab.studies.lm_rl.assignments import evenly
        >>> evenly(10, 3)
        [0, 3, 7, 10]
    """
    return sorted({0, *(round(num_steps * point / points) for point in range(1, points + 1))})
