"""Draw a CSV of the laboratory's benchmark: member-steps per second against population size.

    python benchmarks/plot_lab.py [benchmarks/data/lab_cpu.csv ...]

In: the CSV. Out: a PNG of the same name beside it.
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

DATA = Path(__file__).resolve().parent / "data"

# Okabe-Ito: told apart without full colour vision.
COLOURS = {"DG": "#0072B2", "DG-K 3%": "#D55E00"}
STYLES = ("-o", "--s")
"""One process, and several."""

Line = dict[str, str]


def draw(path: Path) -> Path:
    """Draw one panel per task; return the PNG's path."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(line["model"] for line in lines))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.8), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        _panel(axis, [line for line in lines if line["model"] == task])
    axes[0][0].set_ylabel("member-steps per second (log)")
    first = lines[0]
    figure.suptitle(
        f"Populations (p50, bars p20 to p80) and one process per seed (lines across)\n"
        f"{first['device']}, torch {first['torch']},\n"
        f"commit {first['commit']}, {first['date']}",
        fontsize=8,
    )
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def _panel(axis: Axes, lines: list[Line]) -> None:
    for method, colour in COLOURS.items():
        own = [line for line in lines if line["config"].startswith(f"{method},")]
        (plain,) = [line for line in own if line["contender"].startswith("plain")]
        arrangement = _arrangement(plain)
        axis.axhline(
            _rate(plain), color=colour, linewidth=1, label=f"{method}, plain loop, {arrangement}"
        )
        populations = [line for line in own if line["contender"].startswith("population")]
        arrangements = list(dict.fromkeys(_arrangement(line) for line in populations))
        for style, arrangement in zip(STYLES, arrangements, strict=False):
            points = [line for line in populations if _arrangement(line) == arrangement]
            rates = [_rate(point) for point in points]
            low = [r - _rate(p, "p80") for r, p in zip(rates, points, strict=True)]
            high = [_rate(p, "p20") - r for r, p in zip(rates, points, strict=True)]
            axis.errorbar(
                [_members(point) for point in points],
                rates,
                yerr=[low, high],
                fmt=style,
                color=colour,
                markersize=4,
                linewidth=1,
                capsize=3,
                label=f"{method}, population, {arrangement}",
            )
    sizes = sorted({_members(line) for line in lines if line["contender"].startswith("pop")})
    axis.set(xscale="log", yscale="log", xlabel="members (log)")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)
    words = lines[0]["config"].split(", ")[1:-1]
    axis.set_title(f"{lines[0]['model']}: {', '.join(words)}", fontsize=8)


def _rate(line: Line, percentile: str = "p50") -> float:
    """Return member-steps per second; a long step is a low rate."""
    return 1e3 / float(line[f"step_ms_{percentile}"])


def _members(line: Line) -> int:
    return int(line["contender"].split("/")[0].split("-")[1])


def _arrangement(line: Line) -> str:
    processes, threads = line["contender"].split("/")[1].split("x")
    return f"{processes} process{'es' if processes != '1' else ''} x {threads}"


def main() -> None:
    """Draw every CSV named, or all of the laboratory's benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", nargs="*", type=Path)
    for path in parser.parse_args().csv or sorted(DATA.glob("lab_*.csv")):
        print(f"wrote {draw(path)}")


if __name__ == "__main__":
    main()
