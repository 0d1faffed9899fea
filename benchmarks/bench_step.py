"""One learner step, timed: dense, masked dense, and ours with an exact and with a free screen.

    python benchmarks/bench_step.py [--device cuda] [--models gpt2] [--rates 3 10] [--quick --out F]

A step is zero_grad and everything up to gradients in `.grad`. The optimiser is left out: it costs
every contender the same. Before anything is timed, our gradients are compared with those of the
masked dense loss at every rate; a wrong one ends the run.
"""

import argparse
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import kondo
from harness import (
    DENSE,
    FORWARD,
    Contender,
    Inspection,
    Row,
    environment,
    inspect,
    run_rounds,
    summarise,
    write_csv,
)
from workloads import Workload, build

RATES = (1.0, 3.0, 10.0, 30.0, 50.0, 100.0)
MODELS = ("mlp", "gpt2", "larger")
EXACT, FREE = "exact", "free"
BUSY = 0.5
"""Load average above which the numbers are not to be published."""
DATA = Path(__file__).resolve().parent / "data"

# What the GPT-2 shape is to reach at 3%, as ratios inside one run.
TARGET_MODEL, TARGET_RATE = "gpt2", 0.03
TARGET_EXACT, TARGET_SHARE, TARGET_FREE, TARGET_OVERHEAD = 2.3, 0.90, 15.0, 0.05


def dense_losses(
    work: Workload, weigh: Callable[[Tensor, slice], Tensor] | None = None
) -> Iterator[Tensor]:
    """Yield the loss of each micro-batch: what a user has without kondo.

    Args:
        work: the workload.
        weigh: (log_probs, rows) -> [n] factor of each row's loss; the mask of a masked dense step.
    """
    for rows in work.slices(work.micro_batch):
        log_probs = work.log_prob(tuple(part[rows] for part in work.batch))
        advantages = work.advantages[rows]
        if weigh is not None:
            advantages = advantages * weigh(log_probs, rows)
        if work.unit == "sequence":
            advantages = advantages.unsqueeze(1)
        elements = log_probs.numel() * work.rows // log_probs.shape[0]
        yield -(log_probs * advantages).sum() / elements


def dense_step(work: Workload) -> None:
    """Differentiate every row."""
    for loss in dense_losses(work):
        loss.backward()  # type: ignore[no-untyped-call]


def masked_step(work: Workload, gate: Any) -> None:
    """Gate through `kondo-gate`: rows are weighted by 0 or 1, and every row is differentiated."""

    def weigh(log_probs: Tensor, rows: slice) -> Tensor:
        per_row = log_probs if work.unit == "sample" else log_probs.sum(1)
        decision = gate.compute_gate(log_probs=per_row, advantages=work.advantages[rows])
        weights: Tensor = decision.gate_weights
        return weights

    for loss in dense_losses(work, weigh):
        loss.backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def forward_log_probs(work: Workload) -> Tensor:
    """Return the log-probs of all rows, in the chunks the engine screens in: this costs F."""
    chunk = None if work.micro_batch is None else 4 * work.micro_batch  # see kondo.Options
    pieces = (tuple(part[rows] for part in work.batch) for rows in work.slices(chunk))
    return torch.cat([work.log_prob(piece) for piece in pieces])


def our_step(work: Workload, gate: kondo.Gate, screen: Tensor | None) -> kondo.Report:
    """Differentiate the kept rows only."""
    return kondo.backward(
        work.log_prob,
        work.batch,
        work.advantages,
        gate=gate,
        screen=screen,
        unit=work.unit,
        micro_batch=work.micro_batch,
    )


def contenders_for(work: Workload, rates: Sequence[float], known: Tensor) -> list[Contender]:
    """Return dense, F alone, masked dense, and ours with both screens, at every rate."""

    def forward() -> None:
        forward_log_probs(work)

    found = [
        Contender(name=DENSE, rate=1.0, step=lambda: dense_step(work), limit=lambda f, rho: 1.0),
        Contender(name=FORWARD, rate=1.0, step=forward, limit=None),
    ]
    masked_name, package = masked_package()
    for rate in rates:
        if package is not None:
            masked = package.KondoGate(package.KondoGateConfig(gate_rate=rate))
            found.append(
                Contender(
                    name=masked_name,
                    rate=rate,
                    step=lambda gate=masked: masked_step(work, gate),  # type: ignore[misc]
                    limit=lambda f, rho: 1.0,
                )
            )
        gate = kondo.Gate(rate=rate)
        found += [
            Contender(
                name=EXACT,
                rate=rate,
                step=lambda gate=gate: our_step(work, gate, None),  # type: ignore[misc]
                limit=lambda f, rho: 1 / (f + rho),
            ),
            Contender(
                name=FREE,
                rate=rate,
                step=lambda gate=gate: our_step(work, gate, known),  # type: ignore[misc]
                limit=lambda f, rho: 1 / rho,
            ),
        ]
    return found


