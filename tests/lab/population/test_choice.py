import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.core import pricing
from kondo_lab.population import choice
from tolerances import assert_close

RATES = [0.01, 0.07, 0.2, 0.29, 1 / 3, 0.5, 0.9, 1.0]
float_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@st.composite
def tied_priorities(draw):
    """[P, N] with few distinct values, many of them zero."""
    members, units = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    values = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, 3.0])
    rows = st.lists(values, min_size=units, max_size=units)
    return torch.tensor(draw(st.lists(rows, min_size=members, max_size=members)))


def continuous(shape, seed=0, zeros=0.3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=generator) < zeros, 0.0, values)


@given(tied_priorities(), st.sampled_from(RATES))
def test_top_is_the_gate_with_a_rate_ties_included(priority, rate):
    expected = torch.stack([kondo.Gate(rate=rate)(row).keep for row in priority])
    assert torch.equal(choice.top(priority, rate), expected)


@pytest.mark.parametrize("rate", RATES)
@float_dtypes
def test_top_is_the_gate_with_a_rate_on_distinct_values(rate, dtype):
    priority = continuous((4, 30)).to(dtype)
    expected = torch.stack([kondo.Gate(rate=rate)(row).keep for row in priority])
    assert torch.equal(choice.top(priority, rate), expected)
    assert expected.any()


def test_top_keeps_nothing_where_all_is_zero():
    assert not choice.top(torch.zeros(2, 5), 0.5).any()


def paper_quantile(row, rate):
    """The author's rule on a Python list: zeros compete, ties are kept, zeros are not paid for."""
    count = max(1, round(rate * len(row)))
    threshold = sorted(row, reverse=True)[count - 1] - 1e-6
    return [value >= threshold and value != 0 for value in row]


@given(tied_priorities(), st.sampled_from(RATES))
def test_quantile_is_the_papers_rule(priority, rate):
    expected = [paper_quantile(row, rate) for row in priority.tolist()]
    assert choice.quantile(priority, rate).tolist() == expected


@pytest.mark.parametrize("rate", RATES)
def test_quantile_is_the_papers_rule_on_distinct_values(rate):
    priority = continuous((4, 30))
    expected = [paper_quantile(row, rate) for row in priority.tolist()]
    assert choice.quantile(priority, rate).tolist() == expected


def test_quantile_keeps_what_differs_by_rounding_alone():
    priority = torch.tensor([[1.0, 1.0 - 5e-7, 1.0 - 3e-6, 0.2]], dtype=torch.float64)
    assert choice.quantile(priority, 0.25).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("count", [0.5, 3.0, 11.9])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_the_solved_price_keeps_the_count_and_is_the_cores(count, temperature):
    priority = continuous((5, 40), zeros=0.5)
    etas = torch.full((5, 1), temperature)
    price = choice.solve_price(priority, count, etas)
    for row, found in zip(priority, price, strict=True):
        bought = row[row != 0]
        assert_close(torch.sigmoid((bought - found) / etas[0]).sum(), count)
        # The core stops once the count is right to 1e-9, so its price is less precise.
        assert_close(
            found[0], pricing.solve_price(bought, count, float(etas[0])), dtype=torch.float32
        )


def test_there_is_no_price_where_no_more_than_the_count_can_be_bought():
    priority = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    price = choice.solve_price(priority, 2.0, torch.ones(3, 1))
    assert price[:2].tolist() == [[-math.inf], [-math.inf]]
    assert price[2].isfinite()


@pytest.mark.parametrize("rate", [0.05, 0.4, 1.0])
def test_draws_have_the_gates_probabilities(rate):
    priority = continuous((3, 50))
    temperature = torch.tensor([[0.125], [1.0], [8.0]])
    uniform = torch.rand(3, 50, generator=torch.Generator().manual_seed(3))
    keep = choice.draw(priority, rate, temperature, uniform)
    for row, eta, lot, kept in zip(priority, temperature, uniform, keep, strict=True):
        gate = kondo.Gate(rate=rate, temperature=float(eta))
        assert torch.equal(kept, lot < gate(row).probability)
    assert keep.any()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("units", "window"), [(10, 1), (7, 5), (100, 7)])
def test_rolling_is_the_gate_with_a_window(rate, units, window):
    members = 3
    rolling = choice.Rolling(members, units, rate, window, torch.empty(0, dtype=torch.float64))
    gates = [kondo.Gate(rate=rate, window=window) for _ in range(members)]
    kept = 0
    for step in range(40):
        priority = continuous((members, units), seed=step, zeros=0.2)
        if 10 <= step < 20:
            priority[1] = 0  # a member without any delight for longer than the window
        expected = torch.stack([gate(row).keep for gate, row in zip(gates, priority, strict=True)])
        assert torch.equal(rolling(priority), expected), step
        kept += int(expected.sum())
    assert kept > 0


def test_delight_is_the_cores():
    log_probs = torch.tensor([-0.0, 1e-4, -2.0, -math.inf, -math.inf, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -0.25], dtype=torch.float64)
    found = choice.delight(log_probs.view(2, 3), advantages.view(2, 3))
    assert torch.equal(found, kondo.delight(log_probs, advantages).view(2, 3))


def test_kept_units_come_first_and_in_their_order():
    keep = torch.tensor(
        [[False, True, False, True], [True, True, True, True], [False, False, False, True]]
    )
    assert choice.kept_first(keep).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [3, 0, 1, 2]]
