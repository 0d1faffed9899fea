import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.actors.source_price import (
    EVERYTHING,
    Price,
    PriceWindow,
    bought,
    sketch,
    unit_delight,
)


@given(
    st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
)
def test_a_window_of_few_values_prices_exactly(values, rate):
    """A sketch of few values holds them all: the price is that of the sorted delights."""
    delight = torch.tensor(values)
    window = PriceWindow(4)
    window.push(sketch(delight, 64), len(values))
    price = window.price(rate)
    budget = rate * len(values)
    above = int(((delight > price.price) & (delight != 0)).sum())
    tied = int(((delight == price.price) & (delight != 0)).sum())
    if price == EVERYTHING:
        assert int((delight != 0).sum()) <= budget
    else:
        assert above + price.share * tied == pytest.approx(budget)
        assert 0 < price.share <= 1


def test_sketches_of_many_actors_give_an_unbiased_price():
    generator = torch.Generator().manual_seed(1)
    rates = []
    for _ in range(60):
        window, everything = PriceWindow(4), []
        for shift in (0.0, 0.5, -1.0, 2.0):  # actors need not see the same delight
            delight = torch.randn(1000, generator=generator) + shift
            window.push(sketch(delight, 4), 1000)
            everything.append(delight)
        rates.append(float((torch.cat(everything) > window.price(0.03).price).double().mean()))
    assert np.mean(rates) == pytest.approx(0.03, abs=0.0015)
    assert np.std(rates) < 0.01


def test_a_price_from_what_was_sent_alone_would_rise_for_ever():
    """Why actors sketch what they do not send: the top 10% of the top 10% is the top 1%."""
    delight = torch.arange(1.0, 1001.0)
    window = PriceWindow(1)
    window.push(sketch(delight, 64), 1000)
    assert window.price(0.1).price == pytest.approx(900, abs=10)
    window.push(sketch(delight[delight > 900], 64), 100)
    assert window.price(0.1).price == pytest.approx(990, abs=2)


def test_zero_delight_is_never_bought_and_counts_for_the_rate():
    delight = torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 2.0, 0.0, 0.0])
    window = PriceWindow(1)
    window.push(sketch(delight, 4), 8)
    assert window.price(1.0) == EVERYTHING
    kept = bought(delight, EVERYTHING, number=0, index=torch.arange(8))
    assert kept.tolist() == (delight != 0).tolist()
    assert window.price(0.25).price == 1.0  # two of eight units


def test_a_share_of_ties_is_bought_and_the_same_wherever_it_is_judged():
    delight, price, every = torch.ones(4000), Price(1.0, 0.25), torch.arange(4000)
    keep = bought(delight, price, number=7, index=every)
    assert float(keep.float().mean()) == pytest.approx(0.25, abs=0.03)
    some = every[::3]
    again = bought(delight[some], price, number=7, index=some)
    assert torch.equal(again, keep[some])
    assert not torch.equal(keep, bought(delight, price, number=8, index=every))


def test_the_delight_of_a_sequence_does_not_depend_on_who_else_is_there():
    log_probs, advantages = -torch.rand(500, 7), torch.randn(500)
    whole = unit_delight(log_probs, advantages, "sequence")
    part = unit_delight(log_probs[::3], advantages[::3], "sequence")
    assert torch.equal(whole[::3], part)


def test_the_window_forgets_and_its_state_comes_back():
    window = PriceWindow(2)
    for value in (9.0, 1.0, 2.0):
        window.push(sketch(torch.full((10,), value), 4), 10)
    again = PriceWindow(2)
    again.load_state_dict(window.state_dict())
    assert window.price(0.4) == again.price(0.4) == (2.0, pytest.approx(0.8))


def test_an_empty_window_buys_everything():
    assert PriceWindow(3).price(0.03) == EVERYTHING


@pytest.mark.parametrize("delight", [[], [0.0, 0.0], [float("nan"), float("inf")]])
def test_a_sketch_of_nothing_is_empty(delight):
    values, weights = sketch(torch.tensor(delight), 4)
    assert (len(values), len(weights)) == (0, 0)
