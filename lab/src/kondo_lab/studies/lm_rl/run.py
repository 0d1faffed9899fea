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
from typing import Any, NamedTuple

import torch

from kondo_lab.language import step_seconds
from kondo_lab.language.contenders import CLIPPED, Contender
from kondo_lab.language.loop import Learner, Path
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


class _Place(NamedTuple):
    """Where a part runs."""

    settings: Settings
    field: Field
    part: str
    """Its name."""
    context: Context


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    main, *other_grids = settings.grids
    first, *other_walls = settings.walls
    members = assignments.denominator_members(settings)
    found = [
        *_tuned_parts(settings, first),
        _seconds_part(settings, first),
        *_wall_parts(settings, first, range(min(FIRST_SEEDS, first.num_seeds))),
        *_grid_parts(settings, main),
        _seconds_part(settings, main),
    ]
    for field in other_walls:
        found += [
            *_tuned_parts(settings, field),
            _seconds_part(settings, field),
            *_wall_parts(settings, field, range(field.num_seeds)),
        ]
    found += _more_parts(settings, first)
    found += _trials("denominator", settings, main, members, settings.denominator_steps)
    for field in other_grids:
        found += [*_grid_parts(settings, field), _seconds_part(settings, field)]
    return found + _wall_parts(settings, first, range(FIRST_SEEDS, first.num_seeds))


def _part(
    name: str,
    settings: Settings,
    field: Field,
    work: float,
    make: Callable[..., Iterable[Record]],
    *inputs: Any,
) -> Part:
    """Return a part that makes records of its place and inputs, of `work` expected seconds."""

    def run(context: Context) -> list[Record]:
        _tidy(context)
        with one_thread():  # of a CPU
            return list(make(_Place(settings, field, name, context), *inputs))

    return Part(name=name, run=run, work=work)


def _tuned_parts(settings: Settings, field: Field) -> list[Part]:
    """Return the parts that lead to a field's starts and learning rates."""
    work = expected_seconds.warm(settings, field)
    warm = _part(assignments.warm_name(field), settings, field, work, _warm)
    members = [] if field.tuned_on else assignments.tune_members(settings, field)
    return [warm, *_trials("tune", settings, field, members, field.tune_steps)]


def _trials(
    kind: str, settings: Settings, field: Field, members: Sequence[Member], num_steps: int
) -> list[Part]:
    """Return parts that try learning rates, of which the rewards alone are kept."""
    found = []
    for name, piece in assignments.named_pieces(kind, settings, field, members).items():
        work = expected_seconds.population(field, members[piece], num_steps)
        found.append(_part(name, settings, field, work, _try_rates, members[piece], num_steps))
    return found


def _grid_parts(settings: Settings, field: Field) -> list[Part]:
    members = assignments.grid_members(settings, field)
    found = _tuned_parts(settings, field)
    for name, piece in assignments.named_pieces("grid", settings, field, members).items():
        work = expected_seconds.population(field, members[piece], field.num_steps)
        found.append(_part(name, settings, field, work, _grid, piece))
    return found


def _seconds_part(settings: Settings, field: Field) -> Part:
    timed = assignments.timed(settings, field)
    work = expected_seconds.loops(field, timed, 2 * settings.rounds)
    return _part(assignments.seconds_name(field), settings, field, work, _seconds, timed)


def _wall_parts(settings: Settings, field: Field, seeds: Iterable[int]) -> list[Part]:
    found = []
    for name, inputs in assignments.wall_runs(settings, field, seeds).items():
        work = expected_seconds.loops(field, [inputs[0]], field.num_steps)
        found.append(_part(name, settings, field, work, _wall, *inputs))
    return found


def _more_parts(settings: Settings, field: Field) -> list[Part]:
    # The loop takes as long as dense's by construction, and is looked for first.
    work = 1.5 * expected_seconds.loops(field, [DENSE], field.num_steps)
    return [
        _part(name, settings, field, work, _more, *inputs)
        for name, inputs in assignments.more_runs(settings, field).items()
    ]


def lean(records: Sequence[Record], *, but: Collection[str] = ()) -> list[Record]:
    """Leave out the diagnostics of all steps but the last, not those of the series `but`."""
    last = max(record.step for record in records)
    return [
        record
        for record in records
        if record.metric in CURVES or record.step == last or record.series in but
    ]