def masked_package() -> tuple[str, ModuleType | None]:
    """Find `kondo-gate`, or our module that stands in for it, and say which under what name."""
    if importlib.util.find_spec("kondo_gate") is not None:
        package = importlib.import_module("kondo_gate")
        return f"kondo-gate-{package.__version__}", package
    try:
        return "kondo-gate-stand-in", importlib.import_module("kondo.integrations.kondo_gate")
    except ImportError:
        return "kondo-gate", None


def masked_gradient(work: Workload, rate: float, known: Tensor) -> list[Tensor]:
    """Return the gradient our step must have, without kondo: dense, masked to the top rows."""
    with torch.no_grad():
        delight = -known * (work.advantages if work.unit == "sample" else work.advantages[:, None])
        delight = delight if work.unit == "sample" else delight.sum(1)
        best = delight.topk(max(1, round(rate * work.rows))).indices
        mask = torch.zeros_like(delight).index_fill_(0, best, 1.0)
    work.model.zero_grad(set_to_none=True)
    for loss in dense_losses(work, lambda _, rows: mask[rows]):
        loss.backward()  # type: ignore[no-untyped-call]
    # On the CPU, so that they are not part of anybody's peak memory.
    return [_gradient(p).to("cpu", copy=True) for p in work.model.parameters()]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def check_gradient(work: Workload, contender: Contender, expected: Sequence[Tensor]) -> None:
    """End the run if `.grad` is not the expected gradient: a fast wrong step is worthless."""
    error = total = 0.0
    for parameter, reference in zip(work.model.parameters(), expected, strict=True):
        error += float((_gradient(parameter).cpu() - reference).double().square().sum())
        total += float(reference.double().square().sum())
    relative = math.sqrt(error / total)
    if not relative <= work.tolerance:
        raise SystemExit(
            f"{work.name}: the gradient of {contender.name} at {contender.rate:.0%} differs from "
            f"masked dense by {relative:.2e} (allowed: {work.tolerance:.0e}); nothing was timed."
        )


def check_rows(work: Workload, contender: Contender, seen: Inspection) -> None:
    """End the run if the report tells another number of rows than the hook counted."""
    if seen.report is not None and seen.report.rows_trained != seen.rows:
        raise SystemExit(
            f"{work.name}: {contender.name} at {contender.rate:.0%} reports "
            f"{seen.report.rows_trained} rows differentiated, {seen.rows} were counted."
        )


def inspect_all(
    work: Workload, contenders: Sequence[Contender], known: Tensor, device: torch.device
) -> list[Inspection]:
    """Run everything once, untimed: warm up, check ours, count rows, find the peak memory."""
    held = [*work.held(), known]
    expected: dict[float, list[Tensor]] = {}
    seen = []
    for contender in contenders:
        ours = contender.name in (EXACT, FREE)
        if ours and contender.rate not in expected:
            expected = {contender.rate: masked_gradient(work, contender.rate, known)}
        seen.append(inspect(contender, work.model, held=held, device=device))
        if ours:
            check_gradient(work, contender, expected[contender.rate])
            check_rows(work, contender, seen[-1])
    return seen


def bench(work: Workload, rates: Sequence[float], repeats: int, where: dict[str, Any]) -> list[Row]:
    """Check, then time, one workload. `where` holds the columns of `harness.environment`."""
    device = work.advantages.device
    known = forward_log_probs(work)
    contenders = contenders_for(work, rates, known)
    inspections = inspect_all(work, contenders, known, device)
    samples = run_rounds(contenders, work.model, repeats=repeats, device=device)
    shared = {
        "benchmark": "step",
        "model": work.name,
        "config": work.config,
        "unit": work.unit,
        "rows": work.rows,
        "tokens": work.tokens,
        **where,
    }
    return summarise(contenders, samples, inspections, shared)


