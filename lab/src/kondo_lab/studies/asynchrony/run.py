"""One part per crew: on Ray, then replayed, then with the delays that other studies simulate.

on Ray         real processes; the age of every rollout is written down
replayed       one process, the same learner, the same ages, other samples
fixed delay    the laboratory's friction: always round(mean age) steps old
uniform delay  the same, the age drawn at every step from 0 .. round(2 * mean age)
"""

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kondo import losses
from kondo.actors.setup import Settings as ActorSettings
from kondo.actors.setup import Setup
from kondo_lab.models.networks import MLP
from kondo_lab.studies.asynchrony.settings import Crew, Settings
from kondo_lab.tasks.digits import DigitsBandit
from kondo_lab.training import arms, image_bandits, learner_error
from kondo_lab.training.actors import digits, slowed
from kondo_lab.training.arms import Arm
from kondo_lab.training.learner_error import LEARNER_ERROR
from kondo_lab.training.member import Frictions, Member
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run, keeping
from kondo_lab.training.run import train

if TYPE_CHECKING:
    from kondo_lab.studies.asynchrony.traces import Trace

ON_RAY, REPLAYED, FIXED, UNIFORM = "on Ray", "replayed", "fixed delay", "uniform delay"
TWINS = (REPLAYED, FIXED, UNIFORM)
ONLINE, TEST, AGES = "online error", "test error", "share of rollouts by age"
AGE = "age"
"""Series of what is measured of all methods together."""
# Replays of run s draw the samples of run s + this: independent of every run on Ray.
OTHER_SAMPLES = 10_000
# Shares of a part's time that are over, about, for its progress.
_RAY_DONE, _REPLAY_DONE = 0.8, 0.9


class Method(NamedTuple):
    """An update rule, on actors and in populations."""

    on_actors: Mapping[str, Any]
    """Fields of the actors' settings."""
    arm: Arm


_EVERYTHING = {"gate": "price:-inf", "at_source": False}


def methods(settings: Settings) -> dict[str, Method]:
    """Return the compared rules by name."""
    weighted = {"loss": losses.is_pg, "behaviour_input": "behaviour_log_probs"}
    return {
        "PG": Method(_EVERYTHING, arms.PG),
        "IS-PG": Method(_EVERYTHING | weighted, learner_error.importance_weighted()),
        "DG": Method(_EVERYTHING | {"loss": losses.dg}, arms.DG),
        arms.dg_k(settings.rate): Method(
            {"gate": f"delight:{settings.rate}"}, arms.kondo_count(settings.rate)
        ),
    }


def named(method: str, how: str) -> str:
    """Return the series of a method and how it was run."""
    return f"{method}, {how}"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [Part(name=crew.name, run=partial(_compare, settings, crew)) for crew in settings.crews]


def setup(settings: Settings) -> Setup:
    """Return the task and the policy, as quick as they can be."""
    return digits(batch=settings.batch, width=settings.width)


def actor_settings(settings: Settings, crew: Crew, method: str, seed: int) -> ActorSettings:
    """Return how a method is run with a crew."""
    return ActorSettings(
        actors=len(crew.pauses),
        queue=crew.queue,
        publish_every=crew.publish_every,
        steps=settings.num_steps,
        learning_rate=settings.learning_rate,
        seed=seed,
        spares=0,
        **methods(settings)[method].on_actors,
    )


def _compare(settings: Settings, crew: Crew, context: Context) -> list[Run]:
    """Run all methods on Ray with this crew, then their twins. Sweeps nothing."""
    # Ray comes with an extra of its own; the list of studies must not need it.
    from kondo.actors.cluster import connected
    from kondo_lab.studies.asynchrony import traces

    plain = setup(settings)
    slow = slowed(plain, crew.pauses)

    def on_ray(method: str, seed: int) -> "Trace":
        return traces.on_ray(slow, actor_settings(settings, crew, method, seed), context.stopped)

    def replayed(method: str, seed: int) -> "Trace":
        chosen = actor_settings(settings, crew, method, seed)
        turns = [step.turns for step in found[method, seed].steps]
        other = seed + OTHER_SAMPLES
        return traces.replay(plain, chosen, turns, samples_of=other, stopped=context.stopped)

    with connected():
        found = _all(settings, context, on_ray, (0.0, _RAY_DONE))
    twins = _all(settings, context, replayed, (_RAY_DONE, _REPLAY_DONE))
    counts = Counter(
        age
        for trace in found.values()
        for number, step in enumerate(trace.steps, start=1)
        for age in step.ages(number)
    )
    total, steps = counts.total(), settings.num_steps
    mean = sum(age * count for age, count in counts.items()) / total
    task = DigitsBandit(batch=settings.batch, seed=0)
    log = Log(crew.name, task="digits bandit", learning_rate=settings.learning_rate)
    seen = steps * settings.batch
    for age, count in sorted(counts.items()):
        log.add(AGE, 0, {AGES: count / total}, x=age, step=steps, rollouts=seen)
    _log_traces(log, settings, ON_RAY, found, task)
    _log_traces(log, settings, REPLAYED, twins, task)
    simulated = _simulated(settings, crew.name, mean, context, num_images=len(task.labels))
    return [*log.runs(), *simulated]


