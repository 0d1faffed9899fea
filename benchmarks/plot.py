"""Draw a CSV of the step benchmark: speed-up against rate, with the cost model's limits.

    python benchmarks/plot.py [benchmarks/data/step_cpu.csv ...]

In: the CSV. Out: a PNG of the same name beside it.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kondo_lab.evidence import plotting

DATA = Path(__file__).resolve().parent / "data"

# Contender -> label, colour, marker.
STYLES = {
    "free": ("free screen", plotting.VERMILLION, "o"),
    "exact": ("exact screen", plotting.ORANGE, "s"),
    "kondo-gate": ("masked dense", plotting.BLUE, "^"),
}
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0)

Line = dict[str, str]


def draw(path: Path) -> Path:
    """Draw one panel per model; return the PNG's path."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    models = list(dict.fromkeys(line["model"] for line in lines))
    first, target = lines[0], path.with_suffix(".png")
    with plotting.style():
        figure, (axes,) = plotting.grid(1, len(models), width=4.0, height=4.2, sharey=True)
        for axis, model in zip(axes, models, strict=True):
            _panel(axis, [line for line in lines if line["model"] == model])
        axes[0].set_ylabel("speed-up over dense (log scale)")
        masked = [line["contender"] for line in lines if line["contender"].startswith("kondo-gate")]
        peer = f" Masked dense: {masked[0]}." if masked else ""
        plotting.head(
            figure,
            "Speed-up of one learner step over dense: above 1x is faster",
            f"Medians, bars p20 to p80, ratios inside one run. Dashed: limit by the cost model."
            f"{peer}\n{first['device']}, threads: {first['threads']}, torch {first['torch']}, "
            f"commit {first['commit']}, {first['date']}",
        )
        plotting.save(figure, target)
    return target


def _panel(axis: Axes, lines: list[Line]) -> None:
    for name, (label, colour, marker) in STYLES.items():
        points = [line for line in lines if line["contender"].startswith(name)]
        if not points:
            continue
        points.sort(key=_rate)
        middle = [float(point["speedup_p50"]) for point in points]
        low = [m - float(p["speedup_p20"]) for m, p in zip(middle, points, strict=True)]
        high = [float(p["speedup_p80"]) - m for m, p in zip(middle, points, strict=True)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
        xs = [_rate(point) for point in points]
        axis.errorbar(xs, middle, yerr=[low, high], label=label, linewidth=1.2, **style)
    _limits(axis, lines)
    axis.axhline(1.0, color=plotting.DARK, linewidth=1, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="rows kept (log scale)")
    axis.set_xticks(TICKS, [f"{tick:.0%}" for tick in TICKS])
    axis.minorticks_off()
    plotting.ratio_ticks(axis.yaxis)
    axis.set_title(f"{lines[0]['model']}\n{_wrap(lines[0]['config'])}", fontsize=plotting.SMALL)
    plotting.label_ends(axis)


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
        axis.plot(rates, limit, color=STYLES[name][1], linestyle="--", linewidth=1, alpha=0.8)


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
