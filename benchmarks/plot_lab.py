"""Draw a CSV of the laboratory's benchmark: member-steps per second against population size.

    python benchmarks/plot_lab.py [benchmarks/data/lab_cpu.csv ...]

In: the CSV. Out: a PNG of the same name beside it.
"""

import argparse
import csv
from pathlib import Path

from matplotlib.axes import Axes

from kondo_lab.evidence import plotting

DATA = Path(__file__).resolve().parent / "data"

METHODS = ("DG", "DG-K 3%")
STYLES = ("-o", "--s")
"""One process, and several."""

Line = dict[str, str]


def draw(path: Path) -> Path:
    """Draw one panel per task; return the PNG's path."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(line["model"] for line in lines))
    first, target = lines[0], path.with_suffix(".png")
    with plotting.style():
        figure, (axes,) = plotting.grid(1, len(tasks), width=5.6, height=4.4)
        for axis, task in zip(axes, tasks, strict=True):
            _panel(axis, [line for line in lines if line["model"] == task])
        axes[0].set_ylabel("member-steps per second (log scale)")
        plotting.head(
            figure,
            "Members of a population train together: higher is better",
            "Medians, bars p20 to p80. Dotted: one process per seed, without a population. "
            "processes x threads.\n"
            f"{first['device']}, torch {first['torch']}, commit {first['commit']}, "
            f"{first['date']}",
        )
        plotting.save(figure, target)
    return target


def _panel(axis: Axes, lines: list[Line]) -> None:
    sizes = sorted({_members(line) for line in lines if line["contender"].startswith("pop")})
    for method in METHODS:
        colour = plotting.method_colour(method)
        own = [line for line in lines if line["config"].startswith(f"{method},")]
        (plain,) = [line for line in own if line["contender"].startswith("plain")]
        label, level = f"{method}, plain loop, {_arrangement(plain)}", _rate(plain)
        axis.plot([sizes[0], sizes[-1]], [level, level], ":", color=colour, label=label)
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
                linewidth=1.2,
                label=f"{method}, {arrangement}",
            )
    axis.set(xscale="log", yscale="log", xlabel="members of the population (log scale)")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    plotting.ratio_ticks(axis.yaxis, "")
    axis.minorticks_off()
    words = lines[0]["config"].split(", ")[1:-1]
    axis.set_title(f"{lines[0]['model']}: {', '.join(words)}", fontsize=plotting.SMALL)
    plotting.label_ends(axis)


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
