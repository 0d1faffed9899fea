"""Exact tops, fair ties, solved prices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.strategies import distinct_delights, nonzero, permutations, tensors
from kondo.core import quantiles
from kondo.core.sampling import count_for
from oracles import core as oracle
from tolerances import TOLERANCES, assert_close

INF = math.inf


def everything(values):
    return torch.ones_like(values, dtype=torch.bool)


def top(values, count, *, position=None):
    keep, price = quantiles.highest(values, everything(values), count, position)
    return keep, price.squeeze(-1)


def solve_price(values, count, temperature, *, weight=None):
    return quantiles.solve_price(values, everything(values), count, temperature, weight).squeeze(-1)


def test_top_literal(device):
    delight = torch.tensor([0.1, 3.0, -1.0, 2.0, -INF, INF], device=device)
    keep, price = top(delight, 3)
    assert keep.tolist() == [False, True, False, True, False, True]
    assert price.item() == 2.0
    assert top(delight, 6)[0].all()


@given(tensors(st.sampled_from([-2.0, -1.0, 1.0, 2.0, 3.0])), st.data())
def test_top_keeps_exactly_the_count_under_ties(delight, data):
    count = data.draw(st.integers(1, delight.numel()))
    keep, price = top(delight, count)
    assert int(keep.sum()) == count
    assert price.item() == delight.sort(descending=True).values[count - 1].item()
    assert delight[keep].min() == price
    assert count == delight.numel() or delight[~keep].max() <= price
    assert torch.equal(top(delight, count)[0], keep)  # deterministic


@given(distinct_delights, st.data())
def test_permuting_units_permutes_the_top(delight, data):
    count = data.draw(st.integers(1, delight.numel()))
    order = data.draw(permutations(delight.numel()))
    assert torch.equal(top(delight[order], count)[0], top(delight, count)[0][order])


@pytest.mark.parametrize("size", [5, 64, 1001, 40_000])
@pytest.mark.parametrize("share", [0.03, 0.5])
def test_ties_favour_no_position(size, share):
    # Among n tied units, k drawn without replacement have a mean position of (n - 1) / 2 with
    # variance (n + 1) (n - k) / (12 k); over `repeats` tied values the variance divides.
    count, repeats = count_for(share, size), max(20, 20_000 // size)
    position = torch.arange(size).double()
    kept = torch.stack([top(torch.full((size,), 0.1 * (1 + i)), count)[0] for i in range(repeats)])
    mean = (kept.double() @ position).mean() / count
    deviation = math.sqrt((size + 1) * (size - count) / (12 * count) / repeats)
    assert abs(mean - (size - 1) / 2) < 4 * deviation
    # The first unit and the last are kept as often as any: share * repeats of the time.
    expected, spread = repeats * count / size, math.sqrt(repeats * count / size)
    for place in (0, size - 1):
        assert abs(kept[:, place].sum() - expected) < 4 * spread


def test_tied_units_are_chosen_by_position_and_not_by_order_of_arrival():
    # The same units in another order, with their positions: the same units win.
    delight, position = torch.full((50,), 0.5), torch.arange(100, 150)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    keep = top(delight, 7, position=position)[0]
    assert torch.equal(top(delight, 7, position=position[order])[0], keep[order])
    assert not torch.equal(top(delight, 7)[0], keep)


def test_different_tied_values_draw_different_lots():
    keeps = {tuple(top(torch.full((40,), 0.1 * i), 10)[0].tolist()) for i in range(1, 21)}
    assert len(keeps) == 20


def test_solved_price_literal():
    # sigmoid((chi - lambda) / eta) = 1/4 for every unit: lambda = chi + eta log 3.
    price = solve_price(torch.full((8,), 0.5), 2.0, 0.1)
    assert_close(price, 0.5 + 0.1 * math.log(3), torch.float64)
    # chi = +-1 are mirror images: half of them in expectation at lambda = 0, whatever eta.
    assert abs(solve_price(torch.tensor([1.0, -1.0]), 1.0, 0.3).item()) <= 1e-9


@given(
    tensors(nonzero, min_size=2),
    st.floats(0.01, 0.99),
    st.floats(-3, 3).map(lambda power: 10**power),
)
def test_solved_price_meets_the_expectation(delight, share, temperature):
    count = share * delight.numel()
    price = solve_price(delight, count, temperature).item()
    kept = oracle.expected_count(delight.tolist(), price, temperature)
    # A price can be no finer than its own rounding: the sum moves by at most M / (4 eta) per step.
    rounding = delight.numel() * abs(price) / temperature * TOLERANCES[torch.float64]["rtol"]
    assert abs(kept - count) <= 2e-9 * count + rounding


@given(tensors(st.floats(-3, 3), min_size=2), st.floats(0.05, 0.95), st.floats(0.1, 10))
def test_solved_price_against_bisection(delight, share, temperature):
    count = share * delight.numel()
    price = solve_price(delight, count, temperature)
    expected = oracle.solved_price(delight.tolist(), count, temperature)
    assert_close(price, expected, torch.float32)


def test_solved_price_counts_infinities_first():
    # One unit is surely kept, one surely not: the two in the middle share the remaining 1.
    price = solve_price(torch.tensor([INF, -INF, 2.0, 2.0]), 2.0, 1.0)
    assert_close(price, 2.0, torch.float64)


@pytest.mark.parametrize(("count", "price"), [(3.0, -INF), (4.0, -INF), (1.0, INF), (0.5, INF)])
def test_a_count_that_no_price_meets_has_an_infinite_one(count, price):
    # One infinite delight is kept at any price, and there are three to keep at most.
    assert solve_price(torch.tensor([INF, 1.0, 2.0]), count, 1.0).item() == price


def test_a_temperature_of_next_to_nothing_gives_the_order_statistic():
    # The gate is a step: 0.7 of two units lies between, where no price but 1 itself will do.
    assert_close(solve_price(torch.tensor([0.5, 1.0]), 0.7, 1e-300), 1.0)
    # And a price next to nothing is found to well within rounding, if not to its last digit.
    assert_close(solve_price(torch.tensor([-1e-200, 1.0]).double(), 1.3, 1e-300), 0.0)


def test_a_weighted_value_stands_for_its_copies():
    values, weight = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([3.0, 1.0, 2.0])
    copies = values.repeat_interleave(weight.long())
    price = solve_price(values, 1.5, 0.7, weight=weight)
    assert_close(price, solve_price(copies, 1.5, 0.7), torch.float32)
