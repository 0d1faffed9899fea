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

import torch

from kondo_lab.language import loop, step_seconds, updates
from kondo_lab.language.contenders import CLIPPED, Contender
from kondo_lab.language.loop import Learner, Shape
from kondo_lab.language.population import Member, Population
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
    found += [*_more_parts(settings, first), *_denominator_parts(settings)]
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


def _warm_part(settings: Settings, field: Field) -> Part:
    return Part(
        name=assignments.warm_name(field),
        run=partial(_warm, settings, field),
        work=expected_seconds.warm(settings, field),
    )


def _tuned_parts(settings: Settings, field: Field) -> list[Part]:
    """Return the parts that lead to a field's starts and learning rates."""
    warm = _warm_part(settings, field)
    if field.tuned_on:
        return [warm]
    members = assignments.tune_members(settings, field)
    pieces = assignments.named_pieces("tune", settings, field, members)
    return [
        warm,
        *(
            Part(
                name=name,
                run=partial(_tune, settings, field, name, piece),
                work=expected_seconds.population(field, members[piece], field.tune_steps),
            )
            for name, piece in pieces.items()
        ),
    ]


def _grid_parts(settings: Settings, field: Field) -> list[Part]:
    members = assignments.unrated(settings, field)
    pieces = assignments.named_pieces("grid", settings, field, members)
    return [
        *_tuned_parts(settings, field),
        *(
            Part(
                name=name,
                run=partial(_grid, settings, field, name, piece),
                work=expected_seconds.population(field, members[piece], field.num_steps),
            )
            for name, piece in pieces.items()
        ),
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
            name=assignments.wall_name(field, each, path, seed),
            run=partial(_wall, settings, field, each, path, seed),
            work=expected_seconds.loops(field, [each], field.num_steps),
        )
        for seed in seeds
        for each in settings.clocked(field)
        for path in assignments.paths(field, each)
    ]


def _more_parts(settings: Settings, field: Field) -> list[Part]:
    return [
        Part(
            name=assignments.more_name(field, each, seed),
            run=partial(_more, settings, field, each, seed),
            # The loop takes as long as dense's by construction, and is looked for first.
            work=1.5 * expected_seconds.loops(field, [Contender(name="dense")], field.num_steps),
        )
        for seed in range(settings.more_seeds)
        for each in assignments.with_more(settings, field)
    ]


def _denominator_parts(settings: Settings) -> list[Part]:
    field, members = settings.main, assignments.denominator_members(settings)
    pieces = assignments.named_pieces("denominator", settings, field, members)
    return [
        Part(
            name=name,
            run=partial(_denominator, settings, name, piece),
            work=expected_seconds.population(field, members[piece], settings.denominator_steps),
        )
        for name, piece in pieces.items()
    ]


def _warm(settings: Settings, field: Field, context: Context) -> Iterable[Record]:
    """Start every seed; series are where seeds stand, steps are supervised ones."""
    seeds, batch = starts.seeds_of(settings, field), field.warm_batch
    for point in starts.train(settings, field, context):
        for seed, loss, reward in zip(seeds, point.loss, point.reward, strict=True):
            paid = point.step * batch
            for metric, value in ((tuning.QUALITY, reward), (WARM_LOSS, loss)):
                yield Record(
                    assignments.warm_name(field),
                    "start",
                    math.nan,
                    seed,
                    point.step,
                    paid,
                    paid,
                    metric,
                    value,
                )


def _tune(
    settings: Settings, field: Field, part: str, piece: slice, context: Context
) -> list[Record]:
    members = assignments.tune_members(settings, field)[piece]
    steps = assignments.evenly(field.tune_steps, settings.tune_evaluations)
    found = _train(settings, field, members, context, part, steps)
    return [record for record in found if record.metric in REWARDS]


def _grid(
    settings: Settings, field: Field, part: str, piece: slice, context: Context
) -> list[Record]:
    members = assignments.grid_members(settings, field, rates_in(settings, field, context))[piece]
    steps = assignments.evenly(field.num_steps, settings.evaluations)
    found = _train(settings, field, members, context, part, steps)
    return lean(found, but=[each.name for each in settings.headliners()])