Traces = dict[tuple[str, int], "Trace"]
"""By method and seed."""


def _all(
    settings: Settings,
    context: Context,
    one: "Callable[[str, int], Trace]",
    progress: tuple[float, float],
) -> Traces:
    """Run all methods and seeds, one after the other; `progress` before and after them.

    A part takes minutes: one that was stopped starts again from its beginning.
    """
    start, end = progress
    found: Traces = {}
    each = [(name, seed) for seed in range(settings.num_seeds) for name in methods(settings)]
    for done, (method, seed) in enumerate(each):
        if context.stopped():
            break
        context.progress(start + (end - start) * done / len(each), f"{method}, seed {seed}")
        found[method, seed] = one(method, seed)
    if context.stopped():
        raise Stopped
    return found


def windows(settings: Settings) -> list[int]:
    """Return the last step of each window of online error."""
    return [settings.num_steps * n // settings.windows for n in range(1, settings.windows + 1)]


def _log_traces(log: Log, settings: Settings, how: str, traces: Traces, task: DigitsBandit) -> None:
    for (method, seed), trace in traces.items():
        backward, begin = 0, 0
        for end in windows(settings):
            some = trace.steps[begin:end]
            backward += sum(step.trained for step in some)
            begin = end
            values = {ONLINE: sum(step.error for step in some) / len(some)}
            if end == settings.num_steps:
                values |= errors(trace.policy, task)
            seen = end * settings.batch
            log.add(named(method, how), seed, values, step=end, rollouts=seen, passes=backward)


@torch.no_grad()
def errors(policy: MLP, task: DigitsBandit) -> dict[str, float]:
    """Return the learner's own error, 1 - pi(label) over the training images, and test error."""
    probs = policy(task.images).softmax(dim=-1).double()
    of_label = probs.gather(1, task.labels.unsqueeze(1))
    return {LEARNER_ERROR: 1 - float(of_label.mean()), TEST: task.held_out_error(policy)}


def _simulated(
    settings: Settings, part: str, mean: float, context: Context, *, num_images: int
) -> list[Run]:
    """Train populations with the laboratory's own delays, of this mean age."""
    delays = {
        FIXED: Frictions(delay=round(mean)),
        UNIFORM: Frictions(delay=round(2 * mean), uniform_delay=True),
    }
    members = [
        Member(
            series=named(name, how),
            seed=seed,
            learning_rate=settings.learning_rate,
            setting=math.nan,
            arm=method.arm,
            frictions=delay,
        )
        for how, delay in delays.items()
        for name, method in methods(settings).items()
        for seed in range(settings.num_seeds)
    ]
    with tempfile.TemporaryDirectory(prefix="kondo-asynchrony-") as home:
        # The last seconds of a part are too short to be stopped and resumed.
        last = dataclasses.replace(
            context,
            progress=lambda share, note: context.progress(
                _REPLAY_DONE + (1 - _REPLAY_DONE) * share, note
            ),
            stopped=lambda: False,
            checkpoint=Path(home) / "checkpoint",
        )
        populations = image_bandits.populations(
            last, members, data="digits", width=settings.width, batch=settings.batch
        )
        found = train(
            populations,
            last,
            part=part,
            num_steps=settings.num_steps,
            log_steps=windows(settings),
            evaluate_steps=[settings.num_steps],
            probe=partial(learner_error.image_error, num_images=num_images),
        )
    return keeping(found, lambda row, metric: metric in (ONLINE, TEST, LEARNER_ERROR))
