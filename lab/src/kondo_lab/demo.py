"""`kondo demo`: PG, DG and DG-K on two tasks that need no download, compared in one run.

settings -> runs of one seed, interleaved (`train_seeds`) -> workers -> summary -> table, figure,
curves, report, manifest (`write`).
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kondo_lab import (
    figures,
    methods,
    progress,
    provenance,
    report,
    seeds,
    summary,
    table,
    worker_pool,
)
from kondo_lab.findings import findings
from kondo_lab.methods import Method
from kondo_lab.policies import MLP, Transformer
from kondo_lab.tasks import digits, reversal
from kondo_lab.train import TrainingRun, interleave, warm_up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DigitsSettings:
    """Digits as a bandit."""

    num_steps: int = 300
    """Updates."""
    batch: int = 1000
    """Images per update; the papers use 100."""
    width: int = 256
    """Of the two hidden layers; the papers use 100."""
    learning_rate: float = 1e-3
    """Of Adam, as in the papers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReversalSettings:
    """Token reversal, rewarded up to the first error."""

    num_steps: int = 600
    """Updates; the papers make 10,000."""
    length: int = 10
    """Tokens of a prompt, H."""
    num_tokens: int = 2
    """Vocabulary, M."""
    num_prompts: int = 10
    """Prompts per update."""
    num_answers: int = 10
    """Answers sampled for each prompt."""
    learning_rate: float = 2e-4
    """Of Adam; the papers use 1e-4 and more steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Everything that can change the demo's results, but the seed."""

    digits: DigitsSettings = dataclasses.field(default_factory=DigitsSettings)
    reversal: ReversalSettings = dataclasses.field(default_factory=ReversalSettings)
    rate: float = 0.03
    """Fraction of samples the gate keeps."""
    num_seeds: int = 2
    """Independent repetitions."""
    rounds: int = 100
    """Turns in which the methods' training is interleaved."""

    def __post_init__(self) -> None:
        fewest = min(self.digits.num_steps, self.reversal.num_steps)
        if not 1 <= self.rounds <= fewest:
            raise ValueError(
                f"rounds must lie between 1 and the fewest steps of a task, {fewest}, got "
                f"{self.rounds}; a round without a step has no error to show."
            )


QUICK = DemoSettings(
    digits=DigitsSettings(num_steps=4, batch=100, width=16),
    reversal=ReversalSettings(num_steps=4, length=3),
    num_seeds=1,
    rounds=2,
)
"""A few steps, to see that everything works; the numbers mean nothing."""


class Outcome(NamedTuple):
    """What the demo left behind."""

    rows: list[summary.Row]
    """Empty if it was interrupted before any step of a task was made by all methods."""
    interrupted: bool


def compared(settings: DemoSettings) -> list[Method]:
    """Return the demo's methods, the baseline first."""
    return [methods.PG, methods.DG, methods.dg_k(settings.rate)]


def digits_run(settings: DemoSettings, method: Method, seed: int) -> TrainingRun[MLP]:
    """Return a fresh run on the digits."""
    chosen = settings.digits
    policy = MLP(
        digits.NUM_PIXELS,
        digits.NUM_DIGITS,
        width=chosen.width,
        generator=seeds.generator(seed, "digits weights"),
    )
    return TrainingRun(
        digits.DigitsBandit(batch=chosen.batch, seed=seed),
        policy,
        method=method,
        seed=seed,
        num_steps=chosen.num_steps,
        learning_rate=chosen.learning_rate,
    )


def reversal_run(settings: DemoSettings, method: Method, seed: int) -> TrainingRun[Transformer]:
    """Return a fresh run on token reversal."""
    chosen = settings.reversal
    policy = Transformer(
        prompt_length=chosen.length,
        num_tokens=chosen.num_tokens,
        generator=seeds.generator(seed, "reversal weights"),
    )
    task = reversal.Reversal(
        length=chosen.length,
        num_tokens=chosen.num_tokens,
        num_prompts=chosen.num_prompts,
        num_answers=chosen.num_answers,
        seed=seed,
    )
    return TrainingRun(
        task,
        policy,
        method=method,
        seed=seed,
        num_steps=chosen.num_steps,
        learning_rate=chosen.learning_rate,
    )


