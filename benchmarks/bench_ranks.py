"""One learner step of two ranks, timed: dense DDP, a gate on each rank, and one gate for both.

    python benchmarks/bench_ranks.py [--models gpt2] [--rates 3] [--repeats 12] [--quick --out F]

    two processes, one core each -> the same contenders in the same order -> rank 0 writes the CSV

Every rank has rows of its own. `gate_overhead` is the share of the step that coordination takes:
stages select, coordinate, and wait. A rank that is ahead waits for the other, which dense DDP does
too; so of each step the wait of the rank that waited least counts. `stages` has rank 0's own.
"""

import argparse
import dataclasses
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kondo
import kondo.ranks
from bench_step import BUSY, print_table
from harness import (
    DENSE,
    FORWARD,
    Contender,
    Row,
    Samples,
    environment,
    inspect,
    percentile,
    summarise,
    write_csv,
)
from workloads import Batch, Workload, build

RANKS = 2
MODELS = ("mlp", "gpt2")
ALONE, EXACT, FREE = "gate-per-rank", "exact", "free"
DATA = Path(__file__).resolve().parent / "data"
TARGET_OVERHEAD, TARGET_RATE = 0.03, 0.03
CPU = torch.device("cpu")


def own_rows(work: Workload, rank: int) -> Workload:
    """Return the workload with rows of this rank's own, and its model in DDP."""
    data = torch.Generator().manual_seed(100 + rank)
    order = torch.randperm(work.rows, generator=data)
    wrapped = DistributedDataParallel(work.model)

    def log_prob(rows: Batch) -> Tensor:
        if work.unit == "sample":
            states, actions = rows
            logits: Tensor = wrapped(states)
            return logits.log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)
        (ids,) = rows
        logits = wrapped(input_ids=ids).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)

    return dataclasses.replace(
        work,
        model=wrapped,
        log_prob=log_prob,
        batch=tuple(part[order] for part in work.batch),
        advantages=torch.randn(work.rows, generator=data),
    )


def dense_step(work: Workload) -> None:
    """Differentiate every row of every rank; DDP averages."""
    advantages = work.advantages if work.unit == "sample" else work.advantages.unsqueeze(1)
    loss = -(work.log_prob(work.batch) * advantages).mean()
    loss.backward()  # type: ignore[no-untyped-call]


def contenders_for(work: Workload, rates: Sequence[float]) -> list[Contender]:
    """Return dense, F alone, a gate per rank, and ours with both screens, at every rate."""
    with torch.no_grad():
        known = work.log_prob(work.batch)

    def forward() -> None:
        with torch.no_grad():
            work.log_prob(work.batch)

    def gated(call: Callable[..., kondo.Report], rate: float, screen: Tensor | None) -> Any:
        gate = kondo.Gate(rate=rate)
        return lambda: call(
            work.log_prob, work.batch, work.advantages, gate=gate, screen=screen, unit=work.unit
        )

    found = [
        Contender(name=DENSE, rate=1.0, step=lambda: dense_step(work), limit=lambda f, rho: 1.0),
        Contender(name=FORWARD, rate=1.0, step=forward, limit=None),
    ]
    exact_limit, free_limit = (lambda f, rho: 1 / (f + rho)), (lambda f, rho: 1 / rho)
    options = kondo.Options(module=work.model)
    alone = partial(kondo.backward, group="local", options=options)
    together = partial(kondo.backward, group="world", options=options)
    for rate in rates:
        found += [
            Contender(name=ALONE, rate=rate, step=gated(alone, rate, None), limit=exact_limit),
            Contender(name=EXACT, rate=rate, step=gated(together, rate, None), limit=exact_limit),
            Contender(name=FREE, rate=rate, step=gated(together, rate, known), limit=free_limit),
        ]
    return found


