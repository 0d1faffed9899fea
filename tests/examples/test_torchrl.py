"""The loop on TorchRL: it runs as told in its first lines, learns, and skips rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl", reason="the extra kondo[torchrl] is not installed")
pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")
SCRIPT = Path(__file__).parents[2] / "examples" / "torchrl_ppo.py"


def run(*arguments):
    """Run it; return the return of each iteration, and the share of rows differentiated."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    returns = [float(r) for r in re.findall(r"^iteration.*?return +([\d.]+)", done.stdout, re.M)]
    ((paid, seen),) = re.findall(r"in all differentiated ([\d,]+) of ([\d,]+) rows", done.stdout)
    return returns, int(paid.replace(",", "")) / int(seen.replace(",", ""))


def test_the_example_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 150


def test_ppo_differentiates_a_tenth_of_the_rows():
    returns, share = run("--iterations", 2)
    assert len(returns) == 2
    assert share == pytest.approx(0.1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "wanted"), [("unbiased:0.1", 0.1), ("dense", 1.0)])
def test_ppo_learns_to_balance(gate, wanted):
    returns, share = run("--iterations", 8, "--gate", gate)
    assert returns[-1] > returns[0] + 20
    assert share == pytest.approx(wanted, abs=0.01)
