"""Draw a CSV of the step benchmark: speed-up against rate, with the cost model's limits.

    python benchmarks/plot.py [benchmarks/data/step_cpu.csv ...]

In: the CSV. Out: a PNG of the same name beside it.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

DATA = Path(__file__).resolve().parent / "data"

# Contender -> label, colour (Okabe-Ito: told apart without full colour vision), marker.
STYLES = {
    "free": ("ours, free screen", "#009E73", "o"),
    "exact": ("ours, exact screen", "#0072B2", "s"),
    "kondo-gate": ("masked dense", "#D55E00", "^"),
}
TICKS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0)

Line = dict[str, str]


def draw(path: Path) -> Path:
    """Draw one panel per model; return the PNG's path."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    models = list(dict.fromkeys(line["model"] for line in lines))
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.6 * len(models), 4.8), sharey=True, squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        _panel(axis, [line for line in lines if line["model"] == model])
    axes[0][0].set_ylabel("speed-up over dense (log)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    first = lines[0]
    figure.suptitle(
        f"One learner step: p50, bars p20 to p80, all ratios inside one run\n"
        f"{first['device']}, threads: {first['threads']}, torch {first['torch']}, "
        f"commit {first['commit']}, {first['date']}",
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def _panel(axis: Axes, lines: list[Line]) -> None:
    for name, (label, colour, marker) in STYLES.items():
        points = [line for line in lines if line["contender"].startswith(name)]
        if not points:
            continue
        if name == "kondo-gate":
            label = f"{label} ({points[0]['contender']})"
        middle = [float(point["speedup_p50"]) for point in points]
        low = [m - float(p["speedup_p20"]) for m, p in zip(middle, points, strict=True)]
        high = [float(p["speedup_p80"]) - m for m, p in zip(middle, points, strict=True)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
        axis.errorbar(
            [_rate(point) for point in points],
            middle,
            yerr=[low, high],
            label=label,
            capsize=3,
            linewidth=1,
            **style,
        )
    _limits(axis, lines)
    axis.axhline(1.0, color="0.5", linewidth=0.8, zorder=0, label="dense")
    axis.set(xscale="log", yscale="log", xlabel="rows kept (log)")
    axis.set_xticks(TICKS, [f"{tick:.0%}" for tick in TICKS])
    axis.minorticks_off()
    axis.set_yticks([0.5, 1, 2, 3, 5, 10, 20, 50, 100])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.grid(alpha=0.25)
    axis.set_title(f"{lines[0]['model']}\n{_wrap(lines[0]['config'])}", fontsize=8)


def _limits(axis: Axes, lines: list[Line]) -> None:
    """Draw the cost model: 1 / (F + rho) and 1 / rho, with F as a share of dense."""
    (forward,) = [line for line in lines if line["contender"] == "forward"]
    share = 1 / float(forward["speedup_p50"])
    lowest = min(_rate(line) for line in lines)
    rates = [lowest ** (step / 100) for step in range(101)]
    for name, limit in (
        ("free", [1 / rate for rate in rates]),
        ("exact", [1 / (share + rate) for rate in rates]),
    ):
        axis.plot(
            rates,
            limit,
            color=STYLES[name][1],
            linestyle="--",
            linewidth=1,
            alpha=0.8,
            label=f"limit, {name} screen",
        )


def _rate(line: Line) -> float:
    """Return the rate realised where rows were really skipped, else the rate asked for."""
    if line["contender"] in ("exact", "free"):
        return int(line["rows_differentiated"]) / int(line["rows"])
    return float(line["rate"])


def _wrap(config: str) -> str:
    words = config.split(", ")
    half = -(-len(words) // 2)
    return ", ".join(words[:half]) + ("\n" + ", ".join(words[half:]) if words[half:] else "")


def main() -> None:
    """Draw every CSV named, or all of the step benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", nargs="*", type=Path)
    for path in parser.parse_args().csv or sorted(DATA.glob("step_*.csv")):
        print(f"wrote {draw(path)}")


if __name__ == "__main__":
    main()
