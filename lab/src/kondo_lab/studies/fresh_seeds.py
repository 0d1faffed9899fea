"""More runs of three studies, with seeds from 100 on, which none of them reports.

    python -m kondo_lab.studies.fresh_seeds OUT staleness:100:125 own:100:110 --minutes 9 --commit C

trains jobs (name:first:end of the seeds) in this order, and adds a JSON line per run to
OUT/<job>.jsonl.gz: study, part, arm, k, learning rate, seed, task, device, commit, and a curve of
(step, rollouts, passes, metrics by name). No job is begun that would end after the minutes.
`fresh-seeds-rules.csv` in a folder of results/ was written before the runs and says how they
are judged, by `judge_fresh_seeds`.
"""

import argparse
import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kondo_lab.evidence import records
from kondo_lab.studies import reversals
from kondo_lab.studies.mnist_stale.run import methods as stale_methods
from kondo_lab.studies.mnist_stale.settings import Settings as Stale
from kondo_lab.studies.reversal_frictions import run as frictions
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.tasks.draws import HAS_TRITON
from kondo_lab.training import arms, image_bandits, learner_error, run
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Frictions, Member, each_seed
from kondo_lab.training.part import Context
from kondo_lab.training.population import Population
from kondo_lab.training.record import Run, keeping

REVERSAL = Settings()
STALE = Stale()
RATE = REVERSAL.learning_rate
LENGTHS, VOCABULARIES, DELAYS = (18, 24, 30), (2, 4, 8), (30, 100, 300, 1000)
DG_K = {arms.dg_k(0.03): arms.kondo(0.03)}
PACE = 38_000
"""Steps of a member, times H / 10, that an H200 makes in a second."""


class Shape(NamedTuple):
    """Members that share a length H and a vocabulary M."""

    members: list[Member]
    length: int = 10
    num_tokens: int = 2


class Job(NamedTuple):
    """What is trained side by side."""

    study: str
    x: str
    """What a member's setting is."""
    shapes: Sequence[Shape]
    num_steps: int
    log_steps: Sequence[int]
    """Where the learner's error is measured too, if it is."""
    evaluated: bool = True

    @property
    def seconds(self) -> float:
        """Expected on an H200."""
        tens = sum(len(each.members) * each.length / 10 for each in self.shapes)
        return tens * self.num_steps / PACE


def _members(compared: dict[str, Arm], seeds: range, **options: Any) -> list[Member]:
    return each_seed(compared, seeds, learning_rate=options.pop("learning_rate", RATE), **options)


def _friction(name: str, arms: Sequence[str], steps: int, seeds: range) -> Job:
    """One friction at every strength of the study, an arm after the other."""
    cells = [cell for cell in frictions.cells(REVERSAL) if cell.friction == name]
    known = frictions.methods(REVERSAL)
    shapes = []
    for arm in arms:
        several = [
            _members({arm: known[arm]}, seeds, setting=cell.strength, frictions=cell.met)
            for cell in cells
        ]
        shapes.append(Shape([member for some in several for member in some]))
    every = steps // REVERSAL.looks
    return Job("reversal-frictions", "strength", shapes, steps, range(every, steps + 1, every))


def _own(steps: int, seeds: range) -> Job:
    """All frictions, where replaced rows report the acting policy's own probabilities."""
    met = dataclasses.replace(REVERSAL.together, replaced=None)
    compared = frictions.corrected(REVERSAL) | {"DG": arms.DG}
    lengths = sorted({*REVERSAL.lengths, *REVERSAL.long_lengths}, reverse=True)
    shapes = [Shape(_members(compared, seeds, setting=h, frictions=met), h) for h in lengths]
    looks = run.log_and_regular(steps, log_points=40, regular_points=40)
    return Job("reversal-frictions", "H", shapes, steps, looks)