def print_table(lines: Sequence[Row]) -> None:
    """Print ratios; absolute times only from a GPU, where they mean something to others."""
    on_gpu = not lines[0].device.startswith("cpu")
    print(f"\n{lines[0].model}: {lines[0].config}; {lines[0].repeats} rounds")
    print(
        f"{'contender':<20}{'rate':>6}{'rows':>7}{'speed-up p20/p50/p80':>24}{'limit':>8}"
        f"{'share':>7}{'gate':>7}{'peak MB':>10}{'ms p50' if on_gpu else '':>10}"
    )
    for line in lines:
        spread = f"{line.speedup_p20:.2f} / {line.speedup_p50:.2f} / {line.speedup_p80:.2f}"
        limit = "" if line.limit is None else f"{line.limit:.2f}"
        share = "" if line.share_of_limit is None else f"{line.share_of_limit:.0%}"
        gate = "" if line.gate_overhead is None else f"{line.gate_overhead:.1%}"
        print(
            f"{line.contender:<20}{line.rate:>6.0%}{line.rows_differentiated:>7}{spread:>24}"
            f"{limit:>8}{share:>7}{gate:>7}{line.peak_memory_mb:>10.0f}"
            f"{f'{line.step_ms_p50:.2f}' if on_gpu else '':>10}",
            flush=True,
        )


def print_targets(lines: Sequence[Row]) -> None:
    """Print what the GPT-2 shape was to reach at 3%, and whether it did."""
    at = {
        line.contender: line
        for line in lines
        if line.model == TARGET_MODEL and math.isclose(line.rate, TARGET_RATE)
    }
    if EXACT not in at:
        print("\nThe targets are for model gpt2 at rate 3, which was not run.")
        return
    exact, free = at[EXACT], at[FREE]
    assert exact.share_of_limit is not None
    assert exact.gate_overhead is not None
    assert free.gate_overhead is not None
    print(f"\nTargets, {exact.config}, rate 3%, p50 inside one run:")
    for what, got, at_least in (
        ("exact screen, speed-up", exact.speedup_p50, TARGET_EXACT),
        ("free screen, speed-up", free.speedup_p50, TARGET_FREE),
    ):
        _print_target(what, f"{got:.2f}x", f">= {at_least}x", got >= at_least)
    share = exact.share_of_limit
    wanted = f">= {TARGET_SHARE:.0%}"
    _print_target("exact screen, share of limit", f"{share:.1%}", wanted, share >= TARGET_SHARE)
    for name, overhead in ((EXACT, exact.gate_overhead), (FREE, free.gate_overhead)):
        met = overhead < TARGET_OVERHEAD
        wanted = f"< {TARGET_OVERHEAD:.0%}"
        _print_target(f"{name} screen, gate overhead", f"{overhead:.1%}", wanted, met)
    for name, line in at.items():
        if name.startswith("kondo-gate"):
            print(f"  {name + ', speed-up':<30}{f'{line.speedup_p50:.2f}x':>8}  for comparison")


def _print_target(what: str, got: str, wanted: str, met: bool) -> None:
    print(f"  {what:<30}{got:>8}  wanted {wanted:<8} {'met' if met else 'MISSED'}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="in percent")
    parser.add_argument("--repeats", type=int, help="rounds; each model has its own default")
    parser.add_argument("--out", type=Path, help="CSV; default: data/step_<device>.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="tiny models; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    options.out = options.out or DATA / f"step_{options.device}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, write the CSV, draw it."""
    options = parse(arguments)
    device = torch.device(options.device)
    if options.quick:
        torch.set_num_threads(1)  # steps this small only wait for each other's threads
    where = environment(device, options.commit)
    rates = [percent / 100 for percent in options.rates]
    masked_name, package = masked_package()
    if package is None:
        print("kondo-gate is left out: neither it nor our stand-in for it can be imported.")
    elif masked_name.endswith("stand-in"):
        print("kondo-gate is not installed: our module with its API stands in for it.")
    if (load := os.getloadavg()[0]) > BUSY and not options.quick:
        print(
            f"Other work is running (load average {load:.1f}). With several threads, small steps "
            f"suffer most from it: wait, or set OMP_NUM_THREADS=1."
        )
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    lines: list[Row] = []
    for name in options.models:
        work = build(name, device, quick=options.quick)
        found = bench(work, rates, options.repeats or work.repeats, where)
        print_table(found)
        lines += found
        write_csv(options.out, lines)  # after each model, so that an interrupted run leaves some
    if not options.quick and device.type == "cpu":  # on a GPU the GPT-2 shape is all launches
        print_targets(lines)
    print(f"\nwrote {options.out}")
    if importlib.util.find_spec("kondo_lab") is None:
        print("no plot: kondo-lab is not installed; run benchmarks/plot.py where it is.")
        return
    from plot import draw

    print(f"wrote {draw(options.out)}")


if __name__ == "__main__":
    main()
