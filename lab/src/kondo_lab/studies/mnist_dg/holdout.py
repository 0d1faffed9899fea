"""Hold-out of Figures 3 and 4: seeds that no choice of the study was made with.

    python -m kondo_lab.studies.mnist_dg.holdout results/mnist-dg-v2/holdout-samples-1.jsonl.gz \
        --samples 1 --seeds 30 70 --minutes 5 --commit $(git rev-parse HEAD)

trains chunks of seeds and adds a JSON line per run: arm, k, learning rate, seed, task, device,
commit, and a curve of (step, rollouts, passes, metrics by name). Chunks that the file has are not
run again; none is begun that would end after the minutes. `holdout-rules.csv` beside the file says
when a number agrees with the paper. It was written before the runs. The placebo of a row is another
series at the same x: a rule that placebos pass as often is no rule.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kondo_lab.evidence import records
from kondo_lab.studies.mnist_dg import paper
from kondo_lab.studies.mnist_dg.run import compared_at, cosine_gaps
from kondo_lab.studies.mnist_dg.settings import SMALL, Settings
from kondo_lab.training import image_bandits
from kondo_lab.training.member import each_seed
from kondo_lab.training.part import Context
from kondo_lab.training.record import Run

CHUNK = 30
"""Seeds that train side by side."""


def runs(
    settings: Settings, samples: int, seeds: Sequence[int], device: torch.device, commit: str
) -> list[Run]:
    """Train every arm of a part of the study with these seeds and return the runs."""
    arms = compared_at(samples)
    members = each_seed(arms, seeds, learning_rate=settings.learning_rate, setting=samples)
    step = settings.num_steps // settings.num_probes
    with tempfile.TemporaryDirectory() as folder:
        context = Context(
            device=device,
            progress=lambda share, note: None,
            stopped=lambda: False,
            checkpoint=Path(folder) / "part.pt",
        )
        found = image_bandits.train(
            settings,
            context,
            members,
            samples=samples,
            part=f"samples-{samples}",
            num_steps=settings.num_steps,
            log_steps=image_bandits.logged(
                settings.num_steps, settings.log_every, paper.FIG_2_STEPS
            ),
            evaluate_steps=range(step, settings.num_steps + 1, step),
            probe=partial(cosine_gaps, num_batches=settings.probe_batches),
        )
    about = {
        "study": "mnist-dg",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit,
    }
    order = {(arm, seed): place for place, (arm, seed) in enumerate(product(arms, seeds))}
    found.sort(key=lambda run: order[run.arm, run.seed])
    return [dataclasses.replace(run, about=about) for run in found]


def add(
    path: Path, settings: Settings, samples: int, seeds: range, minutes: float, **run: Any
) -> None:
    """Add the runs of these seeds to a file, chunk by chunk, until the time is up."""
    had = {line["seed"] for line in records.lines(path)} if path.exists() else set()
    missing = [seed for seed in seeds if seed not in had]
    start, longest = time.monotonic(), 0.0
    for first in range(0, len(missing), CHUNK):
        begun = time.monotonic()
        if begun - start + longest > 60 * minutes:
            print(f"no time left for the seeds from {missing[first]} on")
            break
        chunk = missing[first : first + CHUNK]
        records.add(path, map(records.line, runs(settings, samples, chunk, **run)))
        longest = max(longest, time.monotonic() - begun)
        print(f"seeds {chunk[0]} to {chunk[-1]}: {longest:.0f} s", flush=True)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int, default=1, help="per image, S")
    parser.add_argument("--seeds", type=int, nargs=2, default=(30, 130), metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--small", action="store_true", help="does it run? digits, seconds")
    asked = parser.parse_args()
    add(
        asked.path,
        SMALL if asked.small else Settings(),
        asked.samples,
        range(*asked.seeds),
        asked.minutes,
        device=torch.device(asked.device),
        commit=asked.commit,
    )


if __name__ == "__main__":
    main()
