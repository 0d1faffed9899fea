"""One learner step of other people's loops, timed: the framework's own backward, and kondo's.

    python benchmarks/bench_loops.py [--loops torchrl-mlp torchrl-cnn accelerate fabric]
                                     [--rates 3 10] [--repeats 12] [--quick --out F]

`dense` is the framework's own step: the actor part of TorchRL's ClipPPOLoss and its backward, or a
policy-gradient loss and `accelerator.backward` or `fabric.backward`. Before anything is timed, our
gradients are compared with those of the framework's loss with skipped advantages zeroed; a wrong
one ends the run. Accelerate and Fabric run on two processes, started by torchrun.
"""

import argparse
import csv
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kondo
from bench_ranks import run_rounds as rank_rounds
from bench_step import BUSY, print_table
from harness import (
    DENSE,
    FORWARD,
    Contender,
    Row,
    environment,
    inspect,
    run_rounds,
    summarise,
    write_csv,
)
from workloads import build

ALONE, RANKED = ("torchrl-mlp", "torchrl-cnn"), ("accelerate", "fabric")
DATA = Path(__file__).resolve().parent / "data"
CPU = torch.device("cpu")
CLIP, TOLERANCE, RANKS = 0.2, 1e-4, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRow(Row):
    """A line of the CSV, and the versions of the framework."""

    framework: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A framework's step on one batch of this process, and ours on the same."""

    config: str
    framework: str
    model: nn.Module
    """Called once in a forward."""
    advantages: Tensor
    known: Tensor
    """Log-probs of the rows, as a rollout leaves them."""
    own: Callable[[Tensor], None]
    """The framework's step, given advantages."""
    gated: Callable[[Any, Any], kondo.Report]
    """Ours, given a gate and a screen."""
    forward: Callable[[], None]
    """Of all rows, without gradients."""


def torchrl_loop(net: nn.Module, observations: Tensor, config: str) -> Loop:
    """Return PPO's actor step of TorchRL, for a discrete actor."""
    from tensordict import TensorDict
    from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
    from torchrl.modules import OneHotCategorical, ProbabilisticActor
    from torchrl.objectives import ClipPPOLoss

    from kondo.integrations.torchrl import ActorPolicy

    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    rows = len(observations)
    data = TensorDict(observation=observations, batch_size=[rows])
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        data = actor(data).exclude("logits")
    advantages = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    # Without a critic, which is trained on all rows in both steps.
    loss = ClipPPOLoss(actor, None, clip_epsilon=CLIP, entropy_bonus=False)
    policy, old = ActorPolicy(actor), data["action_log_prob"]

    def own(given: Tensor) -> None:
        data["advantage"] = given.unsqueeze(-1)
        loss(data)["loss_objective"].backward()

    def gated(gate: Any, screen: Any) -> kondo.Report:
        return kondo.backward(
            policy,
            data,
            advantages,
            gate=gate,
            screen=screen,
            loss=partial(kondo.losses.ppo, clip=CLIP),
            loss_inputs={"old_log_probs": old},
        )

    def forward() -> None:
        with torch.no_grad():
            policy.log_prob(data)

    return Loop(
        config=config,
        framework=f"torchrl {version('torchrl')}, tensordict {version('tensordict')}",
        model=net,
        advantages=advantages,
        known=old,
        own=own,
        gated=gated,
        forward=forward,
    )


def torchrl_mlp(quick: bool) -> Loop:
    """Return a policy on vectors, as of a locomotion task."""
    rows, inputs, width, actions = (64, 8, 16, 3) if quick else (4096, 376, 512, 17)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, actions),
    )  # fmt: skip
    config = f"{inputs}-{width}-{width}-{actions}, {rows} rows, float32, actor part"
    return torchrl_loop(net, torch.randn(rows, inputs), config)


def torchrl_cnn(quick: bool) -> Loop:
    """Return the network of Mnih et al. 2015 on stacks of four frames."""
    rows, side = (16, 36) if quick else (256, 84)
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3 if side == 84 else 1, 1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    frames = torch.randn(rows, 4, side, side)
    flat = convolutions(frames[:1]).shape[1]
    net = nn.Sequential(convolutions, nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, 6))
    config = f"three convolutions on 4 x {side} x {side}, {rows} rows, float32, actor part"
    return torchrl_loop(net, frames, config)


