"""How many steps fewer than PG a method needs: the factor between a step's and a run's speed-up."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from kondo_lab.studies.measured.run import DG, EXACT, FREE

RESULTS = Path("results")
"""Where this repository keeps its results, seen from its root."""
STUDY, FRONTIER = "mnist-kondo", "frontier.csv"
TARGET = "5% test error"

PAPER_DG, PAPER_GATE, PAPER_RATE = 2.25, 1.41, 0.03
"""Kondo Fig 3 at a cost ratio of 0, where samples alone are paid for, and its gate rate."""


class StepGain(NamedTuple):
    """PG's steps / the method's steps until both reach the target."""

    dg: float
    gate: float
    source: str
    """In words."""

    @property
    def by_series(self) -> dict[str, float]:
        """DG, and DG-K with either screen: both keep the same rows."""
        return {DG: self.dg, FREE: self.gate, EXACT: self.gate}

    def counted(self, ratio: float) -> dict[str, float]:
        """Return the speed-ups to the target by counted passes, a backward costing c = ratio.

            DG: gain,   DG-K: gain (1 + c) / (1 + 0.03 c)

        The curve of Kondo Fig 3 is that of the paper's gain, 1.41. The paper's gate pays a forward
        for every sample, as an exact screen does.

        Example:
            >>> from kondo_lab.studies.measured.quality import StepGain
            >>> StepGain(2.25, 1.41, "the paper").counted(4.0)
            {'DG': 2.25, 'DG-K 3% exact screen': 6.294642857142857}
        """
        return {DG: self.dg, EXACT: self.gate * (1 + ratio) / (1 + PAPER_RATE * ratio)}


def step_gain(results: Path = RESULTS) -> StepGain:
    """Return our own numbers where `results` holds the study mnist-kondo, else the paper's.

    Raises:
        ValueError: the study is there but lacks a series, or one that never reached the target.
    """
    prefix = f"{STUDY}-v"
    folders = sorted(results.glob(f"{prefix}*"), key=lambda f: int(f.name.removeprefix(prefix)))
    if not folders or not (path := folders[-1] / FRONTIER).exists():
        return StepGain(PAPER_DG, PAPER_GATE, "the paper's Fig 3")
    table = pd.read_csv(path)
    samples = table[table["target"] == TARGET].set_index("series")["forward"].dropna()
    needed = ("PG", "DG", f"DG-K {100 * PAPER_RATE:g}%")
    missing = [series for series in needed if series not in samples]
    if missing:
        raise ValueError(
            f"results: {path} must tell the samples to {TARGET} of {', '.join(needed)}, it lacks "
            f"{', '.join(missing)}; run {STUDY} again or move its folder away."
        )
    pg, dg, gate = (float(samples[series]) for series in needed)
    return StepGain(pg / dg, pg / gate, f"our {folders[-1].name}")
