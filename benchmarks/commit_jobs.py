"""The processes behind compare_commits.py: they build a suite's steps, and time blocks of them.

    PYTHONPATH=CHECKOUT/src:CHECKOUT/lab/src python benchmarks/commit_jobs.py step

A process says what it has, as a line of JSON, and then answers lines `[name, steps]` with seconds.
Every checkout runs this file, so it uses public names that all of them have.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kondo
from bench_small_lm import Work
from harness import synchronise
from lm_workloads import QUICK, Shape, build_batch, build_model
from workloads import Batch, MlpShape, Workload, mlp

RANKS = 2
RATES = (0.03, 0.1)
COORDINATION = ("select", "coordinate", "wait")
LM_SHAPES = {
    "25m": Shape(layers=7, width=512, heads=8, key_heads=8, ff_width=1408, vocabulary=4096),
    "85m": Shape(layers=12, width=768, heads=12, key_heads=12, ff_width=2048, vocabulary=4096),
}
OVER_RANKS: dict[str, Callable[[Iterable[float]], float]] = {
    "step": max,
    "processor": sum,
    "coordination": min,
}
STEADY = {
    "PYTHONHASHSEED": "0",
    # Otherwise some processes that compile are beside each that is timed.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Memory that is freed is kept: whether the system takes it back is a matter of luck.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""What makes processes of the same code more alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A step to time."""

    name: str
    config: str
    model: nn.Module
    step: Callable[[], Any]
    """From gradients that are None to gradients in `.grad`."""


def gated_jobs(work: Workload, **common: Any) -> Iterator[Job]:
    """Yield a workload's dense step and gated ones."""
    with torch.no_grad():
        known = work.log_prob(work.batch)
    kinds: dict[str, dict[str, Any]] = {
        "dense": {},
        "exact 3%": {"gate": kondo.Gate(rate=0.03)},
        "free 3%": {"gate": kondo.Gate(rate=0.03), "screen": known},
        "unbiased 10%": {"gate": kondo.UnbiasedGate(rate=0.1), "screen": known},
    }
    for name, options in kinds.items():
        step = partial(kondo.backward, work.log_prob, work.batch, work.advantages, unit=work.unit)
        yield Job(
            name=f"{work.name} {name}",
            config=work.config,
            model=work.model,
            step=partial(step, **options, **common),
        )


def step_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield steps as bench_step's, of policies so small that the library's own time shows."""
    for work in small_mlps(device, quick):
        yield from gated_jobs(work)


def small_mlps(device: torch.device, quick: bool) -> Iterator[Workload]:
    """Yield a small policy on few and on many rows."""
    for rows in (64,) if quick else (64, 512, 4096):
        yield mlp(f"mlp-{rows}", MlpShape(rows=rows, inputs=64, width=128, actions=8), device)


def rank_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield steps of this rank, with rows of its own and the model in DDP."""
    for work in small_mlps(device, quick):
        wrapped = DistributedDataParallel(work.model)

        def log_prob(rows: Batch, wrapped: nn.Module = wrapped) -> Tensor:
            logits: Tensor = wrapped(rows[0])
            return logits.log_softmax(-1).gather(1, rows[1].unsqueeze(1)).squeeze(1)

        data = torch.Generator().manual_seed(100 + dist.get_rank())
        order = torch.randperm(work.rows, generator=data)
        own = dataclasses.replace(
            work, log_prob=log_prob, batch=tuple(part[order] for part in work.batch)
        )
        yield from gated_jobs(own, group="world", options=kondo.Options(module=wrapped))


def small_lm_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield bench_small_lm's steps; its plain one is a loop without kondo, the same in both."""
    tiny = quick or device.type == "cpu"
    for size, rows in [("toy", 64)] if tiny else [("25m", 256), ("25m", 1024), ("85m", 256)]:
        work = Work(size, rows, device)
        for name in ("plain", "dense", "variance", "delight", "unbiased"):
            step = getattr(work, name)
            yield Job(
                name=f"{size}-{rows} {name}", config=f"{rows} rows", model=work.module, step=step
            )


def lm_step_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield steps as bench_lm_step's, of smaller models whose layers are not compiled."""
    tiny = quick or device.type == "cpu"
    rows, tokens, graph_tokens = (16, 16, 0) if tiny else (64, 256, 8192)
    for size, shape in ({"tiny": QUICK} if tiny else LM_SHAPES).items():
        plain, lm = build_model(
            shape,
            device,
            max_tokens=32_768,
            compiled=False,
            positions=tokens,
            graph_tokens=graph_tokens,
        )
        batch, advantages = build_batch(shape, rows, tokens, device)
        with torch.no_grad():
            known = lm.log_prob(batch)
        kinds: dict[str, dict[str, Any]] = {"dense": {}}
        for rate in RATES:
            kinds[f"free {rate:.0%}"] = {"gate": kondo.Gate(rate=rate), "screen": known}
            kinds[f"exact {rate:.0%}"] = {"gate": kondo.Gate(rate=rate)}
        for name, options in kinds.items():
            yield Job(
                name=f"{size} {name}",
                config=f"{rows} x {tokens} tokens, CUDA graphs up to {graph_tokens} tokens",
                model=plain,
                step=partial(kondo.backward, lm, batch, advantages, **options),
            )


