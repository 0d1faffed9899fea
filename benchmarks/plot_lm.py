"""Draw CSVs of bench_lm_step: speed-up by rate, by batch size, and memory.

    python benchmarks/plot_lm.py results/lm-step-v1/*.csv

In: one or more CSVs. Out: a PNG beside the first, of its name, or steps.png if they are several.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

STYLES = {
    "free": ("free screen", "#009E73", "o"),
    "exact": ("exact screen", "#0072B2", "s"),
    "fp8": ("float8 draft", "#CC79A7", "D"),
    "plain": ("plain dense", "#D55E00", "^"),
    "trl": ("TRL's log-probs", "#E69F00", "v"),
}
SHOWN_RATE = "0.03"

Line = dict[str, str]


def draw(*paths: Path) -> Path:
    """Draw one row of panels per model; return the PNG's path."""
    lines: list[Line] = []
    for path in paths:
        with path.open(newline="") as file:
            lines += csv.DictReader(file)
    models = list(dict.fromkeys(line["model"] for line in lines))
    figure, axes = plt.subplots(len(models), 3, figsize=(13, 4.2 * len(models)), squeeze=False)
    for row, model in zip(axes, models, strict=True):
        own = [line for line in lines if line["model"] == model]
        _by_rate(row[0], own)
        _by_rows(row[1], own)
        _memory(row[2], own)
        row[0].set_title(model, loc="left", fontweight="bold")
    axes[0][0].legend(fontsize=8)
    first = lines[0]
    figure.suptitle(
        f"One learner step over the best dense: p50, bars p20 to p80, all ratios inside one run\n"
        f"{first['device']}, torch {first['torch']}, commit {first['commit']}, {first['date']}",
        fontsize=9,
    )
    figure.tight_layout()
    target = paths[0].with_name("steps.png" if len(paths) > 1 else f"{paths[0].stem}.png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def _by_rate(axis: Axes, lines: list[Line]) -> None:
    """Speed-up against rate at the batch measured most; token units dashed; limits dotted."""
    rows = _main_rows(lines)
    for name, (label, colour, marker) in STYLES.items():
        for unit, dash in (("sequence", "-"), ("token", "--")):
            own = [
                line
                for line in lines
                if (line["contender"], line["unit"], int(line["rows"])) == (name, unit, rows)
                and float(line["rate"]) < 1
            ]
            if not own:
                continue
            xs = [100 * float(line["rate"]) for line in own]
            text = label if unit == "sequence" else f"{label}, tokens"
            _errorbar(axis, xs, own, text, colour, marker, dash)
            limits = [float(line["limit"]) for line in own if line["limit"]]
            if unit == "sequence" and len(limits) == len(xs):
                axis.plot(xs, limits, ":", color=colour)
    _logs(axis, "rate, %", f"speed-up, {rows} rows (dotted: cost model)")


def _by_rows(axis: Axes, lines: list[Line]) -> None:
    """Speed-up at 3% against the batch's tokens."""
    for name, (label, colour, marker) in STYLES.items():
        own = [
            line
            for line in lines
            if line["contender"] == name
            and line["unit"] == "sequence"
            and line["rate"] in (SHOWN_RATE, "1")
        ]
        own.sort(key=lambda line: int(line["tokens"]))
        if own:
            xs = [float(line["tokens"]) for line in own]
            _errorbar(axis, xs, own, label, colour, marker, "-")
    _logs(axis, "tokens of the batch", "speed-up at 3%; plain and TRL: all")


def _memory(axis: Axes, lines: list[Line]) -> None:
    """Peak memory by contender, 3% where there is a rate."""
    rows = _main_rows(lines)
    peaks = {
        line["contender"]: float(line["peak_memory_mb"]) / 1024
        for line in lines
        if int(line["rows"]) == rows
        and line["rate"] in (SHOWN_RATE, "1")
        and line["unit"] == "sequence"
    }
    axis.barh(list(peaks), list(peaks.values()), color="#5a5a5a")
    axis.set_xlabel(f"peak memory, GiB, {rows} rows, 3%")


def _main_rows(lines: list[Line]) -> int:
    return int(Counter(line["rows"] for line in lines).most_common(1)[0][0])


def _errorbar(
    axis: Axes, xs: list[float], own: list[Line], text: str, colour: str, marker: str, dash: str
) -> None:
    middle = [float(line["speedup_p50"]) for line in own]
    low = [max(0.0, m - float(line["speedup_p20"])) for m, line in zip(middle, own, strict=True)]
    high = [max(0.0, float(line["speedup_p80"]) - m) for m, line in zip(middle, own, strict=True)]
    axis.errorbar(xs, middle, [low, high], label=text, color=colour, marker=marker, linestyle=dash)


def _logs(axis: Axes, xlabel: str, ylabel: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.axhline(1, color="#5a5a5a", linewidth=0.8)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    print(draw(*map(Path, sys.argv[1:])))
