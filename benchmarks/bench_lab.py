"""Member-steps per second of the laboratory's populations, against one process per seed.

    python benchmarks/bench_lab.py [--device cuda] [--tasks reversal] [--quick --out FILE]

A member-step is one whole update of one seed: draw, act, pay, decide, differentiate, Adam. Before
anything is timed, a member's gradient is compared with plain PyTorch's; a wrong one ends the run.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, get_args

import torch

from bench_step import BUSY, DATA
from harness import BASELINE_TURNS, Row, environment, percentile, write_csv
from lab_jobs import ARMS, QUICK, Finding, Job, Order, Sizes, TaskName, serve
from plain_loop import MethodName

PLAIN, POPULATION = "plain-loop", "population"
CORES = 2
MAX_MEMBERS = {"cpu": 32, "cuda": 512}
TOLERANCE = 1e-4
"""Relative difference allowed between a member's gradient and the plain one."""
TURN_SECONDS = 0.3
"""A turn takes as many steps as fill it: the parent's messages then cost nothing."""
TARGET_TASK, TARGET = "reversal", 5.0


Shape = tuple[int, int]
"""Processes, and threads of each."""
SHAPES: dict[str, list[Shape]] = {"cpu": [(CORES, 1), (1, CORES)], "cuda": [(1, 1)]}
QUICK_SHAPES: list[Shape] = [(CORES, 1), (1, 1)]
"""Steps this small only wait for each other's threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """Some processes that train side by side, each with its own members."""

    name: str
    jobs: tuple[Job, ...]
    """One per process."""
    threads: int
    """Of each process."""

    @property
    def shape(self) -> Shape:
        """Contenders of the same shape share their processes."""
        return len(self.jobs), self.threads

    @property
    def members(self) -> int:
        """Seeds trained at once: the plain loop trains one in each process."""
        return sum(max(1, job.members) for job in self.jobs)


def contenders_for(
    task: TaskName, method: MethodName, sizes: Sizes, *, shapes: Sequence[Shape], max_members: int
) -> list[Contender]:
    """Return the plain loop first, then populations that double in size.

    The plain loop runs in the first shape; a population in every shape that its members can be
    shared out to.
    """

    def contender(name: str, members: int, processes: int, threads: int) -> Contender:
        jobs = tuple(
            Job(
                task=task,
                method=method,
                members=members,
                seed=number * max(1, members),
                sizes=sizes,
            )
            for number in range(processes)
        )
        return Contender(name=f"{name}/{processes}x{threads}", jobs=jobs, threads=threads)

    found = [contender(PLAIN, 0, *shapes[0])]
    for members in (2**power for power in range(int(math.log2(max_members)) + 1)):
        for processes, threads in shapes:
            if members % processes == 0:
                name = f"{POPULATION}-{members}"
                found.append(contender(name, members // processes, processes, threads))
    return found


class Crew:
    """Processes with the same number of threads, idle until asked. Use it in a `with`."""

    def __init__(self, processes: int, threads: int, device: torch.device):
        # A fork would inherit this process's threads and CUDA context in an unusable state.
        spawn = multiprocessing.get_context("spawn")
        self._members: list[tuple[BaseProcess, Connection]] = []
        for _ in range(processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, threads, str(device)), daemon=True)
            process.start()
            theirs.close()  # else the end of the process would not end our waiting for it
            self._members.append((process, ours))

    def ask(self, orders: Sequence[Order]) -> list[Any]:
        """Give each process its order, all at once, and return the answers when all are there."""
        for (_, pipe), order in zip(self._members, orders, strict=True):
            pipe.send(order)
        return [pipe.recv() for _, pipe in self._members]

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._members:
            if process.is_alive():
                pipe.send(None)
            process.join()


def inspect_all(contenders: Sequence[Contender], crews: dict[Shape, Crew]) -> list[list[Finding]]:
    """Build and warm up everything; end the run if a population's gradient is wrong."""
    found = []
    for contender in contenders:
        orders = [Order(job, 0) for job in contender.jobs]
        found.append(crews[contender.shape].ask(orders))
        check_gradient(contender, found[-1])
    return found


