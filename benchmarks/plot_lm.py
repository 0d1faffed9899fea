"""Draw CSVs of bench_lm_step: speed-up by rate, at 3% by model and batch, and memory.

    python benchmarks/plot_lm.py results/lm-step-v1/*.csv

In: one or more CSVs. Out: a PNG beside the first, of its name, or steps.png if they are several.
"""

import csv
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kondo_lab.evidence import plotting

# Contender -> name, colour, marker; in the order of rows and legend.
STYLES = {
    "free": ("free screen", plotting.VERMILLION, "o"),
    "fp8": ("float8 draft", plotting.PINK, "D"),
    "exact": ("exact screen", plotting.ORANGE, "s"),
    "all": ("exact screen of all rows", plotting.BROWN, "P"),
    "dense": ("dense", plotting.BLACK, "|"),
    "trl": ("dense, TRL's log-probs", plotting.SKY, "v"),
    "plain": ("dense, plain PyTorch", plotting.BLUE, "^"),
}
BY_RATE = ("free", "fp8", "exact")
"""Contenders whose speed-up is drawn against the rate."""
SHOWN_RATE = "0.03"

Line = dict[str, str]


def draw(*paths: Path) -> Path:
    """Draw speed-up by rate, speed-up at 3% and memory; return the PNG's path."""
    lines: list[Line] = []
    for path in paths:
        with path.open(newline="") as file:
            lines += csv.DictReader(file)
    first = lines[0]
    main = [line for line in lines if line["model"] == first["model"]]
    at_rate = [line for line in lines if line["rate"] in (SHOWN_RATE, "1")]
    at_rate = [line for line in at_rate if line["unit"] == "sequence"]
    with plotting.style():
        figure, ((by_rate, by_batch, memory),) = plotting.grid(1, 3, width=4.2, height=4.6)
        _by_rate(by_rate, main)
        _by_batch(by_batch, at_rate)
        _memory(memory, at_rate)
        plotting.head(
            figure,
            "One learner step of a language model over the best dense step",
            "Medians, bars p20 to p80, ratios inside one run. Dashed: token units. Dotted: cost "
            f"model.\n{first['device']}, torch {first['torch']}, commit {first['commit']}, "
            f"{first['date']}",
            legend=by_batch,
        )
        target = paths[0].with_name("steps.png" if len(paths) > 1 else f"{paths[0].stem}.png")
        plotting.save(figure, target)
    return target


def _by_rate(axis: Axes, lines: list[Line]) -> None:
    """Speed-up against rate at the batch measured most; token units dashed; limits dotted."""
    rows = _main_rows(lines)
    for name in BY_RATE:
        label, colour, marker = STYLES[name]
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
            middle, bars = _percentiles(own)
            axis.errorbar(xs, middle, bars, label=text, color=colour, marker=marker, ls=dash)
            limits = [float(line["limit"]) for line in own if line["limit"]]
            if unit == "sequence" and len(limits) == len(xs):
                axis.plot(xs, limits, ":", color=colour)
    axis.axhline(1, color=plotting.DARK, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="rate: share kept, % (log scale)")
    plotting.ratio_ticks(axis.yaxis)
    plotting.ratio_ticks(axis.xaxis, "")
    axis.set_ylabel("speed-up (log scale): higher is better")
    axis.set_title(f"{lines[0]['model']}, {rows} rows: by rate")
    plotting.label_ends(axis)


def _batches(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Return every (model, tokens) that was measured, the smallest first."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    found = {(line["model"], int(line["tokens"])) for line in lines}
    return sorted(found, key=lambda own: (models.index(own[0]), own[1]))


def _by_batch(axis: Axes, lines: list[Line]) -> None:
    """Speed-up at 3% of every model and batch, a row each."""
    batches = _batches(lines)
    for name, (label, colour, marker) in STYLES.items():
        by_batch = {
            (line["model"], int(line["tokens"])): line
            for line in lines
            if line["contender"] == name
        }
        places = [place for place, batch in enumerate(batches) if batch in by_batch]
        if places:
            middle, bars = _percentiles([by_batch[batches[place]] for place in places])
            axis.errorbar(
                middle, places, xerr=bars, fmt=marker, color=colour, label=label, markersize=6
            )
    plotting.rows_axis(
        axis, [f"{model}\n{tokens / 1000:,.0f}k tokens" for model, tokens in batches]
    )
    axis.axvline(1, color=plotting.DARK, linewidth=1)
    axis.set(xscale="log", xlabel="speed-up (log scale): right is better")
    plotting.ratio_ticks(axis.xaxis)
    axis.set_title("at 3%: by model and batch")


def _memory(axis: Axes, lines: list[Line]) -> None:
    """Peak memory at 3% of each model, at the batch measured most."""
    rows = _main_rows(lines)
    own = [line for line in lines if int(line["rows"]) == rows and line["contender"] in STYLES]
    names = [name for name in STYLES if name in {line["contender"] for line in own}]
    models = list(dict.fromkeys(line["model"] for line in own))
    for model, marker in zip(models, ("o", "s", "D", "^"), strict=False):
        of_model = {line["contender"]: line for line in own if line["model"] == model}
        peaks = [(place, of_model[name]) for place, name in enumerate(names) if name in of_model]
        gibs = [float(line["peak_memory_mb"]) / 1024 for _, line in peaks]
        places = [place for place, _ in peaks]
        fill = plotting.DARK if model == models[0] else "white"
        look: dict[str, Any] = {"color": plotting.DARK, "markerfacecolor": fill}
        axis.plot(gibs, places, marker, markersize=6, label=model, **look)
    axis.legend(loc="upper right")
    plotting.rows_axis(axis, [STYLES[name][0] for name in names])
    axis.set_xlim(left=0)
    axis.set(xlabel="peak memory, GiB: left is better", title=f"memory at 3%, {rows} rows")


def _main_rows(lines: list[Line]) -> int:
    return int(Counter(line["rows"] for line in lines).most_common(1)[0][0])


def _percentiles(own: Sequence[Line]) -> tuple[list[float], list[list[float]]]:
    """Return the medians, and how far below and above them p20 and p80 are."""
    middle = [float(line["speedup_p50"]) for line in own]
    low = [max(0.0, m - float(line["speedup_p20"])) for m, line in zip(middle, own, strict=True)]
    high = [max(0.0, float(line["speedup_p80"]) - m) for m, line in zip(middle, own, strict=True)]
    return middle, [low, high]


if __name__ == "__main__":
    print(draw(*map(Path, sys.argv[1:])))
