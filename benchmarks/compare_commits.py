"""Two checkouts timed in turns: is a step of the new one faster, and by how much?

    python benchmarks/compare_commits.py OLD [NEW] --suite step small_lm ranks [--out F]
    python benchmarks/compare_commits.py OLD [NEW] --suite step small_lm lm_step --device cuda
    python benchmarks/compare_commits.py OLD OLD --suite step     # both alike: 1.0 lies inside

    step        gated steps of small MLPs
    small_lm    bench_small_lm's steps; `plain` is a loop without kondo, the same in both
    lm_step     a CausalLM around a Qwen2 with random weights, free and exact screen
    ranks       the MLPs' steps with one gate for two processes, over gloo
    lab         steps of the laboratory's populations, as bench_lab.py has them

A checkout works in a process of its own, or in one per rank. Old and new take turns, a short block
of steps each, in an order drawn anew every time, so that whatever else the machine does hits both
alike; nobody works in between. One process can be some per cent faster than another of the same
code, by where its memory lies, for as long as it lives. So several pairs of processes are compared:
`ratio` is the mean over pairs (of logarithms) of the pair's median of old / new inside one round,
with Student's 95% interval. Above 1, the new checkout is faster. The job `all` is the suite's mean.

What is timed: `step`, the wall clock; on a CPU also `processor`, the time that the process was
running, which other work disturbs less; with ranks also `coordination`, the stages select,
coordinate and wait of the rank that took least for them. Before that, both checkouts do each step
once with the same draws: `gradient_difference` is how far apart the norms of their gradients are.
"""

import argparse
import csv
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commit_jobs import SUITES, Worker
from harness import environment, percentile

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = SIDES = ("old", "new")
WARM_UPS, MOST_STEPS = 2, 200
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The t of a 95% interval, for 2 to 10 pairs."""
GRADIENT_TOLERANCE = 1e-3


class Pair:
    """Both checkouts at work, and what they took for each job."""

    def __init__(self, words: Sequence[str], options: argparse.Namespace, folder: str, number: int):
        files = Path(folder)
        self.workers = {
            OLD: Worker(options.old, words, files / f"{OLD}-{number}"),
            NEW: Worker(options.new, words, files / f"{NEW}-{number}"),
        }
        self.taken: dict[tuple[str, str, str], list[float]] = {}
        """Seconds per step, round by round, of (job, what was timed, side)."""

    def warm_up(self, name: str) -> float:
        """Run a few steps; return the slower one's seconds per step."""
        for _ in range(WARM_UPS):
            slowest = max([worker.block(name, 2)["step"] for worker in self.workers.values()])
        return slowest

    def round(self, name: str, steps: int, order: Sequence[str]) -> None:
        """Time one block on either side."""
        for side in order:
            for what, seconds in self.workers[side].block(name, steps).items():
                self.taken.setdefault((name, what, side), []).append(seconds)

    def log_ratio(self, name: str, what: str) -> float:
        """Return the logarithm of the median old / new of a round."""
        taken = zip(self.taken[name, what, OLD], self.taken[name, what, NEW], strict=True)
        return math.log(percentile([old / new for old, new in taken], 0.5))