def check_gradient(contender: Contender, findings: Sequence[Finding]) -> None:
    """End the run if a gradient is not the plain one: a fast wrong step is worthless."""
    worst = max(finding.gradient_error for finding in findings)
    if not worst <= TOLERANCE:
        raise SystemExit(
            f"{contender.jobs[0].task}: the gradient of {contender.name}, "
            f"{contender.jobs[0].method}, differs from plain PyTorch's by {worst:.2e} (allowed: "
            f"{TOLERANCE:.0e}); nothing was timed."
        )


def run_rounds(
    contenders: Sequence[Contender],
    findings: Sequence[Sequence[Finding]],
    crews: dict[Shape, Crew],
    *,
    repeats: int,
    turn_seconds: float,
) -> list[list[list[float]]]:
    """Return seconds per member-step: for each contender and round, those of its turns.

    Every round runs everything, in an order drawn anew, so that a slow minute hits all alike. The
    plain loop, which every ratio rests on, has several turns.
    """
    steps = [
        max(1, math.ceil(turn_seconds / max(finding.step_seconds for finding in found)))
        for found in findings
    ]
    turns = [0] * BASELINE_TURNS + list(range(1, len(contenders)))
    shuffle = random.Random(0).shuffle
    samples: list[list[list[float]]] = [[] for _ in contenders]
    for _ in range(repeats):
        shuffle(turns)
        for taken in samples:
            taken.append([])
        for index in turns:
            contender = contenders[index]
            orders = [Order(job, steps[index]) for job in contender.jobs]
            start = time.perf_counter()
            crews[contender.shape].ask(orders)
            spent = time.perf_counter() - start
            samples[index][-1].append(spent / (steps[index] * contender.members))
    return samples


def summarise(
    contenders: Sequence[Contender],
    findings: Sequence[Sequence[Finding]],
    samples: Sequence[Sequence[Sequence[float]]],
    where: dict[str, Any],
) -> list[Row]:
    """Turn samples into CSV rows; the first contender is what the others are compared with."""
    plain = [percentile(seconds, 0.5) for seconds in samples[0]]
    lines = []
    for contender, found, taken in zip(contenders, findings, samples, strict=True):
        job = contender.jobs[0]
        times = [1e3 * spent for seconds in taken for spent in seconds]
        speedups = [
            whole / spent for whole, seconds in zip(plain, taken, strict=True) for spent in seconds
        ]
        bandit = job.task == "mnist"
        rows = job.sizes.batch if bandit else job.sizes.num_prompts * job.sizes.num_answers
        lines.append(
            Row(
                benchmark="lab",
                model=job.task,
                config=describe(job, contender),
                contender=contender.name,
                rate=getattr(ARMS[job.method].gate, "rate", 1.0),
                unit="sample" if bandit else "sequence",
                rows=rows,
                tokens=rows if bandit else 2 * job.sizes.length * rows,
                rows_differentiated=max(finding.rows for finding in found),
                step_ms_p20=percentile(times, 0.2),
                step_ms_p50=percentile(times, 0.5),
                step_ms_p80=percentile(times, 0.8),
                speedup_p20=percentile(speedups, 0.2),
                speedup_p50=percentile(speedups, 0.5),
                speedup_p80=percentile(speedups, 0.8),
                limit=None,
                share_of_limit=None,
                gate_overhead=None,
                stages="",
                peak_memory_mb=sum(finding.peak_memory_mb for finding in found),
                repeats=len(taken),
                **where | {"threads": len(contender.jobs) * contender.threads},
            )
        )
    return lines


def describe(job: Job, contender: Contender) -> str:
    """Return what was trained, in words: the method comes first."""
    sizes = job.sizes
    if job.task == "mnist":
        net = f"{sizes.pixels}-{sizes.mlp_width}-{sizes.mlp_width}-10, batch {sizes.batch}"
    else:
        net = (
            f"H={sizes.length}, M={sizes.num_tokens}, {sizes.num_layers} layers, "
            f"{sizes.num_heads} heads, width {sizes.width}, "
            f"batch {sizes.num_prompts} x {sizes.num_answers}"
        )
    processes = f"{len(contender.jobs)} process{'es' if len(contender.jobs) > 1 else ''}"
    return f"{job.method}, {net}, float32, {processes}"


