"""What a gate is shown of verl's batch: literals, and slopes against autograd."""

import pytest
import torch

from kondo.integrations.verl.gate_inputs import (
    GateRows,
    centred_rewards,
    gate_advantages,
    kl_slope,
)
from tolerances import assert_close

KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]


def rows(**changed):
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]], dtype=torch.bool)
    base = {
        "mask": mask,
        "log_probs": torch.full((4, 2), -0.5),
        "advantages": torch.tensor([[2.0, 2.0], [-2.0, 0.0], [0.01, 0.01], [0.01, 0.01]]),
        "rewards": torch.tensor([1.0, 0.0, 0.3, 0.3]),
    }
    return GateRows(**(base | changed))


def test_rewards_are_centred_by_prompt():
    found = gate_advantages(rows(), KEYS, unbiased=False, estimator="grpo")
    assert_close(found, torch.tensor([0.5, -0.5, 0.0, 0.0]))


def test_an_unbiased_gate_sees_the_loss_and_no_rounding_of_equal_rewards():
    found = gate_advantages(rows(), KEYS, unbiased=True, estimator="grpo")
    assert_close(found, torch.tensor([[2.0, 2.0], [-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_another_estimator_is_taken_as_it_is():
    for unbiased in (False, True):
        found = gate_advantages(rows(), KEYS, unbiased=unbiased, estimator="gae")
        assert_close(found, rows().advantages)


def test_importance_weights_and_the_slope_of_the_kl_enter_an_unbiased_gate():
    reference = torch.full((4, 2), -0.7)
    importance = torch.full((4, 2), 0.5)
    found = gate_advantages(
        rows(ref_log_probs=reference, importance=importance),
        KEYS,
        unbiased=True,
        estimator="grpo",
        kl_coef=2.0,
        kl_type="k2",
    )
    # A * 0.5 - 2 * (-0.5 + 0.7), 0 where the mask is
    assert_close(found, torch.tensor([[0.6, 0.6], [-1.4, 0.0], [-0.4, -0.4], [-0.4, -0.4]]))


def test_a_prompt_with_one_session_has_verls_advantage():
    keys = ["a_0_0", "a_1_0", "b_0_0", "c_0_0"]
    found = gate_advantages(rows(), keys, unbiased=False, estimator="grpo")
    assert_close(found, torch.tensor([0.5, -0.5, 0.01, 0.01]))


def test_several_rows_of_one_session_count_once_by_their_last():
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    found = centred_rewards(torch.tensor([9.0, 1.0, 0.0]), torch.zeros(3), keys)
    assert_close(found, torch.tensor([0.5, 0.5, -0.5]))


def verls_kl(log_prob, reference, kind):
    """verl's estimates, written again: value of `kind`, slope of k2 with a plus."""
    gap = log_prob - reference
    if kind.endswith("+"):
        return 0.5 * gap.square()
    if kind in ("kl", "k1"):
        return gap
    if kind == "abs":
        return gap.abs()
    if kind in ("mse", "k2"):
        return 0.5 * gap.square()
    back = (-gap).clamp(-20, 20)
    return (back.exp() - back - 1).clamp(-10, 10)


@pytest.mark.parametrize(
    "kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "low_var_kl+"]
)
def test_slopes_are_those_of_verls_estimates(kind):
    gap = torch.tensor([-30.0, -3.0, -0.4, 0.0, 0.7, 5.0, 15.0], dtype=torch.float64)
    log_prob = gap.clone().requires_grad_()
    verls_kl(log_prob, torch.zeros_like(gap), kind).sum().backward()
    assert_close(kl_slope(gap, kind), log_prob.grad)


def test_an_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="kl_loss_type must be one of"):
        kl_slope(torch.zeros(1), "full")
