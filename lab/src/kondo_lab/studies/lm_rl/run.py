"""Parts, the most valuable first: runs by the clock, the grid, questions, more of the same.

    warm         a supervised start of every seed of a field
    tune         learning rates of every contender, on seeds that are not reported
    grid         contenders at their tuned rates, many members in one program
    seconds      stages of a step of every contender, one model alone
    wall         headline contenders end to end, one part per contender and seed
    more         what a cheap learner saves buys rollouts, until the loop takes as long as dense
    denominator  best learning rate by rate, with the full and with the kept denominator

A part may be run on its own after those it needs: starts are made again where they are missing,
tuned rates are read from the records of the tuning parts.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from kondo_lab.language import loop, step_seconds
from kondo_lab.language.contenders import CLIPPED, Contender
from kondo_lab.language.loop import Learner
from kondo_lab.language.population import Member, Population, Shape
from kondo_lab.part import Context, Part, Record
from kondo_lab.population.run import train
from kondo_lab.studies.lm_rl import assignments, expected_seconds, starts, tuning
from kondo_lab.studies.lm_rl.settings import Field, Settings
from kondo_lab.worker_pool import one_thread

FIRST_SEEDS = 2
"""Of runs by the clock that come before everything else is asked; the rest comes last."""
MORE_TRIES_ROUNDS = 3
WARM_LOSS = "demonstration loss"
REWARDS = (tuning.QUALITY, tuning.GREEDY)
CURVES = (
    *REWARDS,
    "entropy",
    "tokens differentiated",
    "seconds generate",
    "seconds learner",
    "seconds loop",
)
"""Metrics that are kept of every evaluated step. Of diagnostics only those of the last step are,
but for the headliners of a grid: results are kept under version control."""
DENSE = Contender(name="GRPO", loss=CLIPPED, divided=True)
TARGET_SECONDS = "dense seconds of a loop"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        dataclasses.replace(part, run=partial(_run_tidily, part.run))
        for part in _in_order(settings)
    ]


def _run_tidily(run: Callable[[Context], Iterable[Record]], context: Context) -> list[Record]:
    """Run a part on a device that earlier ones have left, and on one thread of a CPU."""
    _tidy(context)
    with one_thread():
        return list(run(context))


def _in_order(settings: Settings) -> list[Part]:
    """Return the parts, the most valuable first."""
    main, *other_grids = settings.grids
    first, *other_walls = settings.walls
    members = assignments.denominator_members(settings)
    denominator = _trials("denominator", settings, main, members, settings.denominator_steps)
    found = [
        *_tuned_parts(settings, first),
        _seconds_part(settings, first),
        *_wall_parts(settings, first, range(min(FIRST_SEEDS, first.num_seeds))),
    ]
    found += [*_grid_parts(settings, main), _seconds_part(settings, main)]
    for field in other_walls:
        found += [
            *_tuned_parts(settings, field),
            _seconds_part(settings, field),
            *_wall_parts(settings, field, range(field.num_seeds)),
        ]
    found += [*_more_parts(settings, first), *denominator]
    for field in other_grids:
        found += [*_grid_parts(settings, field), _seconds_part(settings, field)]
    return found + _wall_parts(settings, first, range(FIRST_SEEDS, first.num_seeds))


def lean(records: Sequence[Record], *, but: Collection[str] = ()) -> list[Record]:
    """Leave out the diagnostics of all steps but the last, not those of the series `but`."""
    last = max(record.step for record in records)
    return [
        record
        for record in records
        if record.metric in CURVES or record.step == last or record.series in but
    ]


def _tuned_parts(settings: Settings, field: Field) -> list[Part]:
    """Return the parts that lead to a field's starts and learning rates."""
    warm = Part(
        name=assignments.warm_name(field),
        run=partial(_warm, settings, field),
        work=expected_seconds.warm(settings, field),
    )
    members = [] if field.tuned_on else assignments.tune_members(settings, field)
    return [warm, *_trials("tune", settings, field, members, field.tune_steps)]


