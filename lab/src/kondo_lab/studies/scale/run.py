"""One part per task: its costs, real runs beside their simulation, and simulated systems.

The three belong together: what is simulated is the task whose costs were measured just before.
"""

import dataclasses
import statistics
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kondo.actors.setup import Settings as RaySettings
from kondo.actors.setup import Setup
from kondo_lab.studies.scale import simulation
from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.settings import EVERY_ROW, NEVER, SOURCE, Settings
from kondo_lab.studies.scale.simulation import Network, Outcome, System
from kondo_lab.training.actors import digits, reversal
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run
from kondo_lab.training.worker_pool import one_thread, usable_cores

MODES = (SOURCE, EVERY_ROW)
TIMED, FITTED = "timed", "fitted"
MEASURED, SIMULATED = "measured", "simulated"
SINGLE, ROUND = "a step per rollout", "a step per round"
DESIGNS = (SINGLE, ROUND)
"""As the library does by default; and a step on one rollout of each actor, whose messages travel as
soon as they are made."""

# Metrics.
PACE, IDLE, STALENESS = "rollouts per second", "learner idle share", "staleness"
STALENESS_P95 = "staleness, 95th percentile"
PROCESSOR = "processor seconds of a rollout"
OTHERS = "cores used by others"
BYTES, KEPT = "bytes of a message", "rows kept of a message"
INWARD, OUTWARD = "network in, bytes per second", "network out, bytes per second"
ACTORS_BUSY, DRIVER_BUSY = "actors busy share", "driver busy share"
WAITING = "messages waiting"
CORES = "cores of this machine"

# Nothing is learned: Adam takes as long at any rate, and the policy stays as it was drawn.
LEARNING_RATE = 1e-6
# Eight processes that import torch at once on two busy cores take minutes.
START_TIMEOUT = 900.0
MIN_STEPS = 8
CHECK_ROLLOUTS, CHECK_WARM_UP = 2000, 200
# Shares of a part's time, about.
_COSTS_SHARE, _CHECK_SHARE = 0.15, 0.6


class Case(NamedTuple):
    """One simulated line of a figure."""

    design: str
    network: Network
    speed: float
    mode: str
    rate: float

    @property
    def name(self) -> str:
        """As records have it."""
        learner = f"learner {self.speed:g}x, {self.mode} {100 * self.rate:g}%"
        return f"{self.design}, {self.network.name}, {learner}"

    def system(self, settings: Settings, samples: int, actors: int) -> System:
        """Return the system with that many actors."""
        kept = self.rate * samples
        by_round = self.design == ROUND
        return System(
            actors=actors,
            sent=kept if self.mode == SOURCE else samples,
            kept=kept,
            network=self.network,
            learner_speed=self.speed,
            per_step=actors if by_round else 1,
            prefetch=by_round,
            actors_per_machine=settings.actors_per_machine,
        )


def cases(settings: Settings) -> list[Case]:
    """Return every line that is simulated."""
    return [
        Case(design, network, speed, mode, rate)
        for design in DESIGNS
        for network in settings.networks
        for speed in settings.speeds
        for mode in MODES
        for rate in settings.rates
    ]


def parts(settings: Settings) -> list[Part]:
    """Return one part per task."""
    return [Part(name=task, run=partial(_task, settings, task)) for task in settings.tasks]


def _task(settings: Settings, task: str, context: Context) -> list[Run]:
    # Ray is needed to measure; to read results it is not.
    from kondo.actors.cluster import connected

    log = Log(task, task=task, learning_rate=LEARNING_RATE)
    with one_thread(), connected():
        costs = _costs(settings, task, context, log)
        _check(settings, task, costs, context, log)
    _simulate(settings, costs, context, log)
    return log.runs()