def ranked_loop(name: str, quick: bool) -> Loop:
    """Return a policy-gradient step of Accelerate or Fabric, on this process's rows."""
    work = build("mlp", CPU, quick=quick)
    if name == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        rank, backward = accelerator.process_index, accelerator.backward
        wrapped, framework = accelerator.prepare(work.model), f"accelerate {version('accelerate')}"
    else:
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        fabric.launch()
        rank, backward = fabric.global_rank, fabric.backward
        wrapped = fabric.setup_module(work.model)
        framework = f"lightning-fabric {version('lightning-fabric')}"
    data = torch.Generator().manual_seed(100 + rank)
    order = torch.randperm(work.rows, generator=data)
    batch = tuple(part[order] for part in work.batch)
    advantages = torch.randn(work.rows, generator=data)

    def log_prob(rows: Any) -> Tensor:
        states, actions = rows
        logits: Tensor = wrapped(states)
        return logits.log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)

    def own(given: Tensor) -> None:
        backward(-(log_prob(batch) * given).mean())

    def gated(gate: Any, screen: Any) -> kondo.Report:
        return kondo.backward(
            log_prob,
            batch,
            advantages,
            gate=gate,
            screen=screen,
            group="world",
            options=kondo.Options(module=wrapped, backward_fn=backward),
        )

    def forward() -> None:
        with torch.no_grad():
            log_prob(batch)

    with torch.no_grad():
        known = log_prob(batch)
    return Loop(
        config=f"{RANKS} processes in DDP over gloo, each {work.config}",
        framework=framework,
        model=work.model,
        advantages=advantages,
        known=known,
        own=own,
        gated=gated,
        forward=forward,
    )


def contenders_for(loop: Loop, rates: Sequence[float]) -> list[Contender]:
    """Return the framework's step, F alone, ours without a gate, and ours at every rate."""

    def ours(name: str, rate: float, gate: Any, screen: Tensor | None) -> Contender:
        limits = {"exact": lambda f, rho: 1 / (f + rho), "kondo-dense": lambda f, rho: 1.0}
        return Contender(
            name=name,
            rate=rate,
            step=lambda: loop.gated(gate, screen),
            limit=limits.get(name, lambda f, rho: 1 / rho),
        )

    found = [
        Contender(
            name=DENSE, rate=1.0, step=lambda: loop.own(loop.advantages), limit=lambda f, rho: 1.0
        ),
        Contender(name=FORWARD, rate=1.0, step=loop.forward, limit=None),
        ours("kondo-dense", 1.0, None, None),
    ]
    for rate in rates:
        found += [
            ours("exact", rate, kondo.Gate(rate=rate), None),
            ours("free", rate, kondo.Gate(rate=rate), loop.known),
            ours("free-unbiased", rate, kondo.UnbiasedGate(rate=rate), loop.known),
        ]
    return found


def check(loop: Loop, rates: Sequence[float]) -> None:
    """End the run if a gradient is not that of the framework with skipped advantages zeroed."""
    delight = _gathered(-loop.known * loop.advantages)
    for rate in (1.0, *rates):
        keep = torch.zeros_like(delight)
        keep[delight.topk(max(1, round(rate * len(delight)))).indices] = 1.0
        loop.model.zero_grad(set_to_none=True)
        loop.own(loop.advantages * _own_part(keep))
        expected = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
        loop.model.zero_grad(set_to_none=True)
        loop.gated(None if rate == 1.0 else kondo.Gate(rate=rate), None)
        found = [p.grad for p in loop.model.parameters() if p.grad is not None]
        pairs = list(zip(found, expected, strict=True))
        error = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
        norm = math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
        if not error <= TOLERANCE * norm:
            raise SystemExit(
                f"the gradient at {rate:.0%} differs by {error / norm:.2e} (allowed: "
                f"{TOLERANCE:.0e}); nothing was timed."
            )


