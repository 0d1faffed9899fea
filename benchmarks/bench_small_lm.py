"""Fixed costs of a step of a small language model, against an earlier checkout in the same run.

    python benchmarks/bench_small_lm.py --device cuda --against ../earlier --sizes 25m 85m
    python benchmarks/bench_small_lm.py --quick --out /tmp/small.csv

2048 rows of a prompt and an answer of unequal length, as `lm-rl` has them, random weights. Three
kinds of step, all with the same loss (PPO's clip) and the same gradient where nothing is skipped:

    plain    padded rows, logits, log_softmax, gather, backward: a loop without kondo
    dense    the same gradient by the engine: `gate=None`
    gated    10% of the rows, by variance, by delight or by an unbiased draw, log-probs already
             known; and an unbiased draw by a noise budget, on rewards that change from step to
             step, so that the number of rows does

Each checkout runs in its own process. They take turns, a round each, so that whatever else the
machine does hits both alike. `overhead` is a step's wall time less its forward and backward:
screen, select, compact and bookkeeping. Ratios are of a round's times.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
PROMPT, ANSWER, VOCAB, GROUP = 12, 14, 32, 8
CLIP = 0.2
MAX_TOKENS, GRAPH_TOKENS = 65_536, 16_384
THIS, OTHER = "this", "other"


class Work:
    """One model, one batch and the steps to time."""

    def __init__(self, size: str, rows: int, device: torch.device):
        import kondo
        from kondo import lm

        if hasattr(lm, "backward"):  # before the laboratory was a distribution of its own
            from kondo.lab.draws import Draws  # type: ignore[import-not-found]
            from kondo.lab.language.model import (  # type: ignore[import-not-found]
                StackedLM,
                compute_dtype,
            )
        else:
            from kondo_lab.models.architecture import compute_dtype
            from kondo_lab.models.decoder import StackedDecoder as StackedLM
            from kondo_lab.tasks.draws import Draws
        model = StackedLM(
            size,
            prompt_length=PROMPT,
            answer_length=ANSWER,
            num_tokens=VOCAB,
            dtype=compute_dtype(device),
        )
        self.device = device
        self._calls = 0
        self._kondo: Any = kondo  # of either checkout
        self._lm: Any = lm
        self.module = model.as_module(model.initialise(Draws([0], device)), 0)
        on_gpu = device.type == "cuda"
        self.policy = lm.CausalLM(
            self.module.backbone,
            head=self.module.head,
            max_tokens=MAX_TOKENS,
            attention="varlen" if on_gpu else "auto",
            graph_tokens=GRAPH_TOKENS if on_gpu else 0,
        )
        draws = torch.Generator().manual_seed(0)
        width = PROMPT + ANSWER
        self.tokens = torch.randint(VOCAB, (rows, width), generator=draws).to(device)
        lengths = torch.randint(ANSWER // 2, ANSWER + 1, (rows, 1), generator=draws)
        real = torch.arange(width) < PROMPT + lengths
        self.mask = (real & (torch.arange(width) >= PROMPT)).to(device)
        self.rows = lm.TokenRows(
            input_ids=self.tokens, attention_mask=real.to(device), completion_mask=self.mask
        )
        rewards = (torch.rand(rows, generator=draws) < 0.3).float().to(device)
        self.advantages = kondo.advantage.group_mean(rewards, GROUP)
        with torch.no_grad():
            self.known = self.policy.log_prob(self.rows)

    def loss(self, log_probs: Tensor, advantages: Tensor, *, old: Tensor) -> Tensor:
        """Return PPO's clipped loss per token."""
        found: Tensor = self._kondo.losses.ppo(log_probs, advantages, old, clip=CLIP)
        return found

    def plain(self) -> dict[str, float]:
        """Make the step that somebody without kondo writes."""
        size = max(1, MAX_TOKENS // self.tokens.shape[1])
        count, total = self.mask.sum(), self.tokens.new_zeros((), dtype=torch.float32)
        for start in range(0, len(self.tokens), size):
            some = slice(start, start + size)
            logits = self.module(self.tokens[some, :-1])[:, PROMPT - 1 :]
            taken = self.tokens[some, PROMPT:].unsqueeze(2)
            new = logits.log_softmax(dim=2).gather(2, taken).squeeze(2)
            mask = self.mask[some, PROMPT:]
            terms = self.loss(new, self.advantages[some], old=self.known[some, PROMPT:])
            part = (terms * mask).sum() / count
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
        return {"loss": float(total)}

    def dense(self) -> dict[str, float]:
        """Make the dense step through the engine."""
        if hasattr(self._lm, "backward"):
            return self._step(gate=_everything(self._kondo), screen=self.known)
        return self._step(gate=None)

    def variance(self) -> dict[str, float]:
        """Keep 10% of the rows by variance."""
        options: dict[str, Any] = {"gate": self._kondo.VarianceGate(rate=0.1)}
        if hasattr(self._lm, "backward"):
            options["priority"] = self._kondo.priorities.sequence_advantage
        return self._step(**options)

    def delight(self) -> dict[str, float]:
        """Keep 10% of the rows by delight, with a free screen."""
        return self._step(gate=self._kondo.Gate(rate=0.1), screen=self.known)

    def unbiased(self) -> dict[str, float]:
        """Draw 10% of the rows, with a free screen."""
        return self._step(gate=self._kondo.UnbiasedGate(rate=0.1), screen=self.known)

    def noise(self) -> dict[str, float]:
        """Draw rows by a noise budget; from step to step another share of the answers is right."""
        self._calls += 1
        right = 0.02 + 0.1 * (self._calls * 0.618 % 1)
        draws = torch.Generator().manual_seed(self._calls)
        rewards = (torch.rand(len(self.tokens), generator=draws) < right).float()
        before = self.advantages
        self.advantages = self._kondo.advantage.group_mean(rewards.to(self.device), GROUP)
        try:
            return self._step(gate=self._kondo.UnbiasedGate(noise=1.5), screen=self.known)
        finally:
            self.advantages = before

    def gradient_error(self) -> float:
        """Return |dense - plain| / |plain| of the gradients of both steps."""
        found = []
        for step in (self.plain, self.dense):
            self.module.zero_grad(set_to_none=True)
            step()
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            found.append(torch.cat([grad.flatten().double() for grad in grads]))
        plain, dense = found
        return float((dense - plain).norm() / plain.norm())

    def _step(self, **options: Any) -> dict[str, float]:
        backward = getattr(self._lm, "backward", self._kondo.backward)
        rows = self._lm.TokenRows(  # a loop has new ones every step
            input_ids=self.tokens,
            attention_mask=self.rows.attention_mask,
            completion_mask=self.mask,
        )
        report = backward(
            self.policy,
            rows,
            self.advantages,
            loss=self.loss,
            loss_inputs={"old": self.known},
            **options,
        )
        spent = report.seconds
        return {"loss": report.loss, **{name: spent[name] for name in spent}}


def _everything(kondo: Any) -> Callable[..., Any]:
    """Return the earlier checkout's gate that keeps all units: it had no `gate=None`."""

    def gate(values: Tensor, mask: Tensor, generator: Any = None) -> Any:
        number = torch.tensor(-torch.inf, dtype=torch.float64)
        weight = mask.to(values.dtype)
        return kondo.GateOutput(mask, weight, number, weight.mean().double(), weight)

    return gate


STEPS = ("plain", "dense", "variance", "delight", "unbiased", "noise")


def work(sizes: Sequence[str], rows: int, device: torch.device) -> None:
    """Serve rounds to the parent: a line in, a line of JSON out."""
    works = {size: Work(size, rows, device) for size in sizes}
    print(json.dumps({size: each.gradient_error() for size, each in works.items()}), flush=True)

    def timed(step: Callable[[], dict[str, float]], module: torch.nn.Module) -> dict[str, float]:
        module.zero_grad(set_to_none=True)
        wait(device)
        start = time.perf_counter()
        found = step()
        wait(device)
        return found | {"wall": time.perf_counter() - start}

    for line in sys.stdin:
        order = json.loads(line)
        print(
            json.dumps(
                {
                    f"{size} {name}": timed(getattr(works[size], name), works[size].module)
                    for size in sizes
                    for name in order
                }
            ),
            flush=True,
        )


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Process:
    """A checkout in a process of its own."""

    def __init__(self, checkout: Path, words: Sequence[str]):
        paths = [str(checkout / "src"), str(checkout / "lab" / "src")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Two processes that spin on all cores would measure each other.
            env={"OMP_NUM_THREADS": "4"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdout is not None
        self.gradient_errors: dict[str, float] = json.loads(self._process.stdout.readline())
        """Of the dense step, by size."""

    def round(self, order: Sequence[str]) -> dict[str, dict[str, float]]:
        """Run every step once, in this order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(order)) + "\n")
        self._process.stdin.flush()
        found: dict[str, dict[str, float]] = json.loads(self._process.stdout.readline())
        return found

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def overhead(taken: dict[str, float]) -> float:
    """Return what a step took beside its forward and backward."""
    return taken["wall"] - taken.get("forward", 0.0) - taken.get("backward", 0.0)


def rows_of(rounds: Sequence[dict[str, dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    """Return a line per checkout, size and step: times, overhead, and ratios inside rounds."""
    lines = []
    for version in rounds[0]:
        for key in rounds[0][version]:
            size, step = key.split()
            taken = [one[version][key] for one in rounds]
            plain = [one[version][f"{size} plain"] for one in rounds]
            pairs = zip(plain, taken, strict=True)
            line: dict[str, Any] = {"checkout": version, "size": size, "step": step}
            line |= _percentiles("ms", [1e3 * each["wall"] for each in taken])
            line |= _percentiles("overhead_ms", [1e3 * overhead(each) for each in taken])
            line |= _percentiles("of_plain", [a["wall"] / b["wall"] for a, b in pairs])
            if len(rounds[0]) > 1:
                other = [one[OTHER][key]["wall"] / one[version][key]["wall"] for one in rounds]
                line |= _percentiles("of_other", other)
            lines.append(line | {"loss": taken[0]["loss"]})
    return lines


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {f"{name}_p50": round(values[0], 4)}
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    named = zip((f"{name}_p20", f"{name}_p50", f"{name}_p80"), (1, 4, 7), strict=True)
    return {label: round(cuts[place], 4) for label, place in named}


def main() -> None:
    """Time both checkouts and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", default=["25m", "85m"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--against", type=Path, help="another checkout; its src/ is run")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/data/small_lm_cuda.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds; needs --out")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rows, options.rounds = ["toy"], 64, 2
    if options.serve:
        work(options.sizes, options.rows, torch.device(options.device))
        return
    words = ["--device", options.device, "--rows", str(options.rows), "--sizes", *options.sizes]
    checkouts = {THIS: ROOT}
    if options.against is not None:
        checkouts[OTHER] = options.against.resolve()
    processes = {name: Process(folder, words) for name, folder in checkouts.items()}
    steps = ["plain", *(step for step in options.steps if step != "plain")]  # the baseline
    turns = [steps[k:] + steps[:k] for k in range(len(steps))]
    for turn in turns[:3]:  # warm up: kernels are chosen, graphs recorded
        for process in processes.values():
            process.round(turn)
    rounds = [
        {name: process.round(turns[k % len(turns)]) for name, process in processes.items()}
        for k in range(options.rounds)
    ]
    for process in processes.values():
        process.stop()
    lines = rows_of(rounds)
    for line in lines:
        if line["step"] == "dense":
            line["gradient_error"] = processes[line["checkout"]].gradient_errors[line["size"]]
    write(options, lines)


def write(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Write the CSV and print it."""
    from harness import environment

    shared = environment(torch.device(options.device), options.commit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        names = [*lines[0], "gradient_error", "rows", "rounds", *shared]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow(line | {"rows": options.rows, "rounds": options.rounds} | shared)
            print(" ".join(f"{name}={value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