def _costs(settings: Settings, task: str, context: Context, log: Log) -> Costs:
    """Time everything; seeds are rounds."""
    from kondo_lab.studies.scale import measure

    setup, chosen = _setup(task), _ray_settings(settings, checkpoint_every=NEVER)

    def said(number: int) -> None:
        _report(context, _COSTS_SHARE * (number + 1) / settings.rounds, "costs")

    _report(context, 0.0, "costs")
    samples, weights_bytes = measure.on_ray(setup, chosen, settings.rounds, said)
    samples |= measure.here(setup, chosen, settings.rounds)
    samples |= measure.waiting(settings.rounds)
    seconds = {"seconds": settings.real_seconds, "warm_up": settings.warm_up_seconds}
    samples |= measure.driving(setup, chosen, rounds=settings.seeds, **seconds)
    costs = measure.fitted(samples, setup, weights_bytes)
    for metric, values in samples.items():
        for number, value in enumerate(values):
            log.add(TIMED, number, {metric: value})
    log.add(FITTED, 0, dataclasses.asdict(costs) | {CORES: usable_cores()})
    return costs


def _ray_settings(settings: Settings, **options: Any) -> RaySettings:
    return RaySettings(
        gate=f"delight:{settings.rate}",
        learning_rate=LEARNING_RATE,
        spares=0,
        start_timeout=START_TIMEOUT,
        **options,
    )


def _check(settings: Settings, task: str, costs: Costs, context: Context, log: Log) -> None:
    """Run for real, and simulate the same on as many cores; setting: actors."""
    from kondo_lab.studies.scale import real_runs

    kinds = [(s, a, m) for s in range(settings.seeds) for a in settings.real_actors for m in MODES]
    for done, (seed, actors, mode) in enumerate(kinds):
        share = _COSTS_SHARE + _CHECK_SHARE * done / len(kinds)
        _report(context, share, f"{actors} actors, {mode}")
        chosen = _ray_settings(
            settings, actors=actors, steps=NEVER, at_source=mode == SOURCE, seed=seed
        )
        seconds = {"seconds": settings.real_seconds, "warm_up": settings.warm_up_seconds}
        seen = real_runs.observe(_setup(task), chosen, interrupted=context.stopped, **seconds)
        if seen is None:
            raise Stopped
        kept, others = seen.metrics[KEPT], seen.metrics[OTHERS]
        sent = kept if mode == SOURCE else costs.samples
        system = System(
            actors=actors,
            sent=sent,
            kept=kept,
            cores=usable_cores() - others,
            queue=chosen.queue,
            checkpoint_every=chosen.checkpoint_every,
        )
        found = simulation.simulate(
            costs, system, rollouts=CHECK_ROLLOUTS, warm_up=CHECK_WARM_UP, seed=seed
        )
        metrics = outcome_metrics(found)
        twin = {metric: metrics[metric] for metric in (PACE, IDLE, STALENESS)}
        twin[BYTES] = costs.message_bytes(sent)
        for who, values in ((MEASURED, seen.metrics), (SIMULATED, twin)):
            log.add(f"{who}, {mode}", seed, values, x=actors, step=seen.steps)


def _simulate(settings: Settings, costs: Costs, context: Context, log: Log) -> None:
    """Many actors, each on a core of its own; setting: actors."""
    chosen = cases(settings)
    for done, case in enumerate(chosen):
        before = _COSTS_SHARE + _CHECK_SHARE
        _report(context, before + (1 - before) * done / len(chosen), case.name)
        for actors in settings.actors:
            system = case.system(settings, costs.samples, actors)
            found = simulation.simulate(
                costs,
                system,
                # Of steps as large as a round, a few: one more or less must not show.
                rollouts=max(settings.rollouts, system.orders, MIN_STEPS * system.per_step),
                warm_up=system.orders,
                seed=0,
            )
            log.add(case.name, 0, outcome_metrics(found), x=actors, step=found.steps)


def outcome_metrics(found: Outcome) -> dict[str, float]:
    """Return what is recorded of a simulated system."""
    return {
        PACE: found.pace,
        IDLE: found.idle,
        STALENESS: statistics.mean(found.staleness),
        STALENESS_P95: float(np.quantile(found.staleness, 0.95)),
        INWARD: found.inward,
        OUTWARD: found.outward,
        ACTORS_BUSY: found.actors_busy,
        DRIVER_BUSY: found.driver_busy,
        WAITING: found.waiting,
    }


def _setup(task: str) -> Setup:
    return digits() if task == "digits" else reversal()


def _report(context: Context, share: float, note: str) -> None:
    if context.stopped():
        raise Stopped  # nothing to save: what was timed before a stop is not what is timed after
    context.progress(share, note)
