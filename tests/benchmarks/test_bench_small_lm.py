"""The benchmark of small steps runs, and its dense step has the plain step's gradient."""

import csv
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_small_lm.py"


def test_a_quick_run_writes_a_line_per_step(tmp_path):
    out = tmp_path / "small.csv"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(out.open()))
    assert [line["step"] for line in lines] == [
        "plain",
        "dense",
        "variance",
        "delight",
        "unbiased",
        "noise",
    ]
    plain, dense, *_ = lines
    assert abs(float(plain["loss"]) - float(dense["loss"])) < 1e-6
    assert float(dense["gradient_error"]) < 1e-5
