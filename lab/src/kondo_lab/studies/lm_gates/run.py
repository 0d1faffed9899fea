"""Parts: starts, learning rates where none are known, then runs by the clock, seed after seed.

    wall    one arm of one seed, by the clock

A run that is cut short has all arms of its first seeds.
"""

import dataclasses
from collections.abc import Iterable

from kondo_lab.studies.lm_gates.settings import Settings
from kondo_lab.training import expected_seconds
from kondo_lab.training.alone import PLAIN, Path
from kondo_lab.training.arms import Arm
from kondo_lab.training.field_parts import (
    Place,
    lean,
    make_learner,
    make_part,
    rates_in,
    trials,
    warm_part,
)
from kondo_lab.training.fields import Field, evenly, member, slug, tune_members
from kondo_lab.training.part import Part
from kondo_lab.training.record import Run
from kondo_lab.training.run import train


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    found: list[Part] = []
    for field in settings.walls:
        found.append(warm_part(settings, field))
        members = tune_members(settings, field)
        found += trials("tune", settings, field, members, field.tune_steps)
    most = max(max(field.num_seeds, field.other_seeds) for field in settings.walls)
    for seed in range(most):
        for field in settings.walls:
            for name, inputs in wall_runs(settings, field, [seed]).items():
                work = expected_seconds.loops(field, [inputs[0]], field.num_steps)
                found.append(make_part(name, settings, field, work, _wall, *inputs))
    return found


def wall_runs(
    settings: Settings, field: Field, seeds: Iterable[int]
) -> dict[str, tuple[Arm, Path, int]]:
    """Return part -> arm, path and seed that are run by the clock in a field."""
    return {
        slug("wall", field.name, titled(each, path), seed): (each, path, seed)
        for seed in seeds
        for each in settings.clocked(field)
        if seed in settings.seeds(field, each)
        for path in (field.dense_paths if each.gate is None else ("product",))
    }


def wall_names(settings: Settings, field: Field) -> list[str]:
    """Return the names of all parts by the clock of a field."""
    return list(wall_runs(settings, field, range(field.num_seeds)))


def titled(arm: Arm, path: str) -> str:
    """Return the arm's name as a series, by its path through the product or without it."""
    return arm.name if path == "product" else arm.name + PLAIN


def _wall(place: Place, arm: Arm, path: Path, seed: int) -> list[Run]:
    """Train one arm by the clock. Setting: the learning rate."""
    settings, field, part, context = place
    own = member(arm, rates_in(settings, field, context)(arm), seed)
    own = dataclasses.replace(own, series=titled(arm, path))
    steps = evenly(field.num_steps, settings.wall_evaluations)
    learner = make_learner(place, own, path=path)
    return lean(
        train(
            learner,
            context,
            part=part,
            num_steps=field.num_steps,
            log_steps=(),
            evaluate_steps=steps,
        )
    )
