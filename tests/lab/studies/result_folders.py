"""Toy result folders, as `kondo run` writes them, with numbers that can be worked out by hand."""

import csv
import gzip
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HEADLINE = (
    *("figure", "series", "metric", "x", "expected", "ours", "se", "seeds"),
    *("against", "verdict"),
)
CURVES = (
    *("part", "series", "setting", "step", "metric"),
    *("mean", "se", "seeds", "forward", "backward"),
)
FRONTIER = (
    *("task", "series", "rate", "target", "forward", "backward"),
    *("reached", "seeds", "final_error"),
)

CLAIMS = ("statement", "verdict", "measured")
MNIST_CLAIMS = [
    ("DG-K ends below PG <at 3%>", "met", "1 of 1 match"),
    ("DG-K ends near DG", "missed", "0.0312, expected 0.0236"),
    ("it bears noise", "open", "not measured"),
]

MNIST_LINES = [
    (
        "Kondo Fig 1",
        "PG",
        "online error",
        "1e+06",
        "0.037",
        "0.0391",
        "0.0006",
        "30",
        "paper",
        "matches",
    ),
    (
        "Kondo Fig 1",
        "DG",
        "online error",
        "1e+06",
        "0.0163",
        "0.0161",
        "0.0002",
        "30",
        "paper",
        "matches",
    ),
    (
        "Kondo Fig 1",
        "DG-K 3%",
        "online error",
        "1e+06",
        "0.0236",
        "0.0312",
        "4e-4",
        "30",
        "paper",
        "differs",
    ),
    (
        "Kondo Fig 1",
        "DG < DG-K 3% < PG",
        "order of online error",
        "1e+06",
        "1",
        "1",
        "",
        "1",
        "paper",
        "matches",
    ),
    (
        "Kondo Fig 3",
        "DG",
        "speed-up over PG to 5% test error",
        "2",
        "2.25",
        "2.31",
        "0.08",
        "30",
        "paper",
        "matches",
    ),
    (
        "Kondo Fig 3",
        "DG-K 3%",
        "speed-up over PG to 5% test error",
        "2",
        "3.98",
        "2.9",
        "",
        "30",
        "paper",
        "differs",
    ),
    ("DG Prop 1", "DG / PG", "cosine gap", "", "2", "2.02", "0.1", "30", "formula", "matches"),
    ("beyond the paper", "DG-K 10%", "test error", "", "", "0.0204", "0.0003", "30", "", ""),
]
REVERSAL_LINES = [
    (
        "Kondo Fig 10",
        "DG",
        "longest length solved",
        "1e+06",
        "26.5",
        "25.9",
        "0.7",
        "10",
        "paper",
        "matches",
    ),
    (
        "Kondo Fig 10",
        "PPO",
        "longest length solved",
        "1e+06",
        "16.7",
        "",
        "",
        "10",
        "paper",
        "differs",
    ),
    ("Kondo Fig 8", "DG", "sequence error", "", "0.01", "0.013", "0.006", "10", "paper", "noisy"),
    (
        "Kondo Fig 8",
        "PG",
        "sequence error",
        "at the end",
        "0.31",
        "0.3",
        "0.02",
        "10",
        "paper",
        "matches",
    ),
]
# Cheapest is DG where c is small, then DG-K 10%, then DG-K 3%; never PG.
MNIST_FRONTIER = [
    ("MNIST", "PG", "1", "5% test error", "45000", "45000", "30", "30", "0.036"),
    ("MNIST", "DG", "1", "5% test error", "20000", "20000", "30", "30", "0.0161"),
    ("MNIST", "DG-K 3%", "0.03", "5% test error", "32000", "960", "30", "30", "0.0236"),
    ("MNIST", "DG-K 10%", "0.1", "5% test error", "26000", "2600", "30", "30", "0.0204"),
    ("MNIST", "DG-K 1%", "0.01", "5% test error", "21000", "210", "12", "30", "0.062"),
    ("MNIST", "DG-K price 0", "", "5% test error", "30000", "6000", "30", "30", "0.0198"),
    ("MNIST", "Bernoulli 3%", "0.03", "5% test error", "41000", "1230", "30", "30", "0.0275"),
    ("MNIST", "PG", "1", "2% test error", "", "", "0", "30", "0.036"),
    ("MNIST", "DG", "1", "2% test error", "90000", "90000", "30", "30", "0.0161"),
    ("MNIST", "DG-K 10%", "0.1", "2% test error", "98000", "9800", "30", "30", "0.0204"),
]
REVERSAL_FRONTIER = [
    ("reversal H=10", "PG", "1", "10% error", "80000", "80000", "10", "10", "0.02"),
    ("reversal H=10", "DG", "1", "10% error", "90000", "90000", "10", "10", "0.004"),
    ("reversal H=10", "DG-K 50%", "0.5", "10% error", "170000", "85000", "10", "10", "0"),
]