def _warm(place: _Place) -> Iterable[Record]:
    """Start every seed; series are where seeds stand, steps are supervised ones."""
    settings, field, part, context = place
    seeds = starts.seeds_of(settings, field)
    for point in starts.train(settings, field, context):
        paid = point.step * field.warm_batch
        for seed, loss, reward in zip(seeds, point.loss, point.reward, strict=True):
            for value in ((tuning.QUALITY, reward), (WARM_LOSS, loss)):
                yield Record(part, "start", math.nan, seed, point.step, paid, paid, *value)


def _try_rates(place: _Place, members: Sequence[Member], num_steps: int) -> list[Record]:
    steps = assignments.evenly(num_steps, place.settings.tune_evaluations)
    found = _population(place, members, steps)
    return [record for record in found if record.metric in REWARDS]


def _grid(place: _Place, piece: slice) -> list[Record]:
    settings, field, _, context = place
    members = assignments.grid_members(settings, field, rates_in(settings, field, context))[piece]
    steps = assignments.evenly(field.num_steps, settings.evaluations)
    found = _population(place, members, steps)
    return lean(found, but=[each.name for each in settings.headliners()])


def _population(place: _Place, members: Sequence[Member], steps: Sequence[int]) -> list[Record]:
    """Train a population, evaluated after `steps`."""
    settings, field, part, context = place
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


def _seconds(place: _Place, contenders: Sequence[Contender]) -> list[Record]:
    """Time every contender's step, of the start of seed 0."""
    learner = _learner(place, assignments.member(contenders[0], 0.0, seed=0))
    rounds, progress = place.settings.rounds, place.context.progress
    found = step_seconds.seconds_per_step(learner, contenders, rounds=rounds, progress=progress)
    return step_seconds.seconds_records(place.part, found, learner)


def _wall(place: _Place, contender: Contender, path: Path, seed: int) -> list[Record]:
    """Train one contender by the clock. Setting: the learning rate."""
    own = _tuned(place, contender, seed)
    own = dataclasses.replace(own, series=assignments.titled(contender, path))
    return lean(_clocked(place, _learner(place, own, path=path)))


def _more(place: _Place, contender: Contender, seed: int) -> list[Record]:
    """Train with as many prompts as take the dense loop's time. Setting: prompts of a step."""
    own = _tuned(place, contender, seed)
    fewest = place.field.num_prompts
    target = min(_loop_seconds(place, DENSE, fewest))  # the faster of two paths

    def seconds_of(num_prompts: int) -> float:
        _tidy(place.context)
        return _loop_seconds(place, contender, num_prompts)[0]

    num_prompts = step_seconds.prompts_for_seconds(
        seconds_of, target, fewest=fewest, most=place.settings.most_times * fewest
    )
    own = dataclasses.replace(own, setting=num_prompts)
    found = _clocked(place, _learner(place, own, num_prompts=num_prompts))
    return [*lean(found), found[-1]._replace(metric=TARGET_SECONDS, value=target)]


def _tuned(place: _Place, contender: Contender, seed: int) -> Member:
    rate = rates_in(place.settings, place.field, place.context)(contender)
    return assignments.member(contender, rate, seed)


def _loop_seconds(place: _Place, contender: Contender, num_prompts: int) -> list[float]:
    """Return the median seconds of a contender's step, by each of its paths."""
    own = assignments.member(contender, 0.0, seed=0)
    learner = _learner(place, own, num_prompts=num_prompts)
    found = step_seconds.seconds_per_step(learner, [contender], rounds=MORE_TRIES_ROUNDS)
    return [step_seconds.loop_seconds(steps) for steps in found.values()]


def _clocked(place: _Place, learner: Learner) -> list[Record]:
    num_steps, points = place.field.num_steps, place.settings.wall_evaluations
    return train(
        learner,
        place.context,
        part=place.part,
        num_steps=num_steps,
        log_steps=(),
        evaluate_steps=assignments.evenly(num_steps, points),
    )


def _learner(
    place: _Place, own: Member, *, path: Path = "product", num_prompts: int | None = None
) -> Learner:
    settings, field, _, context = place
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
