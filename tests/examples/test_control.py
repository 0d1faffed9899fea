"""The loops on Gymnasium's tasks: they run as told in their first lines, learn, and skip rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    """Run an example; return the return of each iteration, and the share differentiated."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    returns = [float(r) for r in re.findall(r"^iteration.*?return +(-?[\d.]+)", done.stdout, re.M)]
    ((paid, seen),) = re.findall(r"in all differentiated ([\d,]+) of ([\d,]+) rows", done.stdout)
    return returns, int(paid.replace(",", "")) / int(seen.replace(",", ""))


@pytest.mark.parametrize("script", ["cartpole_reinforce.py", "ppo_control.py"])
def test_an_example_is_short(script):
    assert len((EXAMPLES / script).read_text().splitlines()) < 200


@pytest.mark.parametrize(
    ("gate", "least", "most"), [("unbiased", 0.09, 0.11), ("noise", 0.05, 0.5)]
)
def test_reinforce_learns_to_balance_with_an_unbiased_gate(gate, least, most):
    returns, share = run("cartpole_reinforce.py", "--gate", gate, "--iterations", 12)
    assert len(returns) == 12
    assert returns[-1] > returns[0] + 40
    assert least <= share <= most


def test_the_gate_by_delight_does_not_learn_to_balance():
    returns, share = run("cartpole_reinforce.py", "--gate", "delight", "--iterations", 12)
    assert returns[-1] < returns[0] + 40
    assert share == pytest.approx(0.1, abs=0.01)


def test_ppo_learns_to_balance_on_a_tenth_of_the_rows():
    returns, share = run("ppo_control.py", "--iterations", 8)
    assert returns[-1] > returns[0] + 20
    assert share == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("task", "gate", "lowest"), [("acrobot", "dense", -500), ("pendulum", "noise", -2000)]
)
def test_ppo_runs_on_the_other_tasks(task, gate, lowest):
    returns, share = run("ppo_control.py", "--task", task, "--gate", gate, "--iterations", 2)
    assert len(returns) == 2
    assert lowest <= returns[-1] <= 0  # 0 before the first episode ends
    assert share == 1 if gate == "dense" else 0.03 < share < 0.9
