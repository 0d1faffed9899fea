"""More seeds for two of PG's numbers in Figure 3, which hang on seeds that never name a digit.

    python -m kondo_lab.studies.mnist_dg.more_seeds results/mnist-dg-v2/more-seeds.csv

trains PG with seeds that the study does not run and writes each one's online error over the last
200 steps. About 10 minutes a number on one CPU core; a number that the file has is not run again.
"""

import csv
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from kondo_lab.studies.mnist_dg.analysis import END, ONLINE
from kondo_lab.studies.mnist_dg.run import series
from kondo_lab.studies.mnist_dg.settings import Settings
from kondo_lab.training import arms, image_bandits
from kondo_lab.training.arms import BaselineName
from kondo_lab.training.member import each_seed
from kondo_lab.training.part import Context

COLUMNS = ("series", "samples", "seed", f"{ONLINE} at the end")


class Number(NamedTuple):
    """One of PG's numbers, and the seeds that are added to it."""

    baseline: BaselineName
    samples: int
    seeds: range


NUMBERS = (Number("zero", 10, range(20, 60)), Number("constant", 3, range(20, 60)))
"""Those that differ from the paper's, and of which none of the study's seeds misses a digit."""


def ends(settings: Settings, number: Number) -> dict[int, float]:
    """Return seed -> online error at the end, on the CPU."""
    update = dataclasses.replace(arms.PG, baseline=number.baseline)
    several = each_seed(
        {series("PG", number.baseline): update},
        number.seeds.stop,
        learning_rate=settings.learning_rate,
        setting=number.samples,
    )
    steps = image_bandits.logged(settings.num_steps, settings.log_every, [])
    with tempfile.TemporaryDirectory() as folder:
        context = Context(
            device=torch.device("cpu"),
            progress=lambda share, note: None,
            stopped=lambda: False,
            checkpoint=Path(folder) / "part.pt",
        )
        found = image_bandits.train(
            settings,
            context,
            [member for member in several if member.seed in number.seeds],
            samples=number.samples,
            part="more seeds",
            num_steps=settings.num_steps,
            log_steps=steps,
        )
    late: dict[int, list[float]] = {}
    for run in found:
        for row in run.curve:
            if row["step"] > END * settings.num_steps:
                late.setdefault(run.seed, []).append(row[ONLINE])
    return {seed: statistics.fmean(values) for seed, values in late.items()}


def write(path: Path, settings: Settings, numbers: Sequence[Number] = NUMBERS) -> None:
    """Add the numbers that a file does not have yet."""
    had = _read(path)
    for number in numbers:
        name = series("PG", number.baseline)
        if any(row[:2] == [name, str(number.samples)] for row in had):
            continue
        found = ends(settings, number)
        had += [[name, str(number.samples), str(seed), f"{end:.6g}"] for seed, end in found.items()]
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *had])


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


if __name__ == "__main__":
    write(Path(sys.argv[1]), Settings())
