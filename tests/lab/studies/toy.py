"""A study that counts: small enough to work out by hand, slow only where it is told to wait.

Run as a script (`python toy.py OUT READY`), it waits in its second part to be stopped.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kondo_lab.evidence import plotting, progress, runner, statistics
from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Analysis, Estimate, FrontierPoint, Study
from kondo_lab.evidence.study import headline as line
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log

STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    num_seeds: int
    rates: tuple[float, ...] = (0.5, 1.0)
    price: float = math.inf


def settings(size, num_seeds):
    if num_seeds == 13:
        raise ValueError("num_seeds must not be 13, got 13; take 12.")
    return Settings(num_seeds=num_seeds or (2 if size == "small" else 3))


def value(seed, step):
    return 2.0 ** -(step / 2) * (1 + seed / 10)


def count(name, chosen, context, on_step, starts):
    """Count to STEPS; what was counted is kept in the checkpoint."""
    done = context.resume(lambda path: int(json.loads(path.read_text()))) or 0
    starts.append((name, done))
    for step in range(done, STEPS):
        if context.stopped():
            context.checkpoint.write_text(json.dumps(step))
            raise Stopped
        on_step(name, step, context)
        context.progress((step + 1) / STEPS, f"step [{step}]")
    log = Log(name, task="toy", learning_rate=1e-3)
    for seed in range(chosen.num_seeds):
        for step in range(STEPS + 1):
            error = {"error": value(seed, step)}
            log.add("PG", seed, error, step=step, rollouts=100 * step, passes=3 * step)
    return log.runs()


def analyse(records, chosen):
    error = statistics.final(records, "first", "PG", "error")
    figure, axes = plotting.grid(1, 1)
    plotting.line(axes[0, 0], statistics.curve(records, "first", "PG", "error"), "PG", ["PG"])
    lines = [
        line("Toy Fig 1", "PG", "error", 1e3, Estimate(error.mean, error.se, 2), expected=0.03)
    ]
    points = []
    if "second" in set(records["part"]):
        lines.append(line("beyond the paper", "PG", "parts", "", 2.0))
        points.append(FrontierPoint("toy", "PG", math.nan, "5% error", 870.5, 26.0, 2, 2, 0.03))
    findings = [f"PG ends at {error.mean:.3g}."]
    return Analysis(
        headline=lines,
        figures={"error": figure},
        findings=findings,
        frontier=points,
        claims=[by_lines("PG ends at 3%", lines)],
    )


def study(
    on_step: Callable[[str, int, Context], None] = lambda name, step, context: None,
    starts: list | None = None,
    **changes,
) -> Study:
    """Return the study; `on_step` is called at each step, `starts` gets (part, first step)."""
    log = [] if starts is None else starts

    def parts(chosen):
        def make(name):
            return Part(name=name, run=lambda context: count(name, chosen, context, on_step, log))

        return [make("first"), make("second"), make("third")]

    fixed = {
        "name": "toy",
        "title": "A toy",
        "paper": "Toy Fig 1",
        "claim": "Counting works.",
        "differences": ("none worth telling",),
        "version": 1,
        "settings": settings,
        "parts": parts,
        "analyse": analyse,
    }
    return Study(**fixed | changes)


def order(out: Path, chosen: Study | None = None, **changes) -> runner.Order:
    """Return an order to run it on the CPU."""
    fixed = {
        "study": chosen or study(),
        "size": "small",
        "num_seeds": None,
        "out": out,
        "device": torch.device("cpu"),
        "command": "kondo run toy --small",
    }
    return runner.Order(**fixed | changes)


def _wait_in_second(name, step, context):
    if name == "second" and step == 4:
        Path(sys.argv[2]).touch()
        patience = time.monotonic() + 60
        while not context.stopped() and time.monotonic() < patience:
            time.sleep(0.01)


def main() -> int:
    """Run it to be interrupted."""
    outcome = runner.run(order(Path(sys.argv[1]), study(_wait_in_second)), progress.make_console())
    return 130 if outcome.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