def _lengths(arms: Sequence[dict[str, Arm]], steps: int, seeds: range) -> Job:
    """Longer sequences; rules that keep a changing number of rows come last."""
    shapes = [Shape(_members(arm, seeds, setting=h), h) for arm in arms for h in LENGTHS[::-1]]
    every = max(1, min(steps, 10_000) // 100)
    looks = [*range(every, 100 * every, every), *range(100 * every, steps + 1, 5 * every)]
    return Job("reversal-kondo", "H", shapes, steps, looks, evaluated=False)


def _vocabularies(steps: int, seeds: range) -> Job:
    compared: list[dict[str, Arm]] = [{"PG": arms.PG, "DG": arms.DG}, DG_K]
    shapes = [
        Shape(_members(own, seeds, setting=m), num_tokens=m)
        for own in compared
        for m in VOCABULARIES
    ]
    every = max(1, steps // 100)
    looks = range(every, steps + 1, every)
    return Job("reversal-kondo", "M", shapes, steps, looks, evaluated=False)


def _stale(steps: int, seeds: range) -> Job:
    """The author's defaults: any of the last parameters, importance weights capped at 10."""
    known = stale_methods(STALE)
    arms = {n: known[n] for n in ("IS-PG", learner_error.capped(STALE.cap), "PPO", "DG")}
    members = []
    for delay in DELAYS:
        met = Frictions(delay=delay, uniform_delay=True)
        options = {"learning_rate": STALE.learning_rate, "setting": delay, "frictions": met}
        members += _members(arms, seeds, **options)
    every = steps // 20
    return Job("mnist-stale", "delay", [Shape(members, 3)], steps, range(every, steps + 1, every))


def job(name: str, seeds: range, share: float = 1.0) -> Job:
    """Return a job by its name; with a share of its steps, to try it."""
    dense = [arm for arm in frictions.methods(REVERSAL) if not arm.startswith("DG-K")]
    # Without stale or replaced rows PG, PG by token ratio, PPO and IS-PG are one update.
    distinct = [arm for arm in dense if arm not in (frictions.BY_TOKEN, "IS-PG cap 10")]
    jobs: dict[str, tuple[Callable[[int, range], Job], int]] = {
        "staleness": (partial(_friction, "staleness", dense), 10_000),
        "corruption": (partial(_friction, "corruption", distinct), 10_000),
        "own": (_own, 10_000),
        "lengths": (partial(_lengths, [{"DG": arms.DG}, DG_K]), 10_000),
        "lengths-pg": (partial(_lengths, [{"PG": arms.PG}]), 30_000),
        "vocabularies": (_vocabularies, 5_000),
        "stale": (_stale, 10_000),
    }
    make, steps = jobs[name]
    return make(round(steps * share), seeds)


def _populations(asked: Job, context: Context) -> list[Population]:
    if asked.study == "mnist-stale":
        ((members, _, _),) = asked.shapes
        shape = {name: getattr(STALE, name) for name in ("width", "batch", "initialisation")}
        return image_bandits.populations(context, members, data="mnist", **shape)
    return [
        reversals.population(context, members, length=length, num_tokens=num_tokens)
        for members, length, num_tokens in asked.shapes
    ]


def runs(asked: Job, part: str, context: Context, commit: str) -> list[Run]:
    """Train a job and return the runs."""
    images = asked.study == "mnist-stale"
    probe = partial(learner_error.sequence_error, num_prompts=REVERSAL.test_prompts)
    if images:
        probe = partial(learner_error.image_error, num_images=STALE.train_images)
    with run.matmul_precision("highest" if images else REVERSAL.precision):
        found = run.train(
            _populations(asked, context),
            context,
            part=part,
            num_steps=asked.num_steps,
            log_steps=asked.log_steps,
            evaluate_steps=asked.log_steps if asked.evaluated else (),
            probe=probe if asked.evaluated else None,
        )
    gpu = context.device.type == "cuda"
    about = {
        "study": asked.study,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "triton": _triton() if gpu else "",
        "commit": commit,
        "x_name": asked.x,
    }
    # That a run diverged is kept where it did.
    kept = keeping(found, lambda row, metric: metric != learner_error.DIVERGED or bool(row[metric]))
    return [dataclasses.replace(run, about=about) for run in kept]


def _triton() -> str:
    import triton

    return str(triton.__version__) if HAS_TRITON else ""


class TimeUpError(Exception):
    """A job outlasts what it was given."""


def _watch(until: float, share: float, note: str) -> None:
    if time.monotonic() > until:
        raise TimeUpError(f"at {share:.0%}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("jobs", nargs="+", help="name:first:end of the seeds")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, to try a job")
    given = parser.parse_args()
    run.CHECKPOINT_SECONDS = math.inf  # old parameters of stale actors fill a disk
    start, slower = time.monotonic(), 1.0
    end = start + 60 * given.minutes
    for each in given.jobs:
        name, first, stop = each.split(":")
        asked = job(name, range(int(first), int(stop)), given.share)
        begun = time.monotonic()
        if begun + slower * asked.seconds > end:
            print(f"{begun - start:.0f} s: no time for {each}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            context = Context(
                device=torch.device(given.device),
                progress=partial(_watch, end),
                stopped=lambda: False,
                checkpoint=Path(folder) / "part.pt",
            )
            try:
                made = runs(asked, name, context, given.commit)
            except TimeUpError as error:
                print(f"{time.monotonic() - start:.0f} s: {each} stopped {error}", flush=True)
                break
        records.add(given.out / f"{name}.jsonl.gz", map(records.line, made))
        took = time.monotonic() - begun
        slower = max(0.5, took / asked.seconds)
        expected = f"{asked.seconds:.0f} expected"
        print(f"{each}: {len(made)} runs, {took:.0f} s, {expected}", flush=True)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
