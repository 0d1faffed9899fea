import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.actors.setup import Settings
from kondo.actors.source_price import EVERYTHING, Price, PriceWindow, SourceGate, sketch
from tolerances import assert_close


def at(rate):
    return SourceGate(Settings(gate=kondo.Gate(rate=rate)))


def draw(seed=0, **options):
    return SourceGate(Settings(gate=kondo.UnbiasedGate(**options), seed=seed))


@given(
    st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
)
def test_a_window_of_few_values_prices_exactly(values, rate):
    """A sketch of few values holds them all: the price is that of the sorted delights."""
    delight = torch.tensor(values)
    window = PriceWindow(4)
    window.push(sketch(delight, 64), len(values))
    price = window.price(at(rate))
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
        rates.append(float((torch.cat(everything) > window.price(at(0.03)).price).double().mean()))
    assert np.mean(rates) == pytest.approx(0.03, abs=0.0015)
    assert np.std(rates) < 0.01


def test_a_price_from_what_was_sent_alone_would_rise_for_ever():
    """Why actors sketch what they do not send: the top 10% of the top 10% is the top 1%."""
    delight = torch.arange(1.0, 1001.0)
    window = PriceWindow(1)
    window.push(sketch(delight, 64), 1000)
    assert window.price(at(0.1)).price == pytest.approx(900, abs=10)
    window.push(sketch(delight[delight > 900], 64), 100)
    assert window.price(at(0.1)).price == pytest.approx(990, abs=2)


def test_zero_delight_is_never_bought_and_counts_for_the_rate():
    delight = torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 2.0, 0.0, 0.0])
    window = PriceWindow(1)
    window.push(sketch(delight, 4), 8)
    assert window.price(at(1.0)) == EVERYTHING
    kept = at(1.0).bought(delight, EVERYTHING, 0, torch.arange(8)).keep
    assert kept.tolist() == (delight != 0).tolist()
    assert window.price(at(0.25)).price == 1.0  # two of eight units


def test_a_share_of_ties_is_bought_and_the_same_wherever_it_is_judged():
    delight, price, every = torch.ones(4000), Price(1.0, 0.25), torch.arange(4000)
    keep, weight, *_ = at(0.1).bought(delight, price, 7, every)
    assert torch.equal(weight, keep.double())
    assert float(keep.float().mean()) == pytest.approx(0.25, abs=0.03)
    some = every[::3]
    again = at(0.1).bought(delight[some], price, 7, some).keep
    assert torch.equal(again, keep[some])
    assert not torch.equal(keep, at(0.1).bought(delight, price, 8, every).keep)


@pytest.mark.parametrize("gate", [at(0.1), draw(rate=0.1)])
@pytest.mark.parametrize("unit", ["sample", "token", "sequence"])
def test_the_value_of_a_unit_does_not_depend_on_who_else_is_there(unit, gate):
    log_probs = -torch.rand(500) if unit == "sample" else -torch.rand(500, 7)
    advantages = torch.randn(500)
    whole = gate.values(log_probs, advantages, unit)
    part = gate.values(log_probs[::3], advantages[::3], unit)
    assert torch.equal(whole[::3], part)
    assert whole.dtype == torch.float32


def values_of(generator, shift):
    """Sizes of gradients, many near 0."""
    return (torch.randn(1000, generator=generator) * 2 + shift).exp()


def test_a_draw_holds_its_rate_over_sketches_of_many_actors():
    generator = torch.Generator().manual_seed(2)
    rates = []
    for _ in range(60):
        window, everything = PriceWindow(4), []
        for shift in (0.0, 0.5, -1.0, 2.0):  # actors need not see the same values
            everything.append(values_of(generator, shift))
            window.push(sketch(everything[-1], 4), 2000)  # half of the units are worth 0
        price = window.price(draw(rate=0.03)).price
        chance = (torch.cat(everything).double() / price).clamp(max=1)
        rates.append(float(chance.sum()) / 8000)
    assert np.mean(rates) == pytest.approx(0.03, rel=0.03)
    assert np.std(rates) < 0.003


def test_a_draw_holds_its_noise_over_sketches_of_many_actors():
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(60):
        window, everything = PriceWindow(4), []
        for shift in (0.0, 0.5, -1.0, 2.0):
            everything.append(values_of(generator, shift))
            window.push(sketch(everything[-1], 4), 1000)
        worth = torch.cat(everything).double()
        chance = (worth / window.price(draw(noise=1.5)).price).clamp(max=1)
        found.append(float((worth.square() / chance).sum() / worth.square().sum()))
    assert np.mean(found) == pytest.approx(1.5, rel=0.03)


def test_a_unit_is_drawn_as_often_as_its_chance_says_and_weighted_by_its_inverse():
    """Exactly 1 in expectation: a share `chance` of all rollouts, times 1 / chance."""
    values, price = torch.tensor([0.0, 0.1, 0.5, 1.9, 2.0, 7.0]), Price(2.0, 1.0)
    chance = torch.tensor([0.0, 0.05, 0.25, 0.95, 1.0, 1.0]).double()
    every, number = torch.arange(6), 20_000
    gate = draw(rate=0.1)
    drawn = [gate.bought(values, price, n, every)[:2] for n in range(number)]
    for keep, weight in drawn[:50]:
        assert_close(weight, torch.where(keep, 1 / chance, 0.0), torch.float32)
    share = torch.stack([keep for keep, _ in drawn]).double().mean(0)
    error = (chance * (1 - chance) / number).sqrt()
    assert bool(((share - chance).abs() <= 4 * error).all())
    assert share[0] == 0
    assert share[4:].tolist() == [1, 1]


