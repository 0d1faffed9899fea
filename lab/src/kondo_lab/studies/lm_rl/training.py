"""Parts that start models, try their learning rates and train them one by one, by the clock.

    warm    a supervised start of every seed of a field
    tune    learning rates of arms, on seeds that are not reported
    wall    one arm of one seed, end to end through the product

A part may be run on its own after those it needs: starts are made again where they are missing,
tuned rates are read from the runs of the tuning parts.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kondo_lab.studies.lm_rl import assignments, expected_seconds, starts, tuning
from kondo_lab.studies.lm_rl.settings import Field, Training
from kondo_lab.training.alone import Learner, Path
from kondo_lab.training.arms import Arm
from kondo_lab.training.asynchronous import LAG, AsynchronousPopulation, running
from kondo_lab.training.member import Member
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Shape, TextProgram
from kondo_lab.training.record import Log, Run, keeping
from kondo_lab.training.run import train
from kondo_lab.training.worker_pool import one_thread

WARM_LOSS = "demonstration loss"
REWARDS = (tuning.QUALITY, tuning.GREEDY)
CURVES = (
    *REWARDS,
    "entropy",
    LAG,
    "tokens differentiated",
    "seconds generate",
    "seconds learner",
    "seconds loop",
)
"""Metrics that are kept of every evaluated step. Of diagnostics only those of the last step are:
results are kept under version control."""


class Place(NamedTuple):
    """Where a part runs."""

    settings: Training
    field: Field
    part: str
    """Its name."""
    context: Context


def make_part(
    name: str,
    settings: Training,
    field: Field,
    work: float,
    make: Callable[..., Iterable[Run]],
    *inputs: Any,
) -> Part:
    """Return a part that makes runs of its place and inputs, of `work` expected seconds."""

    def run(context: Context) -> list[Run]:
        tidy(context)
        with one_thread():  # of a CPU
            return list(make(Place(settings, field, name, context), *inputs))

    return Part(name=name, run=run, work=work)


def tuned_parts(settings: Training, field: Field) -> list[Part]:
    """Return the parts that lead to a field's starts and learning rates."""
    members = [] if field.tuned_on else assignments.tune_members(settings, field)
    warm = warm_part(settings, field)
    return [warm, *trials("tune", settings, field, members, field.tune_steps)]


def warm_part(settings: Training, field: Field) -> Part:
    """Return the part that makes a field's supervised starts."""
    work = expected_seconds.warm(settings, field)
    return make_part(assignments.warm_name(field), settings, field, work, _warm)


def trials(
    kind: str, settings: Training, field: Field, members: Sequence[Member], num_steps: int
) -> list[Part]:
    """Return parts that try learning rates, of which the rewards alone are kept."""
    found = []
    for name, piece in assignments.named_pieces(kind, settings, field, members).items():
        work = expected_seconds.population(field, members[piece], num_steps)
        found.append(make_part(name, settings, field, work, try_rates, members[piece], num_steps))
    return found


def wall_parts(settings: Training, field: Field, seeds: Iterable[int]) -> list[Part]:
    """Return the parts that train a field's arms by the clock, with some of their seeds."""
    found = []
    for name, inputs in assignments.wall_runs(settings, field, seeds).items():
        work = expected_seconds.loops(field, [inputs[0]], field.num_steps)
        found.append(make_part(name, settings, field, work, _wall, *inputs))
    return found


def lean(runs: Sequence[Run]) -> list[Run]:
    """Leave out the diagnostics of all steps but the last."""
    last = max(row["step"] for run in runs for row in run.curve)
    return keeping(runs, lambda row, metric: metric in CURVES or row["step"] == last)


def _warm(place: Place) -> Iterable[Run]:
    """Start every seed; series are where seeds stand, steps are supervised ones."""
    settings, field, part, context = place
    seeds = starts.seeds_of(settings, field)
    log = Log(part, task=starts.task_of(field).title, learning_rate=field.warm_rate)
    for point in starts.train(settings, field, context):
        paid = point.step * field.warm_batch
        for seed, loss, reward in zip(seeds, point.loss, point.reward, strict=True):
            values = {tuning.QUALITY: reward, WARM_LOSS: loss}
            log.add("start", seed, values, step=point.step, rollouts=paid, passes=paid)
    return log.runs()


def try_rates(place: Place, members: Sequence[Member], num_steps: int) -> list[Run]:
    """Train members for so many steps and return their rewards alone."""
    steps = assignments.evenly(num_steps, place.settings.tune_evaluations)
    found = train_population(place, members, steps)
    return keeping(found, lambda row, metric: metric in REWARDS)


def train_population(place: Place, members: Sequence[Member], steps: Sequence[int]) -> list[Run]:
    """Train a population, evaluated after `steps`; with a queue if its members have one."""
    settings, field, part, context = place
    queued = any(member.frictions.queue for member in members)
    kind = AsynchronousPopulation if queued else Population
    trained = kind(
        _program(settings, field, field.num_prompts, context),
        members,
        device=context.device,
        start=starts.load(settings, field, context),
    )
    with running(trained):
        return train(
            trained, context, part=part, num_steps=steps[-1], log_steps=(), evaluate_steps=steps
        )


def _program(settings: Training, field: Field, num_prompts: int, context: Context) -> TextProgram:
    shape = Shape(
        num_prompts=num_prompts,
        repeats=field.repeats,
        num_held_out=settings.num_held_out,
        greedy=settings.greedy,
        max_norm=settings.max_norm,
        max_tokens=settings.max_tokens,
    )
    return TextProgram(starts.task_of(field), starts.model_of(field, context.device), shape)


def _wall(place: Place, arm: Arm, path: Path, seed: int) -> list[Run]:
    """Train one arm by the clock. Setting: the learning rate."""
    own = tuned_member(place, arm, seed)
    own = dataclasses.replace(own, series=assignments.titled(arm, path))
    return lean(train_by_clock(place, make_learner(place, own, path=path)))


def tuned_member(place: Place, arm: Arm, seed: int) -> Member:
    """Return a run of an arm at its learning rate."""
    rate = rates_in(place.settings, place.field, place.context)(arm)
    return assignments.member(arm, rate, seed)


def train_by_clock(place: Place, learner: Learner) -> list[Run]:
    """Train one model for a field's steps, evaluated on the way."""
    num_steps, points = place.field.num_steps, place.settings.wall_evaluations
    return train(
        learner,
        place.context,
        part=place.part,
        num_steps=num_steps,
        log_steps=(),
        evaluate_steps=assignments.evenly(num_steps, points),
    )


def make_learner(
    place: Place, own: Member, *, path: Path = "product", num_prompts: int | None = None
) -> Learner:
    """Return one model at its start; by default a step has the field's prompts."""
    settings, field, _, context = place
    return Learner(
        _program(settings, field, num_prompts or field.num_prompts, context),
        starts.load(settings, field, context).of([own.seed]),
        own,
        path=path,
        compiled=settings.compiled,
    )


def rates_in(settings: Training, field: Field, context: Context) -> Callable[[Arm], float]:
    """Return who has which learning rate in a field: as given, or as tuning parts have found it."""
    known = dict(settings.given_rates(field))
    names = assignments.tune_names(settings, field)
    if names:
        known |= tuning.handed_over(context, names)
    return lambda arm: known[tuning.tuned_name(arm)]


def tidy(context: Context) -> None:
    """Free what earlier parts left on the device.

    A graph that is freed takes the cuBLAS workspace of its stream along: those of earlier parts
    must be gone before new ones are recorded, not whenever Python finds the time.
    """
    if context.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
