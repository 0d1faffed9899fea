"""Run a benchmark's script with `--quick`, as somebody would from a shell."""

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def quick_lines(script: str, out: Path) -> list[dict[str, str]]:
    """Run the script, and return the lines of the CSV that it wrote to `out`."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        return list(csv.DictReader(file))
