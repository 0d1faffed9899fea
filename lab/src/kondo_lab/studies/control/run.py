"""One part per task. Its runs, one for each contender and seed, are spread over processes.

    runs still to do -> worker pool -> each run, kept in the part's checkpoint -> runs

A stopped part goes on with the runs that were not finished.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kondo
from kondo.run_files import atomically
from kondo_lab.studies.control import training as control
from kondo_lab.studies.control.settings import Settings, Task
from kondo_lab.studies.control.training import MakeGate, Progress
from kondo_lab.training import worker_pool
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run

RETURN = "return"
"""Mean over the last 100 episodes."""
ENTROPY = "entropy"
RATE = "share differentiated"
"""Since the start of the run."""
COSINE = "cosine with the dense gradient"
GRADIENT_ERROR = "squared error of the gradient"
"""Over the squared norm of the dense gradient."""
DENSE = "dense"


def contenders(settings: Settings) -> dict[str, MakeGate]:
    """Return what is compared, by name, dense first. Each run makes a gate of its own."""
    rate = settings.rate
    share = f"{100 * rate:g}%"

    def random(generator: Any) -> kondo.BaseGate:
        return kondo.Gate(rate=rate, signal=partial(kondo.signals.uniform, generator=generator))

    def by_delight(rate: float, _: Any) -> kondo.BaseGate:
        return kondo.Gate(rate=rate)

    def by_noise(noise: float, _: Any) -> kondo.BaseGate:
        return kondo.UnbiasedGate(noise=noise)

    return {
        DENSE: lambda _: None,
        f"random {share}": random,
        "price 0": lambda _: kondo.Gate(price=0.0),
        **{f"delight {100 * r:g}%": partial(by_delight, r) for r in settings.delight_rates},
        f"variance {share}": lambda _: kondo.VarianceGate(rate=rate),
        f"unbiased {share}": lambda _: kondo.UnbiasedGate(rate=rate),
        f"unbiased {share} by |delight|": lambda _: kondo.UnbiasedGate(
            rate=rate, signal=kondo.signals.abs_delight
        ),
        **{f"noise {noise:g}": partial(by_noise, noise) for noise in settings.noises},
    }


def promised(settings: Settings) -> list[str]:
    """Return the contenders that should end where dense does."""
    return [f"unbiased {100 * settings.rate:g}%", f"noise {settings.noises[0]:g}"]


def parts(settings: Settings) -> list[Part]:
    """Return one part per task."""
    return [
        Part(name=task.name, run=partial(_train_all, settings, task), work=task.seconds)
        for task in settings.tasks
    ]


def runs(settings: Settings) -> list[tuple[str, int]]:
    """Return every contender and seed. The contenders of a seed follow one another."""
    seed_list = range(settings.first_seed, settings.first_seed + settings.seeds)
    return [(name, seed) for seed in seed_list for name in contenders(settings)]


def _train_all(settings: Settings, task: Task, context: Context) -> list[Run]:
    """Train every contender with every seed on a task."""
    finished = context.resume(_read) or {}
    everything = runs(settings)
    todo = [number for number in range(len(everything)) if number not in finished]
    shares = dict.fromkeys(range(len(everything)), 0.0) | dict.fromkeys(finished, 1.0)

    def on_update(_: int, message: tuple[int, float, str, Run | None]) -> None:
        number, share, note, made = message
        shares[number] = share
        if made is not None:
            finished[number] = made
            _write(context.checkpoint, finished)
        context.progress(sum(shares.values()) / len(shares), note)

    if todo:
        worker_pool.spread(
            partial(train_some, settings=settings, task=task),
            todo,
            num_workers=min(len(todo), worker_pool.usable_cores()),
            stopped=context.stopped,
            on_update=on_update,
        )
    made = [finished[number] for number in sorted(finished)]
    if len(finished) < len(everything):
        raise Stopped(task.name, made)
    return made


def train_some(
    numbers: Sequence[int],
    *,
    send: Callable[[Any], None],
    stopped: Callable[[], bool],
    settings: Settings,
    task: Task,
) -> None:
    """Make these of the `runs`, one after the other; the job of a worker.

    Sends (number of a run, share of it that is done, a note, the run once it is done).
    """
    for number in numbers:
        name, seed = runs(settings)[number]
        log = Log(task.name, task=task.name, learning_rate=task.training.learning_rate)
        logged, iterations = log_points(settings, task), task.training.iterations
        run = control.Run(task.training, contenders(settings)[name], seed)
        for progress in run.train(compared=logged):
            if stopped():
                return
            if progress.iteration in logged:
                add(log, name, seed, progress)
                note = f"{name}, seed {seed}, return {progress.mean_return:.0f}"
                last = progress.iteration == iterations
                made = log.runs()[0] if last else None
                send((number, progress.iteration / iterations, note, made))


def log_points(settings: Settings, task: Task) -> set[int]:
    """Return the iterations that are logged, evenly spaced; the last one is among them."""
    total, points = task.training.iterations, min(settings.points, task.training.iterations)
    return {total * point // points for point in range(1, points + 1)}


def add(log: Log, arm: str, seed: int, progress: Progress) -> None:
    """Log an iteration."""
    values = {
        RETURN: progress.mean_return,
        ENTROPY: progress.entropy,
        RATE: progress.differentiated / progress.passes,
        COSINE: progress.cosine,
        GRADIENT_ERROR: progress.gradient_error,
    }
    seen, paid = progress.samples, progress.differentiated
    log.add(arm, seed, values, step=progress.iteration, rollouts=seen, passes=paid)


def _read(checkpoint: Path) -> dict[int, Run]:
    """Return the runs that were finished before the part was stopped."""
    found = json.loads(checkpoint.read_text(encoding="utf-8"))
    return {int(number): Run(**fields) for number, fields in found.items()}


def _write(checkpoint: Path, finished: dict[int, Run]) -> None:
    fields = {number: dataclasses.asdict(run) for number, run in finished.items()}
    with atomically(checkpoint) as partial_file:
        partial_file.write_text(json.dumps(fields), encoding="utf-8")