def compare(suite: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a suite in both checkouts; return a line per job and per kind of time."""
    words = [suite, "--device", options.device, *(["--quick"] if options.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(words, options, folder, number) for number in range(options.pairs)]
        workers = [worker for pair in pairs for worker in pair.workers.values()]
        try:
            old, new, *_ = [worker.hello() for worker in workers]
            steps, rounds = take_turns(pairs, list(old), options)
        finally:
            for worker in workers:
                worker.stop()
    lines = []
    for line in summary(pairs):
        shared = {"suite": suite, "pairs": len(pairs), "rounds": rounds} | line
        if (name := line["job"]) in steps:
            shared["config"], shared["steps_per_block"] = old[name]["config"], steps[name]
            shared["gradient_difference"] = new[name]["gradient"] / old[name]["gradient"] - 1
        lines.append(shared)
    return lines


def take_turns(
    pairs: Sequence[Pair], names: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, int], int]:
    """Time rounds of everything; return the steps of a block by job, and the number of rounds."""
    steps = {}
    for name in names:
        slowest = max([pair.warm_up(name) for pair in pairs])
        steps[name] = max(1, min(MOST_STEPS, round(options.block_ms / 1e3 / slowest)))
    shuffle, order = random.Random(0).shuffle, list(SIDES)
    start, rounds = time.monotonic(), 0
    while rounds < options.rounds and time.monotonic() - start < options.seconds:
        for pair in pairs:
            for name in names:
                shuffle(order)
                pair.round(name, steps[name], order)
        rounds += 1
    return steps, rounds


def summary(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return ratios and milliseconds by job and kind of time, and the ratios' mean over jobs."""
    lines, logs = [], dict[str, list[Tensor]]()
    for name, what in dict.fromkeys((name, what) for name, what, _ in pairs[0].taken):
        found = torch.tensor([pair.log_ratio(name, what) for pair in pairs], dtype=torch.float64)
        logs.setdefault(what, []).append(found)
        line = {"job": name, "what": what, **interval(found)}
        for side in SIDES:
            seconds = [each for pair in pairs for each in pair.taken[name, what, side]]
            for cut in (20, 50, 80):
                line[f"{side}_ms_p{cut}"] = 1e3 * percentile(seconds, cut / 100)
        lines.append(line)
    means = {what: torch.stack(found).mean(0) for what, found in logs.items()}
    return lines + [{"job": "all", "what": what, **interval(means[what])} for what in means]


def interval(log_ratios: Tensor) -> dict[str, float]:
    """Return the ratio and its 95% interval, from one number per pair."""
    middle = float(log_ratios.mean())
    half = STUDENT[len(log_ratios) - 2] * float(log_ratios.std()) / math.sqrt(len(log_ratios))
    return {
        "ratio": math.exp(middle),
        "ratio_low": math.exp(middle - half),
        "ratio_high": math.exp(middle + half),
    }


def commit_of(checkout: Path) -> str:
    """Return the checkout's commit, with `+changes` if its code differs; `unknown` without git."""
    git = ["git", "--no-optional-locks", "-C", str(checkout)]
    try:
        asked = [["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "src", "lab"]]
        commit, changed = (subprocess.check_output([*git, *a], text=True).strip() for a in asked)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if changed else commit


def print_lines(lines: Sequence[dict[str, Any]]) -> None:
    """Print a suite's ratios."""
    first = lines[0]
    print(f"\n{first['suite']}: {first['pairs']} pairs, {first['rounds']} rounds; old / new")
    print(f"{'job':<22}{'what':<14}{'old ms p50':>11}{'new ms p50':>11}{'ratio':>8}  95% interval")
    for line in lines:
        times = "".join(f"{line.get(f'{side}_ms_p50', math.nan):>11.3f}" for side in SIDES)
        print(
            f"{line['job']:<22}{line['what']:<14}{times}{line['ratio']:>8.3f}  "
            f"{line['ratio_low']:.3f} to {line['ratio_high']:.3f}"
        )
        if not abs(line.get("gradient_difference", 0.0)) <= GRADIENT_TOLERANCE:
            print(f"  Gradients differ: their norms by {line['gradient_difference']:.1e}.")
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout; its src/ and lab/src/ are run")
    parser.add_argument("new", type=Path, nargs="?", default=ROOT, help="default: this one")
    parser.add_argument("--suite", nargs="+", choices=tuple(SUITES), default=["step"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, choices=range(2, 11), default=6, help="of processes")
    parser.add_argument("--rounds", type=int, default=40, help="of each pair")
    parser.add_argument("--seconds", type=float, default=120, help="after which no round begins")
    parser.add_argument("--block-ms", type=float, default=20, help="length of a turn")
    parser.add_argument("--out", type=Path, help="CSV; default: data/compare_commits_<device>.csv")
    parser.add_argument("--commits", nargs=2, metavar=SIDES, help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="tiny, 2 rounds; needs --out")
    options = parser.parse_args(arguments)
    if options.quick:
        if options.out is None:
            parser.error("--quick needs --out: its numbers must not replace the real ones.")
        options.pairs, options.rounds, options.block_ms = 2, 2, 1
    if options.device == "cuda" and "ranks" in options.suite:
        parser.error("ranks runs on a CPU only: leave out --device cuda.")
    options.old, options.new = options.old.resolve(), options.new.resolve()
    for checkout in (options.old, options.new):
        if not (checkout / "src" / "kondo" / "__init__.py").is_file():
            parser.error(f"{checkout} is no checkout of this repository: it has no src/kondo.")
    options.out = options.out or ROOT / f"benchmarks/data/compare_commits_{options.device}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, and write the CSV after each suite."""
    options = parse(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(1)  # as in the processes that are timed
    old, new = options.commits or (commit_of(options.old), commit_of(options.new))
    where = environment(device, new)
    where = {"old_commit": old, "new_commit": where.pop("commit")} | where
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    lines: list[dict[str, Any]] = []
    for suite in options.suite:
        lines += (found := compare(suite, options))
        print_lines(found)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*lines[0], *where], lineterminator="\n")
            writer.writeheader()
            for line in lines:
                cells = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()}
                writer.writerow(cells | where)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