RUNS: dict[str, Callable[[DemoSettings, Method, int], TrainingRun[Any]]] = {
    "digits": digits_run,
    "reversal": reversal_run,
}


def train_seeds(
    seed_list: Sequence[int],
    *,
    send: Callable[[Any], None],
    stopped: Callable[[], bool],
    settings: DemoSettings,
) -> list[summary.RunResult]:
    """Train every method on every task for these seeds, side by side; the workers' job."""
    makers = [
        (task, partial(make, settings, method, seed))
        for seed in seed_list
        for task, make in RUNS.items()
        for method in compared(settings)
    ]
    warm_up(make for _, make in makers)
    runs = [(task, make()) for task, make in makers]
    for done in interleave([run for _, run in runs], rounds=settings.rounds, stopped=stopped):
        send((done / settings.rounds, [_status(task, run) for task, run in runs]))
    return [
        summary.RunResult(
            task=task,
            method=run.method.name,
            dense=run.method.dense,
            seed=run.seed,
            records=run.records,
            test_error=run.held_out_error(),
        )
        for task, run in runs
    ]


def run_demo(
    settings: DemoSettings, *, seed: int, out: Path, command: str, console: Console
) -> Outcome:
    """Train, print the table, and write figure, report, curves and manifest into `out`."""
    started = time.monotonic()
    seed_list = list(range(seed, seed + settings.num_seeds))
    num_workers = min(len(seed_list), worker_pool.usable_cores())
    labels = [(task, method.name) for task in RUNS for method in compared(settings)]
    names = ", ".join(method.name for method in compared(settings))
    console.print(f"Training {names} on {' and '.join(RUNS)}.", highlight=False)
    console.print(f"Seeds: {seed_list}, processes: {num_workers}.", highlight=False)
    sent: dict[int, tuple[float, list[progress.Status]]] = {}
    with progress.show(console, labels) as update:

        def on_update(worker: int, message: tuple[float, list[progress.Status]]) -> None:
            sent[worker] = message
            share = sum(done for done, _ in sent.values()) / num_workers
            update(share, progress.merge([status for _, many in sent.values() for status in many]))

        job = partial(train_seeds, settings=settings)
        back = worker_pool.spread(job, seed_list, num_workers=num_workers, on_update=on_update)
    results = summary.trim([result for part in back.results for result in part])
    if not results:
        return Outcome([], back.interrupted)
    rows = summary.summarise(results)
    console.print("\n", table.build(rows), "\n", sep="")
    for sentence in findings(rows):
        console.print(sentence + "\n", highlight=False)
    facts = {
        "command": command,
        "seeds": seed_list,
        "interrupted": back.interrupted,
        "workers": num_workers,
        "settings": dataclasses.asdict(settings),
        "environment": provenance.environment(),
        "seconds": round(time.monotonic() - started, 1),
    }
    write(out, results, rows, facts)
    return Outcome(rows, back.interrupted)


def write(
    out: Path,
    results: Sequence[summary.RunResult],
    rows: Sequence[summary.Row],
    facts: dict[str, Any],
) -> None:
    """Write the figure, the report, the curves and the manifest."""
    grid = figures.panels(results, rows)
    figures.write_figure(out / provenance.FIGURE, grid)
    provenance.write_curves(out / provenance.CURVES, results)
    page = report.page(rows, [panel for line in grid for panel in line], facts)
    (out / provenance.REPORT).write_text(page, encoding="utf-8")
    provenance.write_manifest(
        out / provenance.MANIFEST, facts | {"rows": [dataclasses.asdict(row) for row in rows]}
    )


def _status(task: str, run: TrainingRun[Any]) -> progress.Status:
    recent = run.records[-summary.window(run.num_steps) :]
    return progress.Status(
        task=task,
        method=run.method.name,
        error=sum(record.error for record in recent) / len(recent),
        backward_passes=sum(record.backward_passes for record in run.records),
    )
