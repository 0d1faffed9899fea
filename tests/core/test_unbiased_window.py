"""An unbiased gate whose price comes from past calls."""

import itertools
import math

import pytest
import torch

import kondo
from tolerances import assert_close


def test_samples_are_drawn_one_by_one_at_the_price_of_a_window():
    gate = kondo.UnbiasedGate(rate=0.1, window=50)
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(400, 4, generator=generator)
    kept, total = 0, torch.zeros(())
    for row in values:  # 4 samples: a rate of 0.1 cannot be had of them
        choice = gate(row, generator=generator)
        kept += int(choice.keep.sum())
        total += (choice.weight * row).sum()
        assert_close(choice.weight[choice.keep], 1 / choice.probability[choice.keep])
    assert 0.08 < kept / 1600 < 0.13
    assert abs(total / values.sum() - 1) < 0.1


def test_the_price_depends_on_no_draw_so_that_the_mean_is_the_dense_one():
    """Add up all draws of a second micro-batch, each with its probability."""
    first, second = torch.tensor([1.0, 3.0, 0.5]), torch.tensor([2.0, 0.0, 0.25])
    found = []
    for seed in (1, 2):
        gate = kondo.UnbiasedGate(rate=0.4, window=8)
        gate(first, generator=torch.Generator().manual_seed(seed))
        found.append(gate(second, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(found[0].probability, found[1].probability)
    chance = found[0].probability.tolist()
    price = float(found[0].price)  # 0.4 of 6 samples, those of the past included
    assert sum(min(1.0, v / price) for v in (1.0, 3.0, 0.5, 2.0, 0.25)) == pytest.approx(2.4)
    mean = torch.zeros(3)
    for drawn in itertools.product([0, 1], repeat=3):
        odds = math.prod(p if d else 1 - p for p, d in zip(chance, drawn, strict=True))
        weight = [d / p if d and p else 0.0 for p, d in zip(chance, drawn, strict=True)]
        mean += odds * torch.tensor(weight)
    assert_close(mean, torch.tensor([1.0, 0.0, 1.0]))


def test_an_unbiased_gate_refuses_the_window_of_another_gate():
    window = kondo.Gate(rate=0.5, window=4)
    window(torch.rand(8))
    gate = kondo.UnbiasedGate(rate=0.5, window=4)
    with pytest.raises(ValueError, match=r"state must have the key 'drawn_past'"):
        gate.load_state_dict(window.state_dict())


def test_a_window_of_one_call_has_the_price_of_that_call():
    values = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    gate = kondo.UnbiasedGate(rate=0.5, window=1)
    gate(10 * values)
    assert float(gate(values).price) == pytest.approx(1.5)  # 1 + 3 / 1.5 = 0.5 of 6


@pytest.mark.parametrize("window", [-1, 2.5, True])
def test_a_window_that_is_no_number_of_calls_is_refused(window):
    with pytest.raises(ValueError, match="window must be"):
        kondo.UnbiasedGate(rate=0.5, window=window)
