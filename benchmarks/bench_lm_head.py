"""Token log-probs from hidden states, timed: all logits at once, and each backend in pieces.

    python benchmarks/bench_lm_head.py --device cuda [--heads qwen2-0.5b] [--tokens 4096]
    python benchmarks/bench_lm_head.py --quick --out F       (does it run? seconds, on a CPU)

Three passes, each up to results that are there and not only queued: "forward" without a graph;
"train", forward and backward of hidden and weight; "frozen", forward and backward of hidden alone.
Before anything is timed, log-probs and gradients are compared with float32 ones; a backend that is
wrong, or that cannot run here, is left out with the reason.
"""

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import (
    Row,
    environment,
    peak_bytes_cpu,
    peak_bytes_cuda,
    percentile,
    synchronise,
    write_csv,
)
from kondo.lm.head import Backend, Head, token_log_probs

DATA = Path(__file__).resolve().parent / "data"
PLAIN = "plain"
PASSES = ("forward", "train", "frozen")
TOLERANCE = 3e-2
"""Relative difference allowed between a result and the float32 one, in norm."""
MIN_ROUNDS, MAX_ROUNDS = 3, 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run: heads as (D, V), tokens K, chunks of ours and of liger's."""

    heads: dict[str, tuple[int, int]]
    tokens: tuple[int, ...]
    chunks: tuple[int, ...]
    liger_chunks: tuple[int, ...]
    plain_tokens: int
    """More than this at once is nothing a user does: plain then runs in micro-batches."""
    seconds: float
    """Rounds of one group end after this, but not before MIN_ROUNDS."""


FULL = Sizes(
    heads={"qwen2-0.5b": (896, 151_936), "qwen2-1.5b": (1536, 151_936)},
    tokens=(1024, 4096, 16_384, 65_536),
    chunks=(1024, 2048, 4096, 8192),
    liger_chunks=(1024, 4096),
    plain_tokens=16_384,
    seconds=1.0,
)
QUICK = Sizes(
    heads={"toy": (32, 500)},
    tokens=(64, 256),
    chunks=(32, 64),
    liger_chunks=(64,),
    plain_tokens=128,
    seconds=0.1,
)

