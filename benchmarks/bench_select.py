"""What choosing costs: `kondo.select` and its rows, by gate and number of units.

    python benchmarks/bench_select.py --device cuda           # data/select_cuda.csv
    python benchmarks/bench_select.py --quick --out /tmp/select.csv

Log-probs of sequences are given, as with a free screen; what is timed is everything up to the rows
to differentiate: the signal, the choice and the read of its size. `reads` counts how often the host
waited for the device within one call. The baseline is `Gate(rate=0.1)` in the same round.
"""

import argparse
import csv
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kondo
from harness import environment, percentile, synchronise

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "delight"
GATES: dict[str, kondo.BaseGate] = {
    BASELINE: kondo.Gate(rate=0.1),
    "variance": kondo.VarianceGate(rate=0.1),
    "unbiased": kondo.UnbiasedGate(rate=0.1),
    "noise": kondo.UnbiasedGate(noise=1.5),
    "max weight": kondo.UnbiasedGate(noise=1.5, max_weight=50.0),
}
# Rows and tokens of a row. The last is gated by token: 30 million units.
SHAPES = ((2048, 26, "sequence"), (16384, 256, "sequence"), (29_297, 1024, "token"))


def problem(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log-probs [N, T] and centred advantages [N], half of them exactly 0."""
    generator = torch.Generator(device).manual_seed(0)
    draws = torch.rand(num_rows, width, generator=generator, device=device)
    advantages = torch.randn(num_rows, generator=generator, device=device)
    solved = torch.rand(num_rows, generator=generator, device=device) < 0.5
    return draws.clamp(min=1e-6).log(), advantages.masked_fill(solved, 0.0)


def reads_of(call: Any) -> int:
    """Return how often the host waits for the device in one call; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def measure(shape: tuple[int, int, Any], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Time every gate in every round, in a random order."""
    num_rows, width, unit = shape
    log_probs, advantages = problem(num_rows, width, device)
    generator = torch.Generator().manual_seed(0) if unit == "sequence" else None

    def call(name: str) -> kondo.Selection:
        selection = kondo.select(
            log_probs, advantages, gate=GATES[name], unit=unit, generator=generator
        )
        selection.rows  # noqa: B018  # reads the device
        return selection

    kept = {name: call(name).counts for name in GATES}
    reads = {name: reads_of(lambda name=name: call(name)) for name in GATES}
    spent: dict[str, list[float]] = {name: [] for name in GATES}
    for _ in range(rounds):
        for name in random.sample(list(GATES), len(GATES)):
            synchronise(device)
            start = time.perf_counter()
            call(name)
            synchronise(device)
            spent[name].append(1e3 * (time.perf_counter() - start))
    lines = []
    for name, times in spent.items():
        ratios = [mine / base for mine, base in zip(times, spent[BASELINE], strict=True)]
        line: dict[str, Any] = {"gate": name, "options": repr(GATES[name]), "unit": unit}
        line |= {"rows": num_rows, "tokens": width, "units": kept[name].units}
        line |= {"units_kept": kept[name].units_kept, "reads": reads[name]}
        for label, values in (("ms", times), ("of_baseline", ratios)):
            line |= {
                f"{label}_p{share}": round(percentile(values, share / 100), 4)
                for share in (20, 50, 80)
            }
        lines.append(line | {"baseline": BASELINE, "rounds": rounds})
    return lines


def main() -> None:
    """Time every gate on every shape and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/data/select_cuda.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="small shapes, 3 rounds; needs --out")
    options = parser.parse_args()
    shapes = ((64, 8, "sequence"), (64, 8, "token")) if options.quick else SHAPES
    rounds = 3 if options.quick else options.rounds
    device = torch.device(options.device)
    lines = [line for shape in shapes for line in measure(shape, rounds, device)]
    shared = environment(device, options.commit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *shared], lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow(line | shared)
            print(" ".join(f"{name}={value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