def test_draws_are_those_of_the_run_the_rollout_the_row_and_the_token():
    values, price, every = torch.ones(500, 4), Price(2.0, 1.0), torch.arange(500)

    def keep(index=every, seed=0, number=3):
        return draw(seed, rate=0.1).bought(values[index], price, number, index).keep

    first = keep()
    assert float(first.double().mean()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(keep(every[::3]), first[::3])
    # Every other draw agrees with it by chance alone: half of the time.
    for other in (keep(seed=1), keep(seed=2), keep(number=4), keep().flip(0), keep().flip(1)):
        assert float((other == first).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_a_draw_without_a_price_keeps_everything():
    values = torch.tensor([0.0, 1e-30, 3.0])
    keep, weight, *_ = draw(rate=0.1).bought(values, EVERYTHING, 0, torch.arange(3))
    assert keep.tolist() == [False, True, True]
    assert weight.tolist() == [0, 1, 1]


class EveryOther(kondo.BaseGate):
    """Of units in the order of their values."""

    def choose(self, values, mask, generator=None):
        order = values.argsort(dim=-1).argsort(dim=-1)
        return kondo.Choice.of(mask & (order % 2 == 0), mask)


@pytest.mark.parametrize(
    ("gate", "one_price"),
    [
        ("delight:0.03", True),
        ("price:0.1", True),
        ("noise:2", True),
        ("unbiased:0.1,max_weight=20", True),
        ("delight:0.1,reserve=0.1", False),
        ("unbiased:0.1,window=4", False),
        ("variance:0.1", False),
        ("dense", False),
        (EveryOther(), False),
        (lambda values, mask, generator: kondo.Choice.of(mask, mask), False),
    ],
)
def test_who_decides_what_is_sent(gate, one_price):
    """The price of a gate that has one; the learner of any other."""
    found = SourceGate(Settings(gate=gate))
    assert found.one_price == found.at_source == one_price
    assert not SourceGate(Settings(gate=gate, at_source=False)).at_source
    if not one_price:
        assert found.price(torch.ones(5), torch.ones(5).double(), 10) == EVERYTHING


def test_the_sign_of_a_value_does_not_matter_for_a_draw():
    """Losses are as large as wins: the sketch of an actor must count them alike."""
    gate = draw(rate=0.5, signal=kondo.signals.advantage)
    values = gate.values(-torch.rand(4), torch.tensor([0.5, -0.5, 0.25, 0.0]), "sample")
    assert values.tolist() == [0.5, 0.5, 0.25, 0.0]
    assert gate.least == 0


def test_the_window_forgets_and_its_state_comes_back():
    window = PriceWindow(2)
    for value in (9.0, 1.0, 2.0):
        window.push(sketch(torch.full((10,), value), 4), 10)
    again = PriceWindow(2)
    again.load_state_dict(window.state_dict())
    assert window.price(at(0.4)) == again.price(at(0.4)) == (2.0, pytest.approx(0.8))


@pytest.mark.parametrize(
    "change",
    [
        {"values": [torch.tensor([1.0, torch.nan])]},
        {"values": [torch.tensor([1.0, 0.0])]},
        {"values": [torch.tensor([1.0])]},
        {"values": [torch.tensor([1.0, 2.0]).double()]},
        {"values": [[1.0, 2.0]]},
        {"values": [torch.tensor([1.0, 2.0])] * 2},
        {"values": None},
        {"weights": [torch.tensor([1, -1])]},
        {"weights": [torch.tensor([1, 11])]},
        {"weights": [torch.tensor([1.0, 1.0])]},
        {"units": [-5]},
        {"units": [2.5]},
        {"units": []},
    ],
)
def test_a_state_that_no_window_can_hold_is_refused(change):
    window = PriceWindow(2)
    window.push(sketch(torch.tensor([1.0, 2.0]), 4), 10)
    price, state = window.price(at(0.1)), window.state_dict()
    with pytest.raises(ValueError, match="window must have"):
        window.load_state_dict(state | change)
    assert window.price(at(0.1)) == price
    window.load_state_dict(state)


def test_after_rollouts_without_a_value_a_draw_keeps_everything():
    """They say nothing of a price; an infinite one would drop the first success for good."""
    for options in ({"rate": 0.1}, {"noise": 1.5}):
        gate, window = draw(**options), PriceWindow(4)
        for _ in range(4):
            window.push(sketch(torch.zeros(100), 4), 100)
        found = gate.bought(torch.ones(100), window.price(gate), 5, torch.arange(100))
        assert found.keep.all()
        assert (found.weight == 1).all()


def test_large_seeds_differ():
    draws = [
        draw(seed, rate=0.1).bought(torch.ones(200), Price(2.0, 1.0), 0, torch.arange(200))
        for seed in (2**24, 2**24 + 1)
    ]
    assert not torch.equal(draws[0].keep, draws[1].keep)


def test_an_empty_window_buys_everything():
    assert PriceWindow(3).price(at(0.03)) == EVERYTHING


@pytest.mark.parametrize("delight", [[], [0.0, 0.0], [float("nan"), float("inf")]])
def test_a_sketch_of_nothing_is_empty(delight):
    values, weights = sketch(torch.tensor(delight), 4)
    assert (len(values), len(weights)) == (0, 0)
