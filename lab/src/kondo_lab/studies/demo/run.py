"""One part per task. A part trains all methods of a seed in turns, and its seeds in processes.

settings -> runs of one seed, interleaved (`train_seeds`) -> worker pool -> runs
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kondo import Gate, losses
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.studies.demo.settings import DigitsSettings, ReversalSettings, Settings
from kondo_lab.studies.demo.training import (
    StepRecord,
    TrainingRun,
    interleave,
    mean_error,
    warm_up,
    window,
)
from kondo_lab.tasks import digits, reversal, seeds
from kondo_lab.tasks.rollout import Task
from kondo_lab.training import worker_pool
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run

ONLINE, TEST = "online error", "test error"
STAGES = ("sampling", "gate", "forward", "backward", "optimiser")
NUM_POINTS = 100
"""Of a run's curve."""


def compared(settings: Settings) -> list[Arm]:
    """Return the demo's arms, the baseline first."""
    gated = Arm(name=f"DG-K ({percent(settings.rate)})", gate=Gate(rate=settings.rate))
    return [Arm(name="PG"), Arm(name="DG", loss=losses.dg), gated]


def make_run(settings: Settings, task: str, arm: Arm, seed: int) -> TrainingRun:
    """Return a fresh run on a task."""
    chosen: DigitsSettings | ReversalSettings
    policy: MLP | Decoder
    source: Task
    weights = seeds.generator(seed, f"{task} weights")
    if task == "digits":
        chosen = settings.digits
        sizes = (digits.NUM_PIXELS, digits.NUM_DIGITS)
        policy = MLP(*sizes, width=chosen.width, generator=weights)
        source = digits.DigitsBandit(batch=chosen.batch, seed=seed)
    else:
        chosen = settings.reversal
        length, size = chosen.length, chosen.num_tokens
        policy = Decoder.fresh(prompt_length=length, num_tokens=size, generator=weights)
        source = reversal.Reversal(
            length=length,
            num_tokens=size,
            num_prompts=chosen.num_prompts,
            num_answers=chosen.num_answers,
            seed=seed,
        )
    return TrainingRun(
        source,
        policy,
        arm=arm,
        seed=seed,
        num_steps=chosen.num_steps,
        learning_rate=chosen.learning_rate,
    )


TASKS = {"digits": 1.0, "reversal": 6.0}
"""And their shares of the work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What is left of a run once it is over."""

    method: str
    seed: int
    steps: Sequence[StepRecord]
    finished: bool
    """Whether it made all its steps."""
    test_error: float | None


def parts(settings: Settings) -> list[Part]:
    """Return one part per task."""
    return [Part(name=n, run=partial(_train, settings, n), work=w) for n, w in TASKS.items()]


def _train(settings: Settings, task: str, context: Context) -> list[Run]:
    """Train every method on a task, a process per seed, and return the runs."""
    seed_list = range(settings.first_seed, settings.first_seed + settings.num_seeds)
    num_workers = min(len(seed_list), worker_pool.usable_cores())
    sent: dict[int, tuple[float, dict[str, float]]] = {}

    def on_update(worker: int, message: tuple[float, dict[str, float]]) -> None:
        sent[worker] = message
        errors = [found for _, found in sent.values()]
        note = ", ".join(
            f"{name} {sum(100 * found[name] for found in errors) / len(errors):.1f}%"
            for name in errors[0]
        )
        context.progress(sum(done for done, _ in sent.values()) / num_workers, f"error {note}")

    shares = worker_pool.spread(
        partial(train_seeds, settings=settings, task=task),
        seed_list,
        num_workers=num_workers,
        stopped=context.stopped,
        on_update=on_update,
    )
    results = [result for share in shares for result in share]
    chosen = settings.digits if task == "digits" else settings.reversal
    log = Log(task, task=task, learning_rate=chosen.learning_rate)
    for result in trim(results):
        add(log, result)
    if not all(result.finished for result in results):
        raise Stopped(task, log.runs())
    return log.runs()


def train_seeds(
    seed_list: Sequence[int],
    *,
    send: Callable[[Any], None],
    stopped: Callable[[], bool],
    settings: Settings,
    task: str,
) -> list[RunResult]:
    """Train every method for these seeds, side by side; the job of a worker."""
    makers = [
        partial(make_run, settings, task, arm, seed)
        for seed in seed_list
        for arm in compared(settings)
    ]
    warm_up(makers)
    runs = [make() for make in makers]
    for done in interleave(runs, rounds=settings.rounds, stopped=stopped):
        # Of the last seed here: the note only shows how training goes.
        errors = {run.arm.name: mean_error(run.records, window(run.num_steps)) for run in runs}
        send((done / settings.rounds, errors))
    return [
        RunResult(
            method=run.arm.name,
            seed=run.seed,
            steps=run.records,
            finished=len(run.records) == run.num_steps,
            test_error=run.held_out_error(),
        )
        for run in runs
    ]


def trim(runs: Sequence[RunResult]) -> list[RunResult]:
    """Cut the runs to the steps that all of them made: equal samples for each."""
    common = min(len(run.steps) for run in runs)
    return [dataclasses.replace(run, steps=run.steps[:common]) for run in runs if common]


def add(log: Log, run: RunResult) -> None:
    """Log evenly spaced points of one run, the last step included; totals since its start."""
    num_steps = len(run.steps)
    num_points = min(NUM_POINTS, num_steps)
    width = window(num_steps)
    for step in sorted({num_steps * (point + 1) // num_points for point in range(num_points)}):
        made = run.steps[:step]
        seen, paid = sum(one.samples for one in made), sum(one.backward_passes for one in made)
        values = {ONLINE: mean_error(made, width)}
        values |= {f"seconds {s}": math.fsum(getattr(one, s) for one in made) for s in STAGES}
        if step == num_steps and run.test_error is not None:
            values[TEST] = run.test_error
        log.add(run.method, run.seed, values, step=step, rollouts=seen, passes=paid)