def _denominator(settings: Settings, part: str, piece: slice, context: Context) -> list[Record]:
    members = assignments.denominator_members(settings)[piece]
    steps = assignments.evenly(settings.denominator_steps, settings.tune_evaluations)
    found = _train(settings, settings.main, members, context, part, steps)
    return [record for record in found if record.metric in REWARDS]


def _train(
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
        num_prompts=field.num_prompts,
        repeats=field.repeats,
        max_norm=settings.max_norm,
        max_tokens=settings.max_tokens,
        num_held_out=settings.num_held_out,
    )
    return train(
        trained,
        context,
        part=part,
        num_steps=steps[-1],
        log_steps=(),
        evaluate_steps=steps,
    )


def _seconds(settings: Settings, field: Field, context: Context) -> list[Record]:
    """Time every contender's step, of the start of seed 0."""
    contenders = assignments.timed(settings, field)
    learner = _learner(settings, field, context, contenders[0], learning_rate=0.0)
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
    context: Context,
) -> list[Record]:
    """Train one contender by the clock. Setting: the learning rate."""
    rate = rates_in(settings, field, context)(contender)
    named = assignments.titled(contender, path)
    learner = _learner(settings, field, context, named, learning_rate=rate, seed=seed, path=path)
    found = loop.train(
        learner,
        context,
        part=assignments.wall_name(field, contender, path, seed),
        num_steps=field.num_steps,
        log_steps=(),
        evaluate_steps=assignments.evenly(field.num_steps, settings.wall_evaluations),
        setting=rate,
    )
    return lean(found)


def _more(
    settings: Settings, field: Field, contender: Contender, seed: int, context: Context
) -> list[Record]:
    """Train with as many prompts as take the dense loop's time. Setting: prompts of a step."""
    part = assignments.more_name(field, contender, seed)
    rate = rates_in(settings, field, context)(contender)
    target = _dense_seconds(settings, field, context)

    def make(num_prompts: int) -> Learner:
        _tidy(context)
        return _learner(
            settings, field, context, contender, learning_rate=0.0, num_prompts=num_prompts
        )

    num_prompts = step_seconds.prompts_for_equal_time(
        make,
        contender,
        target,
        fewest=field.num_prompts,
        most=settings.most_times * field.num_prompts,
        rounds=MORE_TRIES_ROUNDS,
    )
    learner = _learner(
        settings,
        field,
        context,
        contender,
        learning_rate=rate,
        seed=seed,
        num_prompts=num_prompts,
    )
    found = loop.train(
        learner,
        context,
        part=part,
        num_steps=field.num_steps,
        log_steps=(),
        evaluate_steps=assignments.evenly(field.num_steps, settings.wall_evaluations),
        setting=num_prompts,
    )
    return [*lean(found), found[-1]._replace(metric=TARGET_SECONDS, value=target)]


def _dense_seconds(settings: Settings, field: Field, context: Context) -> float:
    """Return the median seconds of a loop of dense GRPO, by the faster of its two paths."""
    grpo = Contender(name="GRPO", loss=CLIPPED, divided=True)
    learner = _learner(settings, field, context, grpo, learning_rate=0.0)
    found = step_seconds.seconds_per_step(learner, [grpo], rounds=MORE_TRIES_ROUNDS)
    return min(line.p50 for line in found if line.stage == updates.LOOP)


def _learner(
    settings: Settings,
    field: Field,
    context: Context,
    contender: Contender,
    *,
    learning_rate: float,
    seed: int = 0,
    path: loop.Path = "product",
    num_prompts: int | None = None,
) -> Learner:
    return Learner(
        starts.task_of(field),
        starts.model_of(field, context.device),
        starts.load(settings, field, context).of([seed]),
        contender,
        shape=Shape(
            num_prompts=field.num_prompts if num_prompts is None else num_prompts,
            repeats=field.repeats,
            num_held_out=settings.num_held_out,
            max_norm=settings.max_norm,
            max_tokens=settings.max_tokens,
        ),
        learning_rate=learning_rate,
        seed=seed,
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
