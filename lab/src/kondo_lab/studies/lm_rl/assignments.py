"""Who trains where, with which seeds, and what the parts are called."""

import math
from collections.abc import Callable, Iterable

from kondo_lab.studies.lm_rl.settings import Plane, Point, Role, Settings
from kondo_lab.training.arms import Arm
from kondo_lab.training.fields import Field, member, named_pieces, slug
from kondo_lab.training.member import Member


def seconds_name(field: Field) -> str:
    """Return the name of the part that times steps in a field."""
    return slug("seconds", field.name)


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
