"""The benchmark of ranks: it runs, and its CSV has the schema. No time is asserted."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

from torch_exit import run_to_the_end

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_writes_the_schema(tmp_path):
    out = tmp_path / "ranks.csv"
    command = [sys.executable, str(FOLDER / "bench_ranks.py"), "--quick", "--models", "mlp"]
    command += ["--repeats", "2", "--commit", "test", "--out", str(out)]

    def run():
        with (tmp_path / "log").open("w") as log:
            # A session of its own: if it hangs, its ranks are ended with it.
            running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                code = running.wait(timeout=150)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
        return code, (tmp_path / "log").read_text()

    assert run_to_the_end(run) == 0, (tmp_path / "log").read_text()
    lines = list(csv.DictReader(out.open()))
    names = ["dense", "forward", "gate-per-rank", "exact", "free"]
    assert [line["contender"] for line in lines] == names
    by_name = dict(zip(names, lines, strict=True))
    assert by_name["dense"]["rows_differentiated"] == by_name["dense"]["rows"] == "128"
    # 3% of 128 rows: four, wherever they are kept and trained.
    assert by_name["exact"]["rows_differentiated"] == by_name["free"]["rows_differentiated"] == "4"
    assert {"coordinate", "wait"} <= {part.split("=")[0] for part in lines[-1]["stages"].split()}
    assert 0 < float(by_name["exact"]["gate_overhead"]) < 1
