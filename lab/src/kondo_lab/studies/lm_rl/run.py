"""Parts, the most valuable first: runs by the clock, the grid, questions, more of the same.

warm, tune, wall    see `training`
grid                contenders at their tuned rates, many members in one program
seconds             stages of a step of every contender, one model alone
more                what a cheap learner saves buys rollouts, until the loop takes as long as dense
denominator         best learning rate by rate, with the full and with the kept denominator
"""

import dataclasses
from collections.abc import Sequence

from kondo_lab.language import step_seconds
from kondo_lab.language.contenders import CLIPPED, Contender
from kondo_lab.part import Part, Record
from kondo_lab.studies.lm_rl import assignments, expected_seconds, training
from kondo_lab.studies.lm_rl.settings import Field, Settings
from kondo_lab.studies.lm_rl.training import Place, make_part, trials, tuned_parts, wall_parts

FIRST_SEEDS = 2
"""Of runs by the clock that come before everything else is asked; the rest comes last."""
MORE_TRIES_ROUNDS = 3
DENSE = Contender(name="GRPO", loss=CLIPPED, divided=True)
TARGET_SECONDS = "dense seconds of a loop"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    main, *other_grids = settings.grids
    first, *other_walls = settings.walls
    members = assignments.denominator_members(settings)
    found = [
        *tuned_parts(settings, first),
        _seconds_part(settings, first),
        *wall_parts(settings, first, range(min(FIRST_SEEDS, first.num_seeds))),
        *_grid_parts(settings, main),
        _seconds_part(settings, main),
    ]
    for field in other_walls:
        found += [
            *tuned_parts(settings, field),
            _seconds_part(settings, field),
            *wall_parts(settings, field, range(field.num_seeds)),
        ]
    found += _more_parts(settings, first)
    found += trials("denominator", settings, main, members, settings.denominator_steps)
    for field in other_grids:
        found += [*_grid_parts(settings, field), _seconds_part(settings, field)]
    return found + wall_parts(settings, first, range(FIRST_SEEDS, first.num_seeds))


def _grid_parts(settings: Settings, field: Field) -> list[Part]:
    members = assignments.grid_members(settings, field)
    found = tuned_parts(settings, field)
    for name, piece in assignments.named_pieces("grid", settings, field, members).items():
        work = expected_seconds.population(field, members[piece], field.num_steps)
        found.append(make_part(name, settings, field, work, _grid, settings, piece))
    return found


def _seconds_part(settings: Settings, field: Field) -> Part:
    timed = assignments.timed(settings, field)
    work = expected_seconds.loops(field, timed, 2 * settings.rounds)
    name = assignments.seconds_name(field)
    return make_part(name, settings, field, work, _seconds, timed, settings.rounds)


def _more_parts(settings: Settings, field: Field) -> list[Part]:
    # The loop takes as long as dense's by construction, and is looked for first.
    work = 1.5 * expected_seconds.loops(field, [DENSE], field.num_steps)
    most = settings.most_times * field.num_prompts
    return [
        make_part(name, settings, field, work, _more, *inputs, most)
        for name, inputs in assignments.more_runs(settings, field).items()
    ]


def _grid(place: Place, settings: Settings, piece: slice) -> list[Record]:
    field = place.field
    rates = training.rates_in(settings, field, place.context)
    members = assignments.grid_members(settings, field, rates)[piece]
    steps = assignments.evenly(field.num_steps, settings.evaluations)
    found = training.train_population(place, members, steps)
    return training.lean(found, but=[each.name for each in settings.headliners()])


def _seconds(place: Place, contenders: Sequence[Contender], rounds: int) -> list[Record]:
    """Time every contender's step, of the start of seed 0."""
    learner = training.make_learner(place, assignments.member(contenders[0], 0.0, seed=0))
    progress = place.context.progress
    found = step_seconds.seconds_per_step(learner, contenders, rounds=rounds, progress=progress)
    return step_seconds.seconds_records(place.part, found, learner)


def _more(place: Place, contender: Contender, seed: int, most: int) -> list[Record]:
    """Train with as many prompts as take the dense loop's time. Setting: prompts of a step."""
    own = training.tuned_member(place, contender, seed)
    fewest = place.field.num_prompts
    target = min(_loop_seconds(place, DENSE, fewest))  # the faster of two paths

    def seconds_of(num_prompts: int) -> float:
        training.tidy(place.context)
        return _loop_seconds(place, contender, num_prompts)[0]

    num_prompts = step_seconds.prompts_for_seconds(seconds_of, target, fewest=fewest, most=most)
    own = dataclasses.replace(own, setting=num_prompts)
    learner = training.make_learner(place, own, num_prompts=num_prompts)
    found = training.train_by_clock(place, learner)
    return [*training.lean(found), found[-1]._replace(metric=TARGET_SECONDS, value=target)]


def _loop_seconds(place: Place, contender: Contender, num_prompts: int) -> list[float]:
    """Return the median seconds of a contender's step, by each of its paths."""
    own = assignments.member(contender, 0.0, seed=0)
    learner = training.make_learner(place, own, num_prompts=num_prompts)
    found = step_seconds.seconds_per_step(learner, [contender], rounds=MORE_TRIES_ROUNDS)
    return [step_seconds.loop_seconds(steps) for steps in found.values()]