LogProbs = Callable[[Tensor, Head, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way from hidden states to log-probs."""

    name: str
    log_probs: LogProbs
    micro_batch: int | None = None
    """Tokens per forward and backward; all at once if None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One head and K tokens of it."""

    head: Head
    hidden: Tensor
    targets: Tensor
    upstream: Tensor
    """[K]: the gradient that arrives."""

    def held(self) -> list[Tensor]:
        """Return the tensors that exist before anything is computed."""
        return [self.head.weight, self.hidden, self.targets, self.upstream]


def plain_log_probs(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Hold all logits, as models do, and their float32 log-softmax, as trainers do."""
    log_probs = F.linear(hidden, head.weight).float().log_softmax(dim=-1)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def kernel(backend: Backend, chunk: int | None) -> LogProbs:
    """Return one of our backends; targets are known to be right, so nothing waits."""

    def log_probs(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
        return token_log_probs(hidden, head, targets, backend=backend, chunk=chunk, check=False)

    return log_probs


def contenders_for(sizes: Sizes) -> list[Contender]:
    """Return everything that may be run; what cannot be run here is found out by `works`."""
    return [
        Contender(name=PLAIN, log_probs=plain_log_probs, micro_batch=sizes.plain_tokens),
        *(
            Contender(name=f"torch-{chunk}", log_probs=kernel("torch", chunk))
            for chunk in sizes.chunks
        ),
        *(
            Contender(name=f"liger-{chunk}", log_probs=kernel("liger", chunk))
            for chunk in sizes.liger_chunks
        ),
        Contender(name="cce", log_probs=kernel("cce", None)),
    ]


def build(width: int, vocabulary: int, num_tokens: int, device: torch.device) -> Problem:
    """Draw a problem, bfloat16 on a GPU, whose logits have a standard deviation of 3."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator, device=device)
    hidden = torch.randn(num_tokens, width, generator=generator, device=device)
    return Problem(
        head=Head(weight.mul_(3 / width**0.5).to(dtype).requires_grad_()),
        hidden=hidden.to(dtype).requires_grad_(),
        targets=torch.randint(vocabulary, (num_tokens,), generator=generator, device=device),
        upstream=torch.randn(num_tokens, generator=generator, device=device),
    )


def step(contender: Contender, problem: Problem, kind: str) -> None:
    """Run one pass; gradients end up in `.grad`."""
    num_tokens = problem.hidden.shape[0]
    size = contender.micro_batch or num_tokens
    problem.hidden.grad = problem.head.weight.grad = None
    problem.head.weight.requires_grad_(kind == "train")
    for start in range(0, num_tokens, size):
        part = slice(start, start + size)
        inputs = (problem.hidden[part], problem.head, problem.targets[part])
        if kind == "forward":
            with torch.no_grad():
                contender.log_probs(*inputs)
        else:
            contender.log_probs(*inputs).backward(problem.upstream[part])  # type: ignore[no-untyped-call]


def reference(problem: Problem) -> list[Tensor]:
    """Return log-probs and the gradients of hidden and weight, in float32."""
    wide = [x.detach().float().requires_grad_() for x in (problem.hidden, problem.head.weight)]
    log_probs = kernel("torch", None)(wide[0], Head(wide[1]), problem.targets)
    gradients = torch.autograd.grad(log_probs, wide, grad_outputs=problem.upstream)
    return [log_probs.detach(), *gradients]


def works(contender: Contender, problem: Problem, expected: Sequence[Tensor]) -> bool:
    """Say whether the contender runs here and is right; print why if not."""
    leaves = (problem.hidden, problem.head.weight)
    try:
        log_probs = contender.log_probs(problem.hidden, problem.head, problem.targets)
        gradients = torch.autograd.grad(log_probs, leaves, grad_outputs=problem.upstream)
        synchronise(problem.hidden.device)
    except Exception as error:  # a foreign kernel may fail in its own ways; the others still run
        if contender.name == PLAIN or contender.name.startswith("torch"):
            raise
        reason = (str(error).splitlines() or [""])[0]
        print(f"{contender.name} is left out: {type(error).__name__}: {reason}", flush=True)
        return False
    pairs = zip((log_probs.detach(), *gradients), expected, strict=True)
    errors = [float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs]
    told = ", ".join(f"{error:.1e}" for error in errors)
    print(f"{contender.name}: log-probs, d hidden, d weight differ by {told}", flush=True)
    if not max(errors) <= TOLERANCE:
        print(f"{contender.name} is left out: that is more than {TOLERANCE:.0e}.", flush=True)
        return False
    return True


def fits(contender: Contender, num_tokens: int) -> bool:
    """Leave out chunks of more tokens than there are: they do what a smaller one does."""
    _, _, chunk = contender.name.partition("-")
    return not chunk or int(chunk) <= num_tokens


def bench(
    contenders: Sequence[Contender],
    problem: Problem,
    kind: str,
    sizes: Sizes,
    shared: dict[str, Any],
) -> list[Row]:
    """Time one pass of every contender: rounds of everything, each in an order of its own."""
    device = problem.hidden.device
    find_peak = peak_bytes_cuda if device.type == "cuda" else peak_bytes_cpu
    peaks = {}
    for contender in contenders:  # also the warm-up
        peaks[contender.name], _ = find_peak(
            lambda it=contender: step(it, problem, kind),  # type: ignore[misc]
            problem.held(),
        )
        problem.hidden.grad = problem.head.weight.grad = None
    rounds: list[dict[str, float]] = []
    order, shuffle = list(contenders), random.Random(0).shuffle
    begin = time.perf_counter()
    while len(rounds) < MIN_ROUNDS or (
        len(rounds) < MAX_ROUNDS and time.perf_counter() - begin < sizes.seconds
    ):
        shuffle(order)
        spent = {}
        for contender in order:
            synchronise(device)
            start = time.perf_counter()
            step(contender, problem, kind)
            synchronise(device)
            spent[contender.name] = time.perf_counter() - start
        rounds.append(spent)
    return [
        line(contender.name, rounds, peaks[contender.name], kind, problem, shared)
        for contender in contenders
    ]


def line(
    name: str,
    rounds: Sequence[dict[str, float]],
    peak: int,
    kind: str,
    problem: Problem,
    shared: dict[str, Any],
) -> Row:
    """Return the CSV row of one contender; its speed-up is over plain, inside each round."""
    times = [1e3 * spent[name] for spent in rounds]
    speedups = [spent[PLAIN] / spent[name] for spent in rounds]
    num_tokens, width = problem.hidden.shape
    dtype = str(problem.hidden.dtype).removeprefix("torch.")
    return Row(
        benchmark="lm_head",
        config=f"{kind}; K={num_tokens} D={width} V={problem.head.weight.shape[0]} {dtype}",
        contender=name,
        rate=1.0,
        unit="token",
        rows=num_tokens,
        tokens=num_tokens,
        rows_differentiated=0 if kind == "forward" else num_tokens,
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
        peak_memory_mb=peak / 2**20,
        repeats=len(rounds),
        **shared,
    )


def print_table(lines: Sequence[Row]) -> None:
    """Print ratios and memory; absolute times only from a GPU."""
    on_gpu = not lines[0].device.startswith("cpu")
    print(f"\n{lines[0].model}, {lines[0].config}; {lines[0].repeats} rounds")
    for row in lines:
        spread = f"{row.speedup_p20:.2f} / {row.speedup_p50:.2f} / {row.speedup_p80:.2f}x"
        told = f"{row.step_ms_p50:>10.2f} ms" if on_gpu else ""
        print(f"  {row.contender:<12}{spread:>24}{row.peak_memory_mb:>9.0f} MB{told}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--heads", nargs="+", choices=FULL.heads, help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 1024 to 65536")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES[:2])
    parser.add_argument("--out", type=Path, help="CSV; default: data/lm_head_<device>.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="toy sizes; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    if options.device == "cpu" and not options.quick:
        parser.error("a CPU would take hours for these heads: give --device cuda or --quick.")
    options.out = options.out or DATA / f"lm_head_{options.device}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the CSV."""
    options = parse(arguments)
    device = torch.device(options.device)
    sizes = QUICK if options.quick else FULL
    where = environment(device, options.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    contenders: list[Contender] | None = None
    lines: list[Row] = []
    for name in options.heads if options.heads and not options.quick else sizes.heads:
        width, vocabulary = sizes.heads[name]
        if contenders is None:
            sample = build(width, vocabulary, sizes.tokens[1], device)
            expected = reference(sample)
            contenders = [it for it in contenders_for(sizes) if works(it, sample, expected)]
            del sample, expected
        for num_tokens in options.tokens or sizes.tokens:
            problem = build(width, vocabulary, num_tokens, device)
            chosen = [it for it in contenders if fits(it, num_tokens)]
            for kind in options.passes:
                found = bench(chosen, problem, kind, sizes, {"model": name, **where})
                print_table(found)
                lines += found
                write_csv(options.out, lines)  # each time: an interrupted run leaves some
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
