"""The benchmark of choosing runs, and its gates keep what they say."""

import csv
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_select.py"


def test_a_quick_run_writes_a_line_per_gate_and_shape(tmp_path):
    out = tmp_path / "select.csv"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(out.open()))
    assert len(lines) == 10
    kept = {line["gate"]: int(line["units_kept"]) for line in lines if line["unit"] == "sequence"}
    assert kept["delight"] == kept["unbiased"] == round(0.1 * 64)
    assert all(line["of_baseline_p50"] == "1.0" for line in lines if line["gate"] == "delight")
