"""The loops on Gymnasium's tasks learn, and differentiate the rows that they say."""

import pytest

from examples.scripts import numbers, run, share

pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")


@pytest.mark.parametrize(
    ("gate", "least", "most"), [("unbiased:0.1", 0.09, 0.11), ("noise:1.5", 0.05, 0.5)]
)
def test_reinforce_learns_to_balance_with_an_unbiased_gate(gate, least, most):
    printed = run("reinforce_cartpole.py", "--gate", gate, "--iterations", 12)
    returns = numbers(printed, "return")
    assert len(returns) == 3
    assert returns[-1] > returns[0] + 40
    assert least <= share(printed) <= most


def test_the_gate_by_delight_does_not_learn_to_balance():
    printed = run("reinforce_cartpole.py", "--gate", "delight:0.1", "--iterations", 12)
    returns = numbers(printed, "return")
    assert returns[-1] < returns[0] + 40
    assert share(printed) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("gate", "wanted"), [("unbiased:0.1", 0.1), ("dense", 1.0)])
def test_ppo_learns_to_balance(gate, wanted):
    printed = run("ppo_cartpole.py", "--gate", gate, "--iterations", 8)
    returns = numbers(printed, "return")
    assert returns[-1] > returns[0] + 20
    assert share(printed) == pytest.approx(wanted, abs=0.01)


def test_ppo_runs_with_continuous_actions():
    printed = run("ppo_pendulum.py", "--iterations", 3)
    assert -2000 < numbers(printed, "return")[-1] < -500  # of a policy that is still random
    assert share(printed) == pytest.approx(0.2, abs=0.01)


@pytest.mark.slow
def test_ppo_learns_to_swing_up():
    printed = run("ppo_pendulum.py")
    assert numbers(printed, "return")[-1] > -500
    assert share(printed) == pytest.approx(0.2, abs=0.01)
