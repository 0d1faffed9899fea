"""Two checkouts timed in turns: it runs, its CSV has the columns, and what went wrong is told.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = [
    "suite",
    "pairs",
    "rounds",
    "job",
    "what",
    "ratio",
    "ratio_low",
    "ratio_high",
    "old_ms_p20",
    "old_ms_p50",
    "old_ms_p80",
    "new_ms_p20",
    "new_ms_p50",
    "new_ms_p80",
    "config",
    "steps_per_block",
    "gradient_difference",
    "old_commit",
    "new_commit",
    "device",
    "threads",
    "torch",
    "transformers",
    "python",
    "date",
]


@pytest.fixture
def compare(tmp_path):
    """Run the command as from a shell; a tiny size."""

    def run(*words):
        return subprocess.run(
            [
                *(sys.executable, str(ROOT / "benchmarks" / "compare_commits.py")),
                *("--quick", "--out", str(tmp_path / "out.csv"), *map(str, words)),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def lines_of(done, tmp_path):
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_checkout_is_compared_with_itself(compare, tmp_path):
    lines = lines_of(
        compare(ROOT, ROOT, "--suite", "step", "--commits", "before", "after"), tmp_path
    )
    assert list(lines[0]) == COLUMNS
    assert {line["what"] for line in lines} == {"step", "processor"}
    assert [line["job"] for line in lines if line["what"] == "step"] == [
        "mlp-64 dense",
        "mlp-64 exact 3%",
        "mlp-64 free 3%",
        "mlp-64 unbiased 10%",
        "all",
    ]
    for line in lines:
        assert 0 < float(line["ratio_low"]) <= float(line["ratio"]) <= float(line["ratio_high"])
        assert (line["old_commit"], line["new_commit"]) == ("before", "after")
        assert (line["pairs"], line["rounds"], line["threads"]) == ("2", "2", "1")
        if line["job"] != "all":
            assert float(line["gradient_difference"]) == 0
            assert 0 < float(line["old_ms_p20"]) <= float(line["old_ms_p80"])


@pytest.mark.slow
def test_every_suite_runs(compare, tmp_path):
    suites = ["small_lm", "lm_step", "ranks"]
    lines = lines_of(compare(ROOT, "--suite", *suites), tmp_path)
    assert list(dict.fromkeys(line["suite"] for line in lines)) == suites
    assert all(float(line["gradient_difference"] or 0) == 0 for line in lines)
    talked = [line for line in lines if line["what"] == "coordination"]
    assert {line["suite"] for line in talked} == {"ranks"}
    assert all(0 < float(line["old_ms_p50"]) < math.inf for line in talked if line["config"])


@pytest.mark.parametrize("suite", ["step", pytest.param("ranks", marks=pytest.mark.slow)])
def test_the_error_of_a_worker_is_told_with_its_traceback(compare, tmp_path, suite):
    broken = tmp_path / "broken"
    shutil.copytree(
        ROOT / "src", broken / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    start = broken / "src" / "kondo" / "__init__.py"
    start.write_text(start.read_text() + "\n\nraise RuntimeError('planted')\n")
    done = compare(broken, broken, "--suite", suite)
    assert done.returncode == 1
    assert f"The worker of {broken} ended" in done.stderr
    assert "Traceback" in done.stderr
    assert "RuntimeError: planted" in done.stderr


def test_a_folder_that_is_no_checkout_is_refused(compare, tmp_path):
    done = compare(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is no checkout of this repository: it has no src/kondo." in done.stderr


def test_ranks_are_refused_on_a_gpu(compare):
    done = compare(ROOT, "--suite", "ranks", "--device", "cuda")
    assert done.returncode == 2
    assert "ranks runs on a CPU only" in done.stderr
