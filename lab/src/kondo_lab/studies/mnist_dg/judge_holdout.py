"""Verdicts on the hold-out, by its rules: the numbers of the paper beside ours and a placebo's.

    python -m kondo_lab.studies.mnist_dg.judge_holdout results/mnist-dg-v2

reads holdout-rules.csv and holdout-samples-*.jsonl.gz of that folder, writes holdout-verdicts.csv.
"""

import sys
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from kondo_lab.evidence import records
from kondo_lab.studies.mnist_dg.analysis import END, ONLINE
from kondo_lab.studies.mnist_dg.settings import Settings

MARGIN = 0.1
Curves: TypeAlias = dict[tuple[int, str], list[list[dict[str, float]]]]
Verdict: TypeAlias = Literal["match", "different", "noisy", "too few seeds"]


def _number(curve: list[dict[str, float]], rule: pd.Series) -> float:
    """Return what a rule is about: the error over the last 2% of the steps, or a metric at one."""
    if rule["x_name"] == "step":
        return next(row[rule["metric"]] for row in curve if row["step"] == rule["x"])
    late = END * Settings().num_steps
    return float(np.mean([row[ONLINE] for row in curve if row["step"] > late]))


def verdict(values: list[float], expected: float, least_seeds: int) -> Verdict:
    """Return whether a mean is within 10% of `expected`, or outside by two standard errors."""
    if len(values) < least_seeds:
        return "too few seeds"
    apart = abs(float(np.mean(values)) - expected) - MARGIN * expected
    if apart <= 0:
        return "match"
    return "different" if apart > 2 * np.std(values, ddof=1) / len(values) ** 0.5 else "noisy"


def judge(rules: pd.DataFrame, curves: Curves) -> pd.DataFrame:
    """Return the rules with our numbers, their verdicts, and those of the placebos."""
    found = []
    for _, rule in rules.iterrows():
        ours, placebo = (
            [_number(curve, rule) for curve in curves[rule["samples"], rule[name]]]
            for name in ("series", "placebo")
        )
        known, least = rule["expected"], rule["least_seeds"]
        found.append(
            {
                "seeds": len(ours),
                "mean": np.mean(ours),
                "se": np.std(ours, ddof=1) / len(ours) ** 0.5,
                "median": np.median(ours),
                "verdict": verdict(ours, known, least),
                "placebo_mean": np.mean(placebo),
                "placebo_verdict": verdict(placebo, known, least),
            }
        )
    return rules.drop(columns="rule").join(pd.DataFrame(found, index=rules.index))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    several: Curves = {}
    for path in sorted(folder.glob("holdout-samples-*.jsonl.gz")):
        samples = int(path.name.removesuffix(".jsonl.gz").rpartition("-")[2])
        for run in records.lines(path):
            several.setdefault((samples, run["arm"]), []).append(run["curve"])
    judged = judge(pd.read_csv(folder / "holdout-rules.csv"), several)
    out = folder / "holdout-verdicts.csv"
    judged.to_csv(out, index=False, float_format="%.4g", lineterminator="\n")