def _gathered(own: Tensor) -> Tensor:
    """Return the values of all processes, in their order."""
    if not dist.is_initialized():
        return own
    parts = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def _own_part(values: Tensor) -> Tensor:
    return values.chunk(RANKS)[dist.get_rank()] if dist.is_initialized() else values


def bench(name: str, loop: Loop, options: argparse.Namespace) -> list[LoopRow]:
    """Check, then time, one loop; on several processes in step."""
    rates = [percent / 100 for percent in options.rates]
    check(loop, rates)
    contenders = contenders_for(loop, rates)
    held = [*loop.model.parameters(), loop.advantages, loop.known]
    inspections = [inspect(one, loop.model, held=held, device=CPU) for one in contenders]
    if dist.is_initialized():
        rows = _gathered(torch.tensor([one.rows for one in inspections])).view(RANKS, -1).sum(0)
        inspections = [
            dataclasses.replace(one, rows=int(total))
            for one, total in zip(inspections, rows, strict=True)
        ]
        samples, _ = rank_rounds(contenders, loop, options.repeats)  # type: ignore[arg-type]
    else:
        samples = run_rounds(contenders, loop.model, repeats=options.repeats, device=CPU)
    count = len(_gathered(loop.advantages))
    shared = {
        "benchmark": "loops",
        "model": name,
        "config": loop.config,
        "unit": "sample",
        "rows": count,
        "tokens": count,
        **environment(CPU, options.commit),
    }
    lines = summarise(contenders, samples, inspections, shared)
    return [LoopRow(**dataclasses.asdict(line), framework=loop.framework) for line in lines]


def on_two_processes(name: str, options: argparse.Namespace) -> list[LoopRow]:
    """Run this script for one loop under torchrun; return the lines of its first process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.csv"
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {RANKS}"
        command = [sys.executable, *torchrun.split(), __file__, "--loops", name, "--out", str(out)]
        command += ["--repeats", str(options.repeats), "--rates", *map(str, options.rates)]
        command += ["--quick"] * options.quick
        command += ["--commit", options.commit] if options.commit else []
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900)
        with out.open() as file:
            return [_read(line) for line in csv.DictReader(file)]


def _read(line: dict[str, str]) -> LoopRow:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(LoopRow):
        text = line[field.name]
        if field.type in (int, float):
            values[field.name] = field.type(text)
        elif field.type == float | None:
            values[field.name] = float(text) if text else None
        else:
            values[field.name] = text
    return LoopRow(**values)


def as_rank(name: str, options: argparse.Namespace) -> None:
    """Run one loop as one of two processes; the first writes the lines."""
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    if len(cores := sorted(os.sched_getaffinity(0))) >= RANKS:
        os.sched_setaffinity(0, {cores[rank]})  # two on one core would wait for each other
    lines = bench(name, ranked_loop(name, options.quick), options)
    if rank == 0:
        write_csv(options.out, lines)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = (*ALONE, *RANKED)
    parser.add_argument("--loops", nargs="+", choices=every, default=every)
    parser.add_argument("--rates", nargs="+", type=float, default=(3.0, 10.0), help="in percent")
    parser.add_argument("--repeats", type=int, default=12, help="rounds")
    parser.add_argument("--out", type=Path, help="CSV; default: data/loops_cpu.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="tiny models; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    options.out = options.out or DATA / "loops_cpu.csv"
    options.repeats = 2 if options.quick else options.repeats
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the CSV."""
    options = parse(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        as_rank(options.loops[0], options)
        return
    if (load := os.getloadavg()[0]) > BUSY and not options.quick:
        print(f"Other work is running (load average {load:.1f}): ratios vary more.")
    torch.set_num_threads(1)
    alone = {"torchrl-mlp": torchrl_mlp, "torchrl-cnn": torchrl_cnn}
    lines: list[LoopRow] = []
    for name in options.loops:
        if name in alone:
            found = bench(name, alone[name](options.quick), options)
        else:
            found = on_two_processes(name, options)
        print_table(found)
        lines += found
        write_csv(options.out, lines)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
