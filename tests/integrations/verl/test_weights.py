"""Weights on gradients: a literal, jagged outputs, and a filler whose gradient is not finite."""

import torch

from kondo.integrations.verl.update_plan import weigh_outputs
from tolerances import assert_close


def weighed(values, weight):
    """Return log-probs of rows of one token each."""
    lengths = torch.ones(len(values), dtype=torch.int64)
    return weigh_outputs({"log_probs": values}, weight, lengths)["log_probs"]


def test_values_stay_and_gradients_are_multiplied():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    scaled = weighed(values, torch.tensor([2.0, 0.0, 0.5]))
    assert scaled.equal(values)
    (scaled * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert_close(values.grad, torch.tensor([2.0, 0.0, 50.0]))


def test_weight_zero_is_no_gradient_even_where_it_is_infinite():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    scaled = weighed(values, torch.tensor([1.0, 0.0]))
    scaled.sqrt().sum().backward()  # infinite slope at 0
    assert_close(values.grad, torch.tensor([0.5, 0.0]))


def test_jagged_outputs_are_weighed_by_row():
    flat = torch.arange(5.0, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)
    weight, lengths = torch.tensor([3.0, 0.25]), torch.tensor([2, 3])
    found = weigh_outputs({"log_probs": jagged, "entropy": flat, "other": 7}, weight, lengths)
    assert found["other"] == 7
    (found["log_probs"].values().sum() + 10 * found["entropy"].sum()).backward()
    assert_close(flat.grad, 11 * torch.tensor([3.0, 3.0, 0.25, 0.25, 0.25]))


def test_outputs_without_entropies_have_none():
    flat = torch.ones(2)
    found = weigh_outputs({"log_probs": flat, "entropy": None}, torch.ones(1), torch.tensor([2]))
    assert found["entropy"] is None
