"""Parts, the most valuable first.

warm, tune    see `field_parts`
grid          selections and losses at their tuned rates, many members in one program
plane         one point of a plane, its learning rates on the tuning seed, by the clock
best          the best point of a role, with all seeds, by the clock
rival         a point that the tuning seed did not choose, with all seeds, by the clock
seconds       stages of a step of the largest model
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

from kondo import UnbiasedGate
from kondo_lab.studies.lm_rl import assignments, plane, step_seconds
from kondo_lab.studies.lm_rl.settings import Plane, Point, Role, Settings
from kondo_lab.training import expected_seconds, starts
from kondo_lab.training.alone import Learner, Path
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.field_parts import (
    Place,
    lean,
    make_learner,
    make_part,
    rates_in,
    train_population,
    trials,
    warm_part,
)
from kondo_lab.training.fields import Field, evenly, member, tune_members
from kondo_lab.training.language_arms import LOSSES, text_arm
from kondo_lab.training.part import Part, Stopped
from kondo_lab.training.record import Run
from kondo_lab.training.run import train

LENGTH = 0.8
"""Of a run that ends at a target, as a share of its longest."""


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    main, (first, *larger) = settings.main, settings.planes
    members = tune_members(settings, main)
    blocks = assignments.seed_blocks(settings, main)
    found = [
        warm_part(settings, main),
        *trials("tune", settings, main, members, main.tune_steps),
        *_grid_parts(settings, main, blocks[:1]),
        *_plane_parts(settings, first),
    ]
    for each in larger[:1]:
        found += [warm_part(settings, each), *_plane_parts(settings, each)]
        found += _best_parts(settings, each)
    found += _best_parts(settings, first)
    for each in settings.planes:
        found += _rival_parts(settings, each)
    found += _grid_parts(settings, main, blocks[1:])
    for each in larger[1:]:
        found += [warm_part(settings, each), *_plane_parts(settings, each)]
        found += _best_parts(settings, each)
    for field in settings.rare:
        own_blocks = assignments.seed_blocks(settings, field)
        found += [warm_part(settings, field), *_grid_parts(settings, field, own_blocks)]
    return [*found, warm_part(settings, settings.timed), _seconds_part(settings)]


def _grid_parts(settings: Settings, field: Field, blocks: Sequence[range]) -> list[Part]:
    found = []
    for seeds in blocks:
        members = assignments.grid_members(settings, field, seeds)
        for name, piece in assignments.grid_pieces(settings, field, seeds).items():
            work = expected_seconds.population(field, members[piece], field.num_steps)
            found.append(make_part(name, settings, field, work, _grid, settings, seeds, piece))
    return found


def _plane_parts(settings: Settings, field: Plane) -> list[Part]:
    found = []
    for point in field.points:
        name, number = assignments.point_name(field, point), len(point.learning_rates)
        work = point_seconds(field, point, number * len(settings.tune_seeds(field)))
        found.append(make_part(name, settings, field, work, _try_point, settings, point))
    return found


def _best_parts(settings: Settings, field: Plane) -> list[Part]:
    found = []
    for role in assignments.roles(field):
        name = assignments.best_name(field, role)
        works = [
            point_seconds(field, point, field.num_seeds)
            for point in field.points
            if point.role == role
        ]
        work = sum(works) / len(works)  # whose it will be is not known yet
        found.append(make_part(name, settings, field, work, _best, settings, role))
    return found


def point_seconds(field: Plane, point: Point, num_runs: int) -> float:
    """Return the seconds of some runs of a point of a plane; most end before their last step."""
    own = dataclasses.replace(field, num_prompts=point.num_rows // field.repeats)
    steps = (
        expected_seconds.loops(own, [point.arm], round(LENGTH * point.num_steps))
        - expected_seconds.OPENING
    )
    return expected_seconds.OPENING + num_runs * steps


def _rival_parts(settings: Settings, field: Plane) -> list[Part]:
    found = []
    for point in field.rivals:
        name = assignments.rival_name(field, point)
        work = point_seconds(field, point, len(point.learning_rates) * field.num_seeds)
        found.append(make_part(name, settings, field, work, _rival, settings, point))
    return found


def _seconds_part(settings: Settings) -> Part:
    field, timed = settings.timed, timed_arms(settings)
    work = expected_seconds.loops(field, timed, 2 * settings.timed_rounds)
    name = assignments.seconds_name(field)
    return make_part(name, settings, field, work, _seconds, settings)


def timed_arms(settings: Settings) -> list[Arm]:
    """Return whose steps of the largest model are timed: dense GRPO, and unbiased gates."""
    options = LOSSES["GRPO"]
    return [
        text_arm(name="GRPO", **options),
        *(
            text_arm(name=f"unbiased {percent(rate)}", gate=UnbiasedGate(rate=rate), **options)
            for rate in settings.timed_rates
        ),
    ]


def _grid(place: Place, settings: Settings, seeds: range, piece: slice) -> list[Run]:
    field = place.field
    rates = rates_in(settings, field, place.context)
    members = assignments.grid_members(settings, field, seeds, rates)[piece]
    steps = evenly(field.num_steps, settings.evaluations)
    return lean(train_population(place, members, steps))


def _try_point(place: Place, settings: Settings, point: Point) -> list[Run]:
    """Try a point's learning rates on the tuning seeds. Setting: the learning rate."""
    seeds = settings.tune_seeds(place.field)
    pairs = [(rate, seed) for rate in point.learning_rates for seed in seeds]
    return _by_clock(place, settings, point, pairs, point.num_steps)


