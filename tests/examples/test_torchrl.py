"""The loop on TorchRL learns, and differentiates the rows that it says."""

import pytest

from examples.scripts import numbers, run, share

pytest.importorskip("torchrl", reason="the extra kondo[torchrl] is not installed")
pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")


def test_ppo_differentiates_a_tenth_of_the_rows():
    printed = run("torchrl_ppo.py", "--iterations", 2)
    assert len(numbers(printed, "return")) == 2
    assert share(printed) == pytest.approx(0.1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "wanted"), [("unbiased:0.1", 0.1), ("dense", 1.0)])
def test_ppo_learns_to_balance(gate, wanted):
    printed = run("torchrl_ppo.py", "--iterations", 8, "--gate", gate)
    returns = numbers(printed, "return")
    assert returns[-1] > returns[0] + 20
    assert share(printed) == pytest.approx(wanted, abs=0.01)
