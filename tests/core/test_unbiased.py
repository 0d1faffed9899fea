"""kondo.UnbiasedGate: held to every draw there is, to brute force, and to what it promises."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kondo
import zoo
from core.strategies import masked, rates, signed, tensors
from kondo import UnbiasedGate
from kondo.core.adapters import adapter_of
from kondo.core.fingerprint import fingerprint
from kondo.core.sampling import reads_are_free, with_free_reads
from kondo.core.unbiased import systematic
from oracles import sampling
from tolerances import assert_close

INF, NAN = math.inf, math.nan

noises = st.floats(1.01, 20.0)
small = tensors(st.one_of(st.just(0.0), st.floats(0.05, 50.0)), max_size=7)
"""Values of a few units, zeros among them; equal ones come by shrinking."""


def draws_for(order, start):
    """Return draws [M] whose ranks are `order` and whose sum has `start` behind the point."""
    size = len(order)
    draws = torch.zeros(size, dtype=torch.float64)
    draws[torch.tensor(order)] = (torch.arange(size).double() + 0.5) / (2 * size)
    return draws + (start - draws.sum()) / size + 1 / size


def every_draw(gate, values):
    """Yield (probability, choice) of every draw of a gate, by enumeration."""
    size = values.numel()
    chances = gate(values).probability.tolist()
    orders = list(itertools.permutations(range(size)))
    for order in orders:
        for start, stop in sampling.starts_of(chances, order):
            draws = draws_for(order, (start + stop) / 2)
            choice = gate.choose(values, torch.ones_like(values, dtype=torch.bool), draws)
            yield (stop - start) / len(orders), choice


GATES = {
    "rate": UnbiasedGate(rate=0.4),
    "low_rate": UnbiasedGate(rate=0.01),
    "noise": UnbiasedGate(noise=1.7),
    "floor": UnbiasedGate(rate=0.5, max_weight=2.5),
    "noise_and_floor": UnbiasedGate(noise=1.7, max_weight=1.8),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
problems = pytest.mark.parametrize(
    "values",
    [
        [0.3, 0.1, 0.9, 0.2, 0.45],
        [8.0, 1.0, 1.0, 1.0, 0.0],  # one is certain, one impossible
        [1.0, 1.0, 1.0, 1.0],  # ties
        [5.0, 4.0, 0.02, 0.01, 3.0],
        [0.7],
    ],
)


# Unbiased, by enumeration of all draws.


@every_gate
@problems
def test_the_expected_weight_of_every_unit_is_one(gate, values):
    values = torch.tensor(values, dtype=torch.float64)
    weight, total = torch.zeros_like(values), 0.0
    for chance, choice in every_draw(gate, values):
        weight, total = weight + chance * choice.weight, total + chance
    assert total == pytest.approx(1.0, abs=1e-9)
    assert_close(weight, (values > 0).double())


@every_gate
@problems
def test_every_draw_keeps_the_same_number_each_with_its_probability(gate, values):
    values = torch.tensor(values, dtype=torch.float64)
    expected = gate(values).probability
    kept, numbers = torch.zeros_like(values), set()
    for chance, choice in every_draw(gate, values):
        kept = kept + chance * choice.keep.double()
        numbers.add(int(choice.keep.sum()))
        assert torch.equal(choice.probability, expected)
    assert numbers == {round(float(expected.sum()))}
    assert_close(kept, expected)


def test_the_expected_gradient_is_the_dense_one():
    values = torch.tensor([0.3, 0.1, 0.9, 0.2, 0.45], dtype=torch.float64)
    advantages = torch.tensor([0.5, -0.2, 1.0, 0.3, -0.6], dtype=torch.float64)
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)

    def gradient(gate):
        policy.zero_grad()
        kondo.backward(log_prob, batch, advantages, gate=gate, screen=-values)
        return policy.weight.grad.clone()

    def log_prob(rows):
        return torch.nn.functional.logsigmoid(policy(rows)).squeeze(1)

    whole = gradient(None)
    expected = torch.zeros_like(whole)
    for chance, choice in every_draw(UnbiasedGate(rate=0.4), values):
        expected += chance * gradient(choice)
    assert_close(expected, whole)


@settings(max_examples=40, deadline=None)
@given(tensors(st.floats(1e-3, 1e3), max_size=4), rates)
def test_any_values_are_unbiased(values, rate):
    weight = sum(
        chance * choice.weight for chance, choice in every_draw(UnbiasedGate(rate=rate), values)
    )
    assert torch.allclose(weight, torch.ones_like(values), atol=1e-6)


def test_a_million_draws_have_the_probabilities():
    values = torch.tensor([0.2, 3.0, 0.7, 0.0, 0.1, 0.4], dtype=torch.float64)
    gate, number = UnbiasedGate(rate=0.5), 1_000_000
    many = values.expand(number, -1)
    draws = torch.rand(many.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out = gate.choose(many, torch.ones_like(many, dtype=torch.bool), draws)
    assert (out.keep.sum(1) == 3).all()
    expected = torch.tensor(sampling.probabilities(values.tolist(), 3), dtype=torch.float64)
    error = (expected * (1 - expected) / number).sqrt()
    assert ((out.keep.double().mean(0) - expected).abs() <= 4.5 * error).all()


# Probabilities and numbers, against bisection and brute force.


@settings(max_examples=200)
@given(units=masked(st.one_of(st.just(0.0), st.floats(1e-4, 1e4))), rate=rates)
def test_probabilities_of_a_rate(units, rate):
    values, mask, dirty = units
    out = UnbiasedGate(rate=rate)(dirty, mask)
    worth = torch.where(mask, values, 0.0)
    able = int((worth > 0).sum())
    count = min(max(1, round(rate * int(mask.sum()))), able)
    assert int(out.keep.sum()) == count
    expected = torch.tensor(sampling.probabilities(worth.tolist(), count), dtype=torch.float64)
    torch.testing.assert_close(out.probability, expected, rtol=1e-6, atol=1e-9)
    assert_close(out.rate, count / int(mask.sum()) if mask.any() else 0.0)
    assert not out.keep[~mask | (values == 0)].any()
    assert torch.equal(out.weight[out.keep], 1 / out.probability[out.keep])
    assert not out.weight[~out.keep].any()


@settings(max_examples=200)
@given(small, noises)
def test_a_noise_budget_keeps_the_fewest_units(values, noise):
    out = UnbiasedGate(noise=noise)(values)
    worth = values.tolist()
    if not values.any():
        assert not out.keep.any()
        return
    count = int(out.keep.sum())
    assert count == sampling.smallest_count(worth, noise)
    assert sampling.second_moment(worth, out.probability.tolist()) <= noise * (1 + 1e-6)


@settings(max_examples=200)
@given(small, noises, st.floats(1.0, 30.0))
def test_a_noise_budget_with_a_largest_weight(values, noise, max_weight):
    out = UnbiasedGate(noise=noise, max_weight=max_weight)(values)
    worth, able = values.tolist(), int((values > 0).sum())
    if not able:
        return
    assert int(out.keep.sum()) == sampling.smallest_count(worth, noise, 1 / max_weight)
    assert float(out.probability[values > 0].min()) >= 1 / max_weight - 1e-9
    assert float(out.weight.max()) <= max_weight * (1 + 1e-9)


@settings(max_examples=200)
@given(small, st.floats(0.2, 1.0), st.floats(1.0, 10.0))
def test_a_largest_weight_raises_probabilities(values, rate, factor):
    out = UnbiasedGate(rate=rate, max_weight=factor / rate)(values)
    able = int((values > 0).sum())
    least = math.ceil(able * rate / factor - 1e-9)  # so that no weight is larger
    count = min(max(1, round(rate * values.numel()), least), able)
    assert int(out.keep.sum()) == count
    if not able:
        return
    floor = rate / factor
    assert float(out.weight.max()) <= factor / rate * (1 + 1e-9)
    expected = torch.tensor(
        sampling.probabilities(values.tolist(), count, floor), dtype=torch.float64
    )
    torch.testing.assert_close(out.probability, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([1.0, 1.0, 2.0], {"rate": 2 / 3}, [0.5, 0.5, 1.0]),
        ([1.0, 1.0, 2.0, 4.0], {"rate": 0.5}, [0.25, 0.25, 0.5, 1.0]),
        ([-1.0, 1.0, -2.0, 4.0], {"rate": 0.5}, [0.25, 0.25, 0.5, 1.0]),  # signs do not matter
        ([1.0, 2.0, 3.0], {"rate": 1.0}, [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 3.0], {"noise": 1.0}, [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 3.0], {"rate": 1.0}, [0.0, 0.0, 1.0]),
        ([1.0] * 4, {"noise": 2.0}, [0.5] * 4),
        ([1.0] * 4, {"noise": 1.9}, [0.75] * 4),  # two would be too noisy
        ([1.0] * 4, {"noise": 1e6}, [0.25] * 4),  # one is the fewest
        ([1e300, 1e300, 1e-300], {"rate": 2 / 3}, [1.0, 1.0, 0.0]),
        ([3.0, 1.0, 1.0, 1.0], {"rate": 0.5, "max_weight": 2.0}, [0.5] * 4),
    ],
)
def test_literals(values, options, expected, device):
    out = UnbiasedGate(**options)(torch.tensor(values, device=device, dtype=torch.float64))
    assert_close(out.probability, torch.tensor(expected, device=device, dtype=torch.float64))
    assert out.keep.device.type == out.weight.device.type == device.type
    assert int(out.keep.sum()) == round(sum(expected))


# Odd inputs.


def test_one_unit_is_kept_with_weight_one():
    out = UnbiasedGate(rate=0.01)(torch.tensor([-0.2]))
    assert out.keep.tolist() == [True]
    assert out.weight.tolist() == [1.0]


@pytest.mark.parametrize(("values", "count"), [([INF, 1.0, 2.0, 1.0], 2), ([INF, INF, 1.0], 2)])
def test_an_infinite_value_is_all_but_certain(values, count):
    out = UnbiasedGate(rate=count / len(values))(torch.tensor(values, dtype=torch.float64))
    assert int(out.keep.sum()) == count
    assert (out.probability[torch.tensor(values).isinf()] > 0.999).all()
    assert out.probability.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of rate and noise, got rate=None, noise=None"),
        ({"rate": 0.1, "noise": 2.0}, "give exactly one of rate and noise"),
        ({"rate": 0.0}, r"rate must lie in \(0, 1\], got 0.0"),
        ({"rate": NAN}, r"rate must lie in \(0, 1\], got nan"),
        ({"noise": 0.9}, "noise must be finite and at least 1, got 0.9"),
        ({"noise": INF}, "noise must be finite"),
        ({"rate": 0.1, "max_weight": 5.0}, "max_weight must be finite and at least 10, got 5.0"),
        ({"noise": 2.0, "max_weight": 0.5}, "max_weight must be finite and at least 1, got 0.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        UnbiasedGate(**options)


# Draws.


def test_units_that_are_certain_are_always_drawn():
    chance = torch.tensor([1.0, 0.3, 1.0, 0.3, 0.4], dtype=torch.float64).expand(5000, -1)
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(chance.shape, generator=generator).argsort(-1)
    start = torch.rand(5000, 1, generator=generator, dtype=torch.float64)
    keep = systematic(chance, torch.tensor([3.0]), order, start)
    assert keep[:, [0, 2]].all()
    assert (keep.sum(1) == 3).all()


def test_a_generator_draws_with_the_probabilities():
    """From a generator the order is a permutation, not the ranks of draws."""
    values, gate = torch.tensor([0.2, 3.0, 0.7, 0.0, 0.1, 0.4]).double(), UnbiasedGate(rate=0.5)
    generator, number = torch.Generator().manual_seed(1), 4000
    choices = [gate(values, generator=generator) for _ in range(number)]
    kept = torch.stack([choice.keep for choice in choices]).double().mean(0)
    expected = choices[0].probability
    error = (expected * (1 - expected) / number).sqrt()
    assert ((kept - expected).abs() <= 4.5 * error + 1e-12).all()


@settings(max_examples=100)
@given(small, st.one_of(st.builds(dict, rate=rates), st.builds(dict, noise=noises)))
def test_looking_at_values_changes_nothing(values, options):
    """On the CPU a price is found without a sort where nothing is certain."""
    gate, mask = UnbiasedGate(**options), torch.ones_like(values, dtype=torch.bool)
    blind = gate.choose(values, mask, torch.Generator().manual_seed(0))
    seen = with_free_reads(True, gate.choose, values, mask, torch.Generator().manual_seed(0))
    assert_close(seen.probability, blind.probability)
    assert torch.equal(seen.keep, blind.keep)
    assert_close(seen.price, blind.price)


def test_an_interrupt_leaves_no_free_reads_behind():
    def interrupted():
        assert reads_are_free()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_free_reads(True, interrupted)
    assert not reads_are_free()


@settings(max_examples=50)
@given(tensors(signed), rates, st.integers(0, 2**31))
def test_permuting_units_permutes_their_probabilities(values, rate, seed):
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed))
    gate = UnbiasedGate(rate=rate)
    assert_close(gate(values[order]).probability, gate(values).probability[order])


def test_draws_may_be_given_in_the_shape_of_the_values():
    values = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    draws, mask = torch.rand(4, 3), torch.ones(4, 3, dtype=torch.bool)
    gate = UnbiasedGate(rate=0.5)
    found = adapter_of(gate).choose(values, mask, draws)
    flat = gate.choose(values.flatten(), mask.flatten(), draws.flatten())
    assert torch.equal(found.keep, flat.keep.view(4, 3))


def test_a_given_price_decides_every_unit_by_itself():
    values = torch.tensor([0.5, -2.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    gate, price = UnbiasedGate(rate=0.5), torch.tensor([2.0], dtype=torch.float64)
    out = gate.choose_at(values, mask, price, torch.tensor([0.2, 0.9, 0.0, 0.6, 0.0]))
    assert_close(out.probability, torch.tensor([0.25, 1.0, 0.0, 0.5, 0.0], dtype=torch.float64))
    assert out.keep.tolist() == [True, True, False, False, False]
    assert_close(out.weight, torch.tensor([4.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))


@settings(max_examples=100)
@given(tensors(st.one_of(st.just(0.0), st.floats(1e-3, 1e3))), st.floats(0.05, 1.0), noises)
def test_values_that_stand_for_several_units_have_the_price_of_all(values, rate, noise):
    weight = torch.arange(values.numel()) % 3 + 1
    all_units = values.repeat_interleave(weight)
    num_valid = torch.tensor([float(all_units.numel())])
    for gate in (UnbiasedGate(rate=rate), UnbiasedGate(noise=noise)):
        price = gate.price_for(values, weight.double(), num_valid)
        expected = gate.price_for(all_units, torch.ones_like(all_units), num_valid)
        assert_close(price, expected)
    if values.any():
        price = UnbiasedGate(rate=rate).price_for(values, weight.double(), num_valid)
        total = math.fsum(sampling.at_price(all_units.tolist(), float(price)))
        able = int((all_units > 0).sum())
        assert total == pytest.approx(min(rate * all_units.numel(), able), rel=1e-6)


# In a step.


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_gradients_are_those_of_the_weighted_loss(unit):
    net, log_prob, batch = zoo.transformer(torch.Generator().manual_seed(0))
    net.double()
    advantages = torch.linspace(-1, 1, zoo.N, dtype=torch.float64)
    options = kondo.Options(generator=torch.Generator().manual_seed(1))
    gate = UnbiasedGate(rate=0.4)
    report = kondo.backward(log_prob, batch, advantages, gate=gate, unit=unit, options=options)
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    with torch.no_grad():
        known = log_prob(batch)
    norms = advantages.abs().unsqueeze(1) * (1 - known.exp())
    values = norms if unit == "token" else norms.square().sum(1).sqrt()
    choice = gate(values, generator=torch.Generator().manual_seed(1))
    weight = choice.weight if unit == "token" else choice.weight.unsqueeze(1)
    (-(weight * advantages.unsqueeze(1) * log_prob(batch)).sum() / known.numel()).backward()
    for name, p in net.named_parameters():
        assert_close(found[name], p.grad)
    assert report.kept == int(choice.keep.sum())
    assert report.price == pytest.approx(float(choice.price))
    assert report.rows_screened == zoo.N


def test_advantages_alone_need_no_screen():
    _, log_prob, batch = zoo.mlp(torch.Generator().manual_seed(0))
    gate = UnbiasedGate(rate=0.5, signal=kondo.signals.advantage)
    report = kondo.backward(log_prob, batch, torch.linspace(-1, 1, zoo.N), gate=gate)
    assert report.rows_screened == 0
    assert report.kept == round(0.5 * zoo.N)


def test_it_says_what_it_is():
    assert repr(UnbiasedGate(rate=0.1)) == "UnbiasedGate(rate=0.1)"
    gate = UnbiasedGate(noise=1.5, max_weight=9.0, signal=kondo.signals.abs_delight)
    assert repr(gate) == "UnbiasedGate(noise=1.5, max_weight=9.0, signal=abs_delight)"
    assert fingerprint(gate) == repr(gate)
