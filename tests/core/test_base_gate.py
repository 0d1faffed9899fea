"""What is taken for a gate: gates, choices made elsewhere, functions; and what is refused."""

import math

import pytest
import torch

import kondo
from kondo.core.adapters import adapter_of
from kondo.core.fingerprint import fingerprint
from kondo.core.given_gates import CallableGate, GivenChoice, as_gate

VALUES = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 1.0]])


def test_a_gate_stays_itself():
    gate = kondo.Gate(rate=0.5)
    assert as_gate(gate) is gate


def test_a_choice_is_kept_whatever_the_values_and_draws_nothing():
    gate = as_gate(kondo.Choice.of(torch.tensor([True, False, True]), price=0.25))
    assert isinstance(gate, GivenChoice)
    assert not adapter_of(gate).draws
    assert not adapter_of(gate).remembers
    choice = gate(VALUES[0])
    assert choice.keep.tolist() == [True, False, True]
    assert choice.weight.tolist() == choice.probability.tolist() == [1.0, 0.0, 1.0]
    assert choice.price.item() == 0.25
    assert choice.rate.item() == 2 / 3


def test_a_choice_has_the_units_in_any_shape_and_its_weights():
    keep = torch.tensor([True, False, True, False, True, False])
    given = kondo.Choice.of(keep)._replace(
        weight=torch.arange(6.0), probability=torch.linspace(0.5, 1.0, 6)
    )
    mask = torch.tensor([[True, True, True], [True, False, True]])
    choice = as_gate(given)(VALUES, mask)
    assert choice.keep.tolist() == [[True, False, True], [False, False, False]]
    assert choice.weight.tolist() == [[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    assert choice.probability[1, 1] == 0.0
    assert choice.rate.item() == 2 / 5
    assert choice.price.item() == -math.inf


def test_a_function_sees_units_in_one_dimension_and_may_bring_a_signal():
    shapes = []

    def function(values, mask, generator):
        shapes.append(list(values.shape))
        return kondo.Choice.of(mask & (values > 0), mask)

    function.signal = kondo.signals.advantage
    gate = as_gate(function)
    assert isinstance(gate, CallableGate)
    assert gate.signal is kondo.signals.advantage
    assert adapter_of(gate).draws
    assert gate(VALUES).keep.tolist() == [[True, False, True], [True, False, True]]
    assert shapes == [[6]]
    assert "function" in fingerprint(gate)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (0.1, r"write gate=kondo.UnbiasedGate\(rate=0.1\)"),
        ("delight:0.1", r"Write gate=kondo.parse_gate\('delight:0.1'\)"),
        (kondo.Gate, r"This is a class: write gate=kondo.Gate\(...\)"),
        (True, r"Write for example gate=kondo.UnbiasedGate\(rate=0.1\)"),
        (torch.ones(3), r"Write for example gate=kondo.UnbiasedGate\(rate=0.1\)"),
    ],
    ids=str,
)
def test_what_is_no_gate_is_refused_with_what_to_write(given, remedy):
    with pytest.raises(ValueError, match=f"gate must be a kondo.BaseGate.*{remedy}"):
        as_gate(given)


def test_the_default_fingerprint_tells_tensors_apart():
    class Own(kondo.BaseGate):
        def __init__(self, bounds):
            self.bounds = bounds

        def choose(self, values, mask, generator=None):
            return kondo.Choice.of(mask, mask)

    large = torch.zeros(2000)  # whose repr leaves out the middle
    other = large.clone()
    other[1000] = 1.0
    assert fingerprint(Own(large)) != fingerprint(Own(other))
    assert fingerprint(Own(large)) == fingerprint(Own(large.clone()))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (kondo.Choice.of(torch.ones(4, dtype=torch.bool)), "among as many units as there are, 6"),
        (
            kondo.Choice.of(torch.ones(6, dtype=torch.bool))._replace(weight=torch.ones(2)),
            "with weight like keep, \\[6\\], got \\[2\\]",
        ),
        (
            kondo.Choice.of(torch.ones(6, dtype=torch.bool))._replace(keep=torch.ones(6)),
            "keep of dtype torch.bool, got torch.float32",
        ),
    ],
)
def test_a_choice_among_other_units_is_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        kondo.select(-torch.ones(6), torch.ones(6), gate=choice)


def test_a_choice_of_tokens_is_made_from_what_is_kept_of_them():
    keep = torch.tensor([[True, False], [False, True], [False, False]])
    choice = kondo.Choice.of(keep)._replace(price=torch.tensor([0.5, 0.25, 1.0]))
    log_probs, advantages = -torch.ones(2, 3, 2), torch.ones(2, 3)
    one = kondo.select(log_probs[0], advantages[0], gate=choice, unit="token")
    assert one.keep.equal(keep)
    assert one.price.tolist() == 0.25  # the lowest: nothing below it was kept
    many = kondo.Choice(*(torch.stack([part, part]) for part in choice))
    both = kondo.select(log_probs, advantages, gate=many, unit="token", capacity=2)
    assert (both.keep[1].equal(keep), both.price.tolist()) == (True, [0.25, 0.25])
