"""Parts of a field: supervised starts, learning rates of arms, and how arms are trained in it.

    warm    a supervised start of every seed of a field
    tune    learning rates of arms, on seeds that are not reported

A part may be run on its own after those it needs: starts are made again where they are missing,
tuned rates are read from the runs of the tuning parts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kondo_lab.training import expected_seconds, starts, tuning
from kondo_lab.training.alone import Learner, Path
from kondo_lab.training.arms import Arm
from kondo_lab.training.asynchronous import LAG, AsynchronousPopulation, running
from kondo_lab.training.cuda_graphs import free
from kondo_lab.training.fields import (
    Field,
    FieldSettings,
    evenly,
    named_pieces,
    tune_names,
    warm_name,
)
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

    settings: FieldSettings
    field: Field
    part: str
    """Its name."""
    context: Context


def make_part(
    name: str,
    settings: FieldSettings,
    field: Field,
    work: float,
    make: Callable[..., Iterable[Run]],
    *inputs: Any,
) -> Part:
    """Return a part that makes runs of its place and inputs, of `work` expected seconds."""

    def run(context: Context) -> list[Run]:
        free(context.device)
        with one_thread():  # of a CPU
            return list(make(Place(settings, field, name, context), *inputs))

    return Part(name=name, run=run, work=work)


def warm_part(settings: FieldSettings, field: Field) -> Part:
    """Return the part that makes a field's supervised starts."""
    work = expected_seconds.warm(settings, field)
    return make_part(warm_name(field), settings, field, work, _warm)


def trials(
    kind: str, settings: FieldSettings, field: Field, members: Sequence[Member], num_steps: int
) -> list[Part]:
    """Return parts that try learning rates, of which the rewards alone are kept."""
    found = []
    for name, piece in named_pieces(kind, settings, field, members).items():
        work = expected_seconds.population(field, members[piece], num_steps)
        found.append(make_part(name, settings, field, work, try_rates, members[piece], num_steps))
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
    steps = evenly(num_steps, place.settings.tune_evaluations)
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


def _program(
    settings: FieldSettings, field: Field, num_prompts: int, context: Context
) -> TextProgram:
    shape = Shape(
        num_prompts=num_prompts,
        repeats=field.repeats,
        num_held_out=settings.num_held_out,
        greedy=settings.greedy,
        max_norm=settings.max_norm,
        max_tokens=settings.max_tokens,
    )
    return TextProgram(starts.task_of(field), starts.model_of(field, context.device), shape)


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


def rates_in(settings: FieldSettings, field: Field, context: Context) -> Callable[[Arm], float]:
    """Return who has which learning rate in a field: as given, or as tuning parts have found it."""
    known = dict(settings.given_rates(field))
    names = tune_names(settings, field)
    if names:
        known |= tuning.chosen(context.finished(names))
    return lambda arm: known[tuning.tuned_name(arm)]