def print_table(lines: Sequence[Row]) -> None:
    """Print member-steps per second and ratios."""
    print(f"\n{lines[0].model}: {lines[0].config.rsplit(', ', 1)[0]}; {lines[0].repeats} rounds")
    print(f"{'contender':<22}{'member-steps/s':>16}{'speed-up p20/p50/p80':>24}{'peak MB':>10}")
    for line in lines:
        spread = f"{line.speedup_p20:.2f} / {line.speedup_p50:.2f} / {line.speedup_p80:.2f}"
        print(
            f"{line.contender:<22}{1e3 / line.step_ms_p50:>16.1f}{spread:>24}"
            f"{line.peak_memory_mb:>10.0f}",
            flush=True,
        )


def print_targets(lines: Sequence[Row]) -> None:
    """Print whether populations reach the target on token reversal, and with how many processes."""
    for method in get_args(MethodName):
        ours = [
            line
            for line in lines
            if line.model == TARGET_TASK
            and line.config.startswith(f"{method},")
            and line.contender.startswith(POPULATION)
        ]
        if not ours:
            continue
        best = max(ours, key=lambda line: line.speedup_p50)
        met = "met" if best.speedup_p50 >= TARGET else "MISSED"
        print(
            f"Target, {TARGET_TASK}, {method}: {best.speedup_p50:.2f}x the plain loop's "
            f"member-steps per second ({best.contender}, p50), wanted >= {TARGET:g}x: {met}"
        )


def bench(
    task: TaskName, options: argparse.Namespace, crews: dict[Shape, Crew], where: dict[str, Any]
) -> list[Row]:
    """Check, then time, both methods on one task."""
    lines: list[Row] = []
    for method in get_args(MethodName):
        contenders = contenders_for(
            task,
            method,
            QUICK if options.quick else Sizes(),
            shapes=list(crews),
            max_members=options.members,
        )
        findings = inspect_all(contenders, crews)
        samples = run_rounds(
            contenders,
            findings,
            crews,
            repeats=options.repeats,
            turn_seconds=0.0 if options.quick else TURN_SECONDS,
        )
        found = summarise(contenders, findings, samples, where)
        print_table(found)
        lines += found
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--tasks", nargs="+", choices=get_args(TaskName), default=get_args(TaskName)
    )
    parser.add_argument("--members", type=int, help="of the largest population, a power of two")
    parser.add_argument("--repeats", type=int, default=10, help="rounds")
    parser.add_argument("--out", type=Path, help="CSV; default: data/lab_<device>.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    options.members = options.members or (2 if options.quick else MAX_MEMBERS[options.device])
    if options.members < 1 or options.members & (options.members - 1):
        parser.error(f"--members must be a power of two, got {options.members}.")
    if options.quick:
        options.repeats = 1
    options.out = options.out or DATA / f"lab_{options.device}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, write the CSV, draw it."""
    options = parse(arguments)
    device = torch.device(options.device)
    where = environment(device, options.commit)
    if (load := os.getloadavg()[0]) > BUSY and not options.quick:
        print(f"Other work is running (load average {load:.1f}): wait, or the numbers mean little.")
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    lines: list[Row] = []
    with contextlib.ExitStack() as stack:
        shapes = QUICK_SHAPES if options.quick else SHAPES[options.device]
        crews = {shape: stack.enter_context(Crew(*shape, device)) for shape in shapes}
        for task in options.tasks:
            lines += bench(task, options, crews, where)
            write_csv(options.out, lines)  # so that an interrupted run leaves some
    if not options.quick and device.type == "cpu":
        print()
        print_targets(lines)
    print(f"\nwrote {options.out}")
    if importlib.util.find_spec("kondo_lab") is None:
        print("no plot: kondo-lab is not installed; run benchmarks/plot_lab.py where it is.")
        return
    from plot_lab import draw

    print(f"wrote {draw(options.out)}")


if __name__ == "__main__":
    main()