def _trials(
    kind: str, settings: Settings, field: Field, members: Sequence[Member], num_steps: int
) -> list[Part]:
    """Return parts that try learning rates, of which the rewards alone are kept."""
    return [
        Part(
            name=name,
            run=partial(_try_rates, settings, field, members[piece], num_steps, name),
            work=expected_seconds.population(field, members[piece], num_steps),
        )
        for name, piece in assignments.named_pieces(kind, settings, field, members).items()
    ]


def _grid_parts(settings: Settings, field: Field) -> list[Part]:
    members = assignments.grid_members(settings, field)
    pieces = assignments.named_pieces("grid", settings, field, members)
    return _tuned_parts(settings, field) + [
        Part(
            name=name,
            run=partial(_grid, settings, field, name, piece),
            work=expected_seconds.population(field, members[piece], field.num_steps),
        )
        for name, piece in pieces.items()
    ]


def _seconds_part(settings: Settings, field: Field) -> Part:
    return Part(
        name=assignments.seconds_name(field),
        run=partial(_seconds, settings, field),
        work=expected_seconds.loops(field, assignments.timed(settings, field), 2 * settings.rounds),
    )


def _wall_parts(settings: Settings, field: Field, seeds: Iterable[int]) -> list[Part]:
    return [
        Part(
            name=name,
            run=partial(_wall, settings, field, contender, path, seed, name),
            work=expected_seconds.loops(field, [contender], field.num_steps),
        )
        for name, (contender, path, seed) in assignments.wall_runs(settings, field, seeds).items()
    ]


def _more_parts(settings: Settings, field: Field) -> list[Part]:
    # The loop takes as long as dense's by construction, and is looked for first.
    work = 1.5 * expected_seconds.loops(field, [DENSE], field.num_steps)
    return [
        Part(name=name, run=partial(_more, settings, field, contender, seed, name), work=work)
        for name, (contender, seed) in assignments.more_runs(settings, field).items()
    ]


def _warm(settings: Settings, field: Field, context: Context) -> Iterable[Record]:
    """Start every seed; series are where seeds stand, steps are supervised ones."""
    part, seeds = assignments.warm_name(field), starts.seeds_of(settings, field)
    for point in starts.train(settings, field, context):
        paid = point.step * field.warm_batch
        for seed, loss, reward in zip(seeds, point.loss, point.reward, strict=True):
            for value in ((tuning.QUALITY, reward), (WARM_LOSS, loss)):
                yield Record(part, "start", math.nan, seed, point.step, paid, paid, *value)


def _try_rates(
    settings: Settings,
    field: Field,
    members: Sequence[Member],
    num_steps: int,
    part: str,
    context: Context,
) -> list[Record]:
    steps = assignments.evenly(num_steps, settings.tune_evaluations)
    found = _population(settings, field, members, context, part, steps)
    return [record for record in found if record.metric in REWARDS]


def _grid(
    settings: Settings, field: Field, part: str, piece: slice, context: Context
) -> list[Record]:
    members = assignments.grid_members(settings, field, rates_in(settings, field, context))[piece]
    steps = assignments.evenly(field.num_steps, settings.evaluations)
    found = _population(settings, field, members, context, part, steps)
    return lean(found, but=[each.name for each in settings.headliners()])


def _population(
    settings: Settings,
    field: Field,
    members: Sequence[Member],
    context: Context,
    part: str,
    steps: Sequence[int],
) -> list[Record]:
    """Train a population, evaluated after `steps`."""
    trained = Population(
        starts.model_of(field, context.device),
        starts.task_of(field),
        members,
        starts.load(settings, field, context),
        device=context.device,
        shape=_shape(settings, field, field.num_prompts),
    )
    return train(
        trained, context, part=part, num_steps=steps[-1], log_steps=(), evaluate_steps=steps
    )


def _shape(settings: Settings, field: Field, num_prompts: int) -> Shape:
    return Shape(
        num_prompts=num_prompts,
        repeats=field.repeats,
        num_held_out=settings.num_held_out,
        max_norm=settings.max_norm,
        max_tokens=settings.max_tokens,
    )