class Weights(nn.Module):
    """A population's weights in the place of gradients: what a step of it leaves behind."""

    def __init__(self, population: Any):
        super().__init__()
        self._population = population

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a population's step has its own."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield the weights, each as the gradient of something."""
        for value in self._population.parameters.values():
            yield SimpleNamespace(grad=value)


def lab_jobs(device: torch.device, quick: bool) -> Iterator[Job]:
    """Yield steps of the laboratory's populations, built by the checkout's own lab_jobs.py."""
    sys.path.insert(0, str(Path(kondo.__file__).parents[2] / "benchmarks"))
    import lab_jobs as own

    torch.set_float32_matmul_precision("high")  # as the studies have it on a GPU
    counts = (2,) if quick else (1, 8) if device.type == "cpu" else (16, 256)
    methods = [(t, m) for t in ("mnist", "reversal") for m in ("DG", "DG-K 3%")]
    for (task, method), count in itertools.product(methods, counts):
        sizes = own.QUICK if quick else own.Sizes(images=1000)
        options: dict[str, Any] = {"task": task, "method": method, "members": count}
        job = own.Job(**options, seed=0, sizes=sizes)
        population = own.build(job, device)
        for _ in range(own.WARM_UP_STEPS):
            population.step()
        yield Job(
            name=f"{task} {method} x{count}",
            config=f"{count} members",
            model=Weights(population),
            step=population.step,
        )


SUITES = {
    "step": step_jobs,
    "small_lm": small_lm_jobs,
    "lm_step": lm_step_jobs,
    "ranks": rank_jobs,
    "lab": lab_jobs,
}


def gradient_norm(job: Job) -> float:
    """Return the norm of the step's gradient, by which checkouts are seen to do the same."""
    torch.manual_seed(0)
    job.model.zero_grad(set_to_none=True)
    job.step()
    squares = [p.grad.double().square().sum() for p in job.model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def timed(job: Job, steps: int, device: torch.device) -> dict[str, float]:
    """Time a block; return seconds per step."""
    talked = 0.0
    if ranks := dist.is_initialized():
        dist.barrier()
    synchronise(device)
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        job.model.zero_grad(set_to_none=True)
        report = job.step()
        if ranks:
            talked += sum(report.seconds.get(stage, 0.0) for stage in COORDINATION)
    synchronise(device)
    found = {"step": (time.perf_counter() - start) / steps}
    if device.type == "cpu":
        found["processor"] = (time.process_time() - busy) / steps
    return found | ({"coordination": talked / steps} if ranks else {})


class Worker:
    """A checkout at work, in a process of its own or in one per rank."""

    def __init__(self, checkout: Path, words: Sequence[str], files: Path):
        """Start this file with these words; its own files have names that begin with `files`."""
        self._checkout = checkout
        paths = [str(checkout / "src"), str(checkout / "lab" / "src")]
        env = os.environ | STEADY | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, *words]
        ranks = range(RANKS if words[0] == "ranks" else 1)
        if len(ranks) > 1:
            command += ["--meeting", f"{files}.meeting"]
        self._errors = [Path(f"{files}.{rank}.txt") for rank in ranks]
        self._processes = []
        for rank, path in enumerate(self._errors):
            with path.open("w") as errors:
                process = subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=env,
                )
            self._processes.append(process)

    def hello(self) -> dict[str, dict[str, Any]]:
        """Wait until everything is built; return each job's config and gradient norm."""
        found: dict[str, dict[str, Any]]
        library, found = self._answers()[0]
        if not Path(library).is_relative_to(self._checkout):
            raise SystemExit(f"{self._checkout} was to be timed, but kondo came from {library}.")
        return found

    def block(self, name: str, steps: int) -> dict[str, float]:
        """Have a block run; return seconds per step, by what was timed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, steps]) + "\n")
            process.stdin.flush()
        answers: list[dict[str, float]] = self._answers()
        return {what: OVER_RANKS[what](each[what] for each in answers) for what in answers[0]}

    def _answers(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if all(lines):
            return [json.loads(line) for line in lines]
        self.stop()
        told = "\n".join(path.read_text() for path in self._errors)
        raise SystemExit(f"The worker of {self._checkout} ended:\n{told}")

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


def main() -> None:
    """Answer whoever started this."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--rank", type=int, default=0, help=f"of ranks, 0 to {RANKS - 1}")
    parser.add_argument("--meeting", help="of ranks: a file that is not there yet")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if options.meeting is not None:
        if len(cores := sorted(os.sched_getaffinity(0))) >= RANKS:
            os.sched_setaffinity(0, {cores[options.rank]})  # as in bench_ranks
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.meeting}",
            rank=options.rank,
            world_size=RANKS,
            timeout=timedelta(minutes=2),
        )
    jobs = {job.name: job for job in SUITES[options.suite](device, options.quick)}
    hello = {
        name: {"config": job.config, "gradient": gradient_norm(job)} for name, job in jobs.items()
    }
    print(json.dumps([kondo.__file__, hello]), file=answers, flush=True)
    for line in sys.stdin:
        name, steps = json.loads(line)
        print(json.dumps(timed(jobs[name], steps, device)), file=answers, flush=True)


if __name__ == "__main__":
    main()
