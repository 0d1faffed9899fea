"""The benchmark runs at tiny sizes, checks its gradients, and writes the schema."""

import csv
import os
import subprocess
import sys

import pytest

from integrations.verl.worker_runs import TESTS

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_the_benchmark_counts_what_enters_the_model(tmp_path):
    out = tmp_path / "verl.csv"
    script = TESTS.parent / "benchmarks" / "bench_verl.py"
    found = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(out), "--commit", "test"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert found.stdout.count("from verl's masked") == 3
    with out.open() as file:
        lines = {(line["contender"], line["rate"]): line for line in csv.DictReader(file)}
    assert set(lines) == {("verl", "1"), ("kondo", "0.1"), ("kondo", "0.3"), ("kondo", "1")}
    assert lines["verl", "1"]["rows_differentiated"] == lines["kondo", "1"]["rows_differentiated"]
    assert lines["verl", "1"]["tokens_trained"] == lines["verl", "1"]["tokens"]
    assert int(lines["kondo", "0.1"]["rows_differentiated"]) < 4
    assert lines["verl", "1"]["speedup_p50"] == "1"
    assert lines["verl", "1"]["verl"] == "0.9.1"