def manifest(**changes):
    return {
        "study": "mnist-kondo",
        "version": 1,
        "title": "MNIST bandit with the Kondo gate",
        "paper": "Kondo Figs 1 and 3",
        "claim": "DG-K 3% ends between DG and PG with 3% of the backward passes.",
        "differences": ["The learning rate of DG-K is tuned here; the paper does not give it."],
        "findings": ["DG-K 3% reaches 5% test error 2.9 times cheaper than PG at c = 2."],
        "size": "full",
        "command": "kondo run mnist-kondo --device cuda",
        "seconds": 412.7,
        "settings": {"seeds": 30, "rates": [0.01, 0.03, 0.1], "network": {"width": 100}},
        "environment": {"commit": "0123abc", "torch": "2.13.0", "device": "cuda"},
        "interrupted": False,
    } | changes


def write_table(path: Path, header, lines):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *lines])


def write_figure(path: Path, title: str):
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([1, 2, 4, 8], [0.5, 0.2, 0.1, 0.05], label="DG")
    axes.set(title=title, xlabel="forward passes", ylabel="error", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=100, metadata={"Software": None})


def write_folder(folder: Path, facts, lines, frontier=(), figures=("fig1",), claims=()) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(facts), encoding="utf-8")
    write_table(folder / "headline.csv", HEADLINE, lines)
    (folder / "curves.csv.gz").write_bytes(gzip.compress((",".join(CURVES) + "\n").encode()))
    if frontier:
        write_table(folder / "frontier.csv", FRONTIER, frontier)
    if claims:
        write_table(folder / "claims.csv", CLAIMS, claims)
    for name in figures:
        write_figure(folder / f"{name}.png", name)
    return folder


def toy_folders(root: Path) -> list[Path]:
    """Return a full run and a small, interrupted one, both with frontiers."""
    reversal = manifest(
        study="reversal-kondo",
        title="Token reversal with the Kondo gate",
        paper="Kondo Figs 8 and 10",
        size="small",
        interrupted=True,
        command="kondo run reversal-kondo --small",
        findings=[],
    )
    return [
        write_folder(
            root / "mnist-kondo-v1",
            manifest(),
            MNIST_LINES,
            MNIST_FRONTIER,
            ("fig1-online-error", "fig3-speed-up"),
            MNIST_CLAIMS,
        ),
        write_folder(root / "reversal-kondo-v1", reversal, REVERSAL_LINES, REVERSAL_FRONTIER),
    ]


def older_demo_folder(folder: Path) -> Path:
    """Write what `kondo demo` of version 0.1 wrote."""
    row = {"task": "digits", "num_seeds": 2, "num_steps": 300, "test_error": None}
    rows = [
        row | {"method": "PG", "dense": True, "error": [0.107, 0.0048], "speed_up": 1.0},
        row | {"method": "DG-K (3%)", "dense": False, "error": [0.0461, 0.0022], "speed_up": 3.44},
    ]
    counts = ({"loop_speed_up": 1.0, "backward_passes": 300000.0},) * 2
    facts = {
        "command": "kondo demo",
        "seeds": [0, 1],
        "interrupted": False,
        "settings": {"rate": 0.03},
        "environment": {"kondo": "0.1.0", "device": "cpu"},
        "seconds": 75.9,
        "rows": [own | count for own, count in zip(rows, counts, strict=True)],
    }
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(facts), encoding="utf-8")
    write_table(folder / "curves.csv", ("task", "method", "error"), [("digits", "PG", "0.1")])
    write_figure(folder / "figure.png", "demo")
    return folder


STEP = ("benchmark", "model", "config", "contender", "rate", "unit", "speedup_p50", "repeats")


def step_folder(folder: Path) -> Path:
    """Write what benchmarks/bench_lm_step.py writes: a table and its manifest for each model."""
    folder.mkdir(parents=True)
    for model, speed_up in (("small", "23.7"), ("large", "28.5")):
        about = ("lm_step", model, "128 x 1024 tokens, equal lengths")
        rows = [
            (*about, "dense", "1", "sequence", "1", "5"),
            (*about, "free", "0.03", "sequence", speed_up, "5"),
        ]
        write_table(folder / f"{model}.csv", STEP, rows)
        facts = {"command": f"bench {model}", "settings": {}, "environment": {"device": "H200"}}
        path = folder / f"{model}.manifest.json"
        path.write_text(json.dumps(facts), encoding="utf-8")
    write_figure(folder / "steps.png", "steps")
    return folder
