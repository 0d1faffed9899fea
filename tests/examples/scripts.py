"""Runs the examples as a reader does."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def run(script, *arguments, ranks=None):
    """Run an example, by torchrun where `ranks` are given; return what it printed."""
    launcher = () if ranks is None else (*TORCHRUN, ranks)
    command = [sys.executable, *launcher, EXAMPLES / script, *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(printed, name):
    """Return what stands behind a name in every line that has it."""
    return [float(found) for found in re.findall(rf"\b{name} +(-?[\d.]+|nan)", printed)]


def share(printed):
    """Return the share of rows or tokens that the last line says were differentiated."""
    ((few, all_of_them),) = re.findall(r"^\w.* ([\d,]+) of ([\d,]+) \w+ \([\d.]+%\)", printed, re.M)
    return int(few.replace(",", "")) / int(all_of_them.replace(",", ""))