def _best(place: Place, settings: Settings, role: Role) -> list[Run]:
    """Run the best point of a role with all reported seeds. Setting: the learning rate."""
    field = place.field
    assert isinstance(field, Plane)
    names = [assignments.point_name(field, each) for each in field.points if each.role == role]
    tried = plane.trials(place.context.finished(names), field)
    point, rate, _ = plane.best(tried, role, settings.target)
    pairs = [(rate, seed) for seed in range(field.num_seeds)]
    return _by_clock(place, settings, point, pairs, round(settings.longer * point.num_steps))


def _rival(place: Place, settings: Settings, point: Point) -> list[Run]:
    """Run a point with all reported seeds, as long as the best. Setting: the learning rate."""
    pairs = [(rate, seed) for rate in point.learning_rates for seed in range(place.field.num_seeds)]
    return _by_clock(place, settings, point, pairs, round(settings.longer * point.num_steps))


def _by_clock(
    place: Place,
    settings: Settings,
    point: Point,
    pairs: Sequence[tuple[float, int]],
    num_steps: int,
) -> list[Run]:
    """Train a point with every learning rate and seed of `pairs`, each until it is at the target.

    One learner makes all runs, so that graphs are recorded once. A part that is stopped begins
    anew: its runs take seconds.
    """
    context = dataclasses.replace(place.context, stopped=lambda: False)
    evaluations = round(settings.wall_evaluations * num_steps / point.num_steps)
    learner: Learner | None = None
    found: list[Run] = []
    for rate, seed in pairs:
        if place.context.stopped():
            raise Stopped(place.part)
        own = member(point.arm, rate, seed)
        if learner is None:
            path: Path = "plain" if point.rate == 1 else "product"
            num_prompts = point.num_rows // place.field.repeats
            learner = make_learner(place, own, path=path, num_prompts=num_prompts)
        else:
            learner.restart(starts.load(settings, place.field, context).of([seed]), own)
        # A checkpoint of a long run, or of one that was killed, is none of this run's.
        context.checkpoint.unlink(missing_ok=True)
        done = train(
            learner,
            context,
            part=place.part,
            num_steps=num_steps,
            log_steps=(),
            evaluate_steps=evenly(num_steps, evaluations),
            enough=partial(plane.has_reached, target=settings.target),
        )
        found += lean(done)
    return found


def _seconds(place: Place, settings: Settings) -> list[Run]:
    """Time every arm's step, of the start of seed 0. Dense goes without the product."""
    limited = dataclasses.replace(settings, max_tokens=settings.timed_tokens)
    timed = timed_arms(settings)
    own = member(timed[-1], 0.0, seed=0)  # the cheapest warms up
    learner = make_learner(place._replace(settings=limited), own)
    found = step_seconds.seconds_per_step(
        learner,
        timed,
        rounds=settings.timed_rounds,
        dense_paths=("plain",),
        progress=place.context.progress,
    )
    return step_seconds.seconds_runs(place.part, found, learner)