def run_rounds(
    contenders: Sequence[Contender], work: Workload, repeats: int
) -> tuple[list[Samples], list[list[float]]]:
    """Time every contender once a round, ranks in step; return samples and least waits."""
    samples = [Samples() for _ in contenders]
    waits: list[list[float]] = [[] for _ in contenders]
    order = list(range(len(contenders)))
    shuffle = random.Random(0).shuffle  # the same on all ranks
    for _ in range(repeats):
        shuffle(order)
        for index in order:
            work.model.zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            report = contenders[index].step()
            spent = time.perf_counter() - start
            samples[index].seconds.append([spent])
            samples[index].reports.append([report])
            waits[index].append(_least(report.seconds.get("wait", 0.0) if report else 0.0))
    return samples, waits


def _least(seconds: float) -> float:
    least = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def _total(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def overhead(taken: Samples, waits: Sequence[float]) -> float:
    """Return the share of the step that coordination took, p50."""
    shares = []
    for (spent,), (report,), wait in zip(taken.seconds, taken.reports, waits, strict=True):
        assert report is not None
        talked = report.seconds["select"] + report.seconds.get("coordinate", 0.0) + wait
        shares.append(talked / spent)
    return percentile(shares, 0.5)


def bench(work: Workload, rates: Sequence[float], repeats: int, where: dict[str, Any]) -> list[Row]:
    """Count, then time, one workload on this rank in step with the others."""
    contenders = contenders_for(work, rates)
    inspections = []
    for contender in contenders:
        seen = inspect(contender, work.model, held=work.held(), device=CPU)
        inspections.append(dataclasses.replace(seen, rows=_total(seen.rows)))
    samples, waits = run_rounds(contenders, work, repeats)
    shared = {
        "benchmark": "ranks",
        "model": work.name,
        "config": f"{RANKS} ranks in DDP over gloo, each {work.config}",
        "unit": work.unit,
        "rows": RANKS * work.rows,
        "tokens": RANKS * work.tokens,
        **where,
    }
    lines = summarise(contenders, samples, inspections, shared)
    return [
        line
        if taken.reports[0][0] is None
        else dataclasses.replace(line, gate_overhead=overhead(taken, waited))
        for line, taken, waited in zip(lines, samples, waits, strict=True)
    ]


def work_on(rank: int, meeting: str, options: argparse.Namespace) -> None:
    """Run as one rank."""
    torch.set_num_threads(1)
    if len(cores := sorted(os.sched_getaffinity(0))) >= RANKS:
        os.sched_setaffinity(0, {cores[rank]})  # two ranks on one core would wait for each other
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    where = environment(CPU, options.commit)
    lines: list[Row] = []
    for name in options.models:
        work = own_rows(build(name, CPU, quick=options.quick), rank)
        found = bench(work, [percent / 100 for percent in options.rates], options.repeats, where)
        lines += found
        if rank == 0:
            print_table(found)
            print_targets(found)
            write_csv(options.out, lines)
    dist.barrier()  # leave together: a rank that goes first can end the others with an error
    dist.destroy_process_group()


def print_targets(lines: Sequence[Row]) -> None:
    """Print what coordination was to cost at 3%, and whether it does."""
    for line in lines:
        if line.contender in (EXACT, FREE) and abs(line.rate - TARGET_RATE) < 1e-9:
            assert line.gate_overhead is not None
            met = "met" if line.gate_overhead < TARGET_OVERHEAD else "MISSED"
            wanted = f"wanted < {TARGET_OVERHEAD:.0%} {met}" if line.contender == EXACT else ""
            print(
                f"  {line.contender} screen, coordination {line.gate_overhead:.2%} of the step "
                f"{wanted}\n    rank 0: {line.stages}"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rates", nargs="+", type=float, default=(3.0,), help="in percent")
    parser.add_argument("--repeats", type=int, default=12, help="rounds")
    parser.add_argument("--out", type=Path, help="CSV; default: data/ranks_cpu.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="tiny models; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    options.out = options.out or DATA / "ranks_cpu.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the CSV."""
    options = parse(arguments)
    if (load := os.getloadavg()[0]) > BUSY and not options.quick:
        print(f"Other work is running (load average {load:.1f}): ranks will wait for each other.")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work_on, args=(f"{folder}/meet", options), nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