def _seconds(settings: Settings, field: Field, context: Context) -> list[Record]:
    """Time every contender's step, of the start of seed 0."""
    contenders = assignments.timed(settings, field)
    learner = _timed(settings, field, context, contenders[0])
    found = step_seconds.seconds_per_step(
        learner, contenders, rounds=settings.rounds, progress=context.progress
    )
    return step_seconds.seconds_records(assignments.seconds_name(field), found, learner)


def _wall(
    settings: Settings,
    field: Field,
    contender: Contender,
    path: loop.Path,
    seed: int,
    part: str,
    context: Context,
) -> list[Record]:
    """Train one contender by the clock. Setting: the learning rate."""
    rate = rates_in(settings, field, context)(contender)
    own = assignments.member(contender, rate, seed)
    own = dataclasses.replace(own, series=assignments.titled(contender, path))
    return lean(_clocked(settings, field, context, own, part, path=path))


def _more(
    settings: Settings, field: Field, contender: Contender, seed: int, part: str, context: Context
) -> list[Record]:
    """Train with as many prompts as take the dense loop's time. Setting: prompts of a step."""
    own = assignments.member(contender, rates_in(settings, field, context)(contender), seed)
    # The faster of dense GRPO's two paths.
    target = min(_loop_seconds(settings, field, context, DENSE, field.num_prompts))

    def seconds_of(num_prompts: int) -> float:
        _tidy(context)
        return _loop_seconds(settings, field, context, contender, num_prompts)[0]

    num_prompts = step_seconds.prompts_for_seconds(
        seconds_of,
        target,
        fewest=field.num_prompts,
        most=settings.most_times * field.num_prompts,
    )
    own = dataclasses.replace(own, setting=num_prompts)
    found = _clocked(settings, field, context, own, part, num_prompts=num_prompts)
    return [*lean(found), found[-1]._replace(metric=TARGET_SECONDS, value=target)]


def _loop_seconds(
    settings: Settings, field: Field, context: Context, contender: Contender, num_prompts: int
) -> list[float]:
    """Return the median seconds of a contender's step, by each of its paths."""
    learner = _timed(settings, field, context, contender, num_prompts=num_prompts)
    found = step_seconds.seconds_per_step(learner, [contender], rounds=MORE_TRIES_ROUNDS)
    return [step_seconds.loop_seconds(steps) for steps in found.values()]


def _clocked(
    settings: Settings, field: Field, context: Context, own: Member, part: str, **options: Any
) -> list[Record]:
    return train(
        _learner(settings, field, context, own, **options),
        context,
        part=part,
        num_steps=field.num_steps,
        log_steps=(),
        evaluate_steps=assignments.evenly(field.num_steps, settings.wall_evaluations),
    )


def _timed(
    settings: Settings, field: Field, context: Context, contender: Contender, **options: Any
) -> Learner:
    """Return a learner whose weights stay as they are."""
    return _learner(settings, field, context, assignments.member(contender, 0.0, 0), **options)


def _learner(
    settings: Settings,
    field: Field,
    context: Context,
    own: Member,
    *,
    path: loop.Path = "product",
    num_prompts: int | None = None,
) -> Learner:
    return Learner(
        starts.task_of(field),
        starts.model_of(field, context.device),
        starts.load(settings, field, context).of([own.seed]),
        own,
        shape=_shape(settings, field, num_prompts or field.num_prompts),
        path=path,
        compiled=settings.compiled,
    )


def rates_in(settings: Settings, field: Field, context: Context) -> Callable[[Contender], float]:
    """Return who has which learning rate in a field, as the tuning parts have found it."""
    known = tuning.handed_over(context, assignments.tune_names(settings, field))
    return lambda contender: known[tuning.tuned_name(contender)]


def _tidy(context: Context) -> None:
    """Free what earlier parts left on the device.

    A graph that is freed takes the cuBLAS workspace of its stream along: those of earlier parts
    must be gone before new ones are recorded, not whenever Python finds the time.
    """
    if context.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
