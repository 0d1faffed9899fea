"""kondo.Gate: its modes. Options, state, properties and sizes have files of their own."""

import math

import pytest
import torch

import kondo
from kondo import Gate
from oracles import core as oracle
from tolerances import assert_close

INF, NAN = math.inf, math.nan


def gaussian(size: int, std: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return std * torch.randn(size, generator=generator, dtype=dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Hard rate.


def test_rate_literal(device):
    # Eight units, one masked and one zero: round(0.3 * 7) = 2 of the six that can be kept.
    delight = torch.tensor([[0.3, -1.0, 2.0, 0.0], [0.5, 9.0, -2.0, 0.1]], device=device)
    mask = torch.tensor([[True] * 4, [True, False, True, True]], device=device)
    out = Gate(rate=0.3)(delight, mask)
    keep = [[False, False, True, False], [True, False, False, False]]
    assert out.keep.tolist() == keep
    assert out.weight.tolist() == out.probability.tolist() == torch.tensor(keep).float().tolist()
    assert out.price.item() == 0.5  # the lowest delight kept
    assert_close(out.rate, 2 / 7)
    assert out.keep.device.type == out.weight.device.type == device.type


def test_a_rate_keeps_negative_delight_when_nothing_else_is_left():
    out = Gate(rate=0.75)(torch.tensor([1.0, -3.0, -1.0, -2.0]))
    assert out.keep.tolist() == [True, False, True, True]
    assert out.price.item() == -2.0


def test_a_rate_keeps_at_least_one_unit():
    assert Gate(rate=1e-6)(gaussian(50)).keep.sum() == 1


def test_a_rate_never_keeps_zero_delight():
    # 80% of 10 is 8, but three units alone are worth anything, two of them negative.
    delight = torch.zeros(10)
    delight[2], delight[5], delight[9] = -1.0, 2.0, -3.0
    out = Gate(rate=0.8)(delight)
    assert out.keep.nonzero().flatten().tolist() == [2, 5, 9]
    assert_close(out.rate, 0.3)


def test_a_rate_of_one_keeps_all_that_is_worth_anything():
    assert Gate(rate=1.0)(torch.tensor([0.0, -1.0, 1.0])).keep.tolist() == [False, True, True]


def test_infinite_delight_comes_first_and_last():
    out = Gate(rate=0.5)(torch.tensor([-INF, INF, 1.0, 2.0]))
    assert out.keep.tolist() == [False, True, False, True]


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.5])
@pytest.mark.parametrize("shape", [(1000,), (37, 41), (5, 7, 11)])
def test_tied_units_are_kept_wherever_they_stand(rate, shape):
    # The mean position of k of n tied units is (n - 1) / 2 with variance (n + 1)(n - k) / (12 k);
    # over ten tied values a tenth of it.
    size = math.prod(shape)
    count = round(rate * size)
    means = []
    for value in range(1, 11):
        keep = Gate(rate=rate)(torch.full(shape, 0.1 * value)).keep
        assert keep.sum() == count
        means.append(keep.flatten().nonzero().double().mean().item())
    deviation = math.sqrt((size + 1) * (size - count) / (12 * count) / 10)
    assert abs(sum(means) / 10 - (size - 1) / 2) < 4 * deviation


def test_a_hard_gate_draws_nothing_and_repeats_itself():
    delight, before = torch.ones(100), torch.get_rng_state()
    first, second = Gate(rate=0.1)(delight), Gate(rate=0.1)(delight)
    assert torch.equal(first.keep, second.keep)
    assert torch.equal(torch.get_rng_state(), before)


# Fixed price.


def test_price_literal():
    # Strictly above the price; zero delight never, although 0 > -1.
    delight = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5])
    out = Gate(price=-1.0)(delight)
    assert out.keep.tolist() == [False, False, True, False, True]
    assert out.price.item() == -1.0
    assert_close(out.rate, 0.4)


def test_price_zero_keeps_successes():
    assert Gate(price=0.0)(torch.tensor([-1.0, 0.0, 1e-30])).keep.tolist() == [False, False, True]


def test_an_infinite_price_keeps_nothing_and_a_minus_infinite_one_everything():
    delight = torch.tensor([-1.0, 0.0, 1.0])
    assert not Gate(price=INF)(delight).keep.any()
    assert Gate(price=-INF)(delight).keep.tolist() == [True, False, True]


# Bernoulli.


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1.0, 30.0])
def test_a_drawn_rate_is_the_one_asked_for(rate, temperature):
    # The plain quantile as price keeps 45% at rate = 3%, std = 0.1, eta = 1.
    size = 50_000
    delight = gaussian(size, std=0.1)
    quantile = delight.quantile(1 - rate).item()
    if temperature >= 1:
        assert torch.sigmoid((delight - quantile) / temperature).mean() > 0.4
    out = Gate(rate=rate, temperature=temperature)(delight, generator=seeded())
    assert_close(out.probability.mean(), rate, torch.float32)
    assert abs(out.rate.item() - rate) < 5 * math.sqrt(rate * (1 - rate) / size)
    assert_close(out.probability, torch.sigmoid((delight - out.price) / temperature))


def test_a_drawn_rate_is_a_rate_of_the_units_that_count():
    # 300 count, of which 100 are worth something: 10% of 300 is 30 expected among those 100.
    delight, mask = gaussian(1000), torch.arange(1000) < 300
    delight[:200] = 0.0
    out = Gate(rate=0.1, temperature=0.5)(delight, mask, seeded())
    assert_close(out.probability.sum(), 30.0, torch.float32)
    assert not out.probability[:200].any()
    assert not out.probability[300:].any()
    assert_close(out.rate, out.keep.sum().item() / 300)


def test_bernoulli_literal_and_oracle():
    # sigmoid((chi - 1) / 0.5) for chi = 1, 2, 0.5: sigmoid(0), sigmoid(2), sigmoid(-1).
    delight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    out = Gate(price=1.0, temperature=0.5)(delight, generator=seeded())
    expected = [oracle.sigmoid(0.0), oracle.sigmoid(2.0), oracle.sigmoid(-1.0)]
    assert_close(out.probability, torch.tensor(expected, dtype=torch.float64))
    assert_close(out.probability[0], 0.5)


def test_units_are_kept_as_often_as_their_probability_says():
    delight, gate, draws = torch.linspace(-2, 2, 20), Gate(price=0.0, temperature=1.0), 4000
    generator = seeded()
    kept = sum(gate(delight, generator=generator).keep.double() for _ in range(draws)) / draws
    probability = gate(delight, generator=generator).probability.double()
    deviation = (probability * (1 - probability) / draws).sqrt()
    assert ((kept - probability).abs() < 5 * deviation).all()


def test_the_generator_decides_the_draw(device):
    delight = torch.linspace(-2, 2, 200, device=device)
    gate = Gate(price=0.0, temperature=1.0)
    first = gate(delight, generator=seeded(1)).keep
    assert torch.equal(gate(delight, generator=seeded(1)).keep, first)
    assert not torch.equal(gate(delight, generator=seeded(2)).keep, first)
    torch.manual_seed(5)
    default = gate(delight).keep
    torch.manual_seed(5)
    assert torch.equal(gate(delight).keep, default)


def test_a_generator_of_the_devices_own_will_do(device):
    gate, delight = Gate(rate=0.3, reserve=0.5), torch.linspace(1, 2, 50, device=device)
    first, second = (
        gate(delight, generator=torch.Generator(device).manual_seed(3)).keep for _ in range(2)
    )
    assert torch.equal(first, second)


def test_gates_run_where_only_deterministic_kernels_may(device):
    delight = torch.ones(50, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for gate in (Gate(rate=0.3), Gate(rate=0.3, temperature=1.0), Gate(rate=0.3, reserve=0.5)):
            assert gate(delight).keep.any()
        advantages = kondo.advantage.group_mean(delight, 5)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not advantages.any()


def test_infinite_delight_is_worth_any_price_or_none():
    delight = torch.tensor([INF, -INF, 1.0, -1.0])
    for gate in (Gate(rate=0.5, temperature=1.0), Gate(price=INF, temperature=1.0)):
        assert gate(delight, generator=seeded()).probability[:2].tolist() == [1.0, 0.0]


def test_a_full_rate_is_certain():
    out = Gate(rate=1.0, temperature=1.0)(torch.tensor([-5.0, 0.0, 5.0]), generator=seeded())
    assert out.probability.tolist() == [1.0, 0.0, 1.0]
    assert out.price.item() == -INF


# Shapes, types, nothing, and errors.


def test_a_single_unit_may_have_no_dimension():
    assert Gate(rate=0.5)(torch.tensor(2.0)).keep.item() is True


def test_a_mask_per_row_covers_its_tokens():
    out = Gate(rate=0.5)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    assert out.keep.tolist() == [[False, True], [False, False]]


def test_nan_in_a_unit_that_counts_is_an_error_that_names_it():
    delight = torch.tensor([[1.0, NAN], [2.0, NAN], [NAN, 1.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    with pytest.raises(ValueError, match=r"NaN in unit \(1, 1\) \(2 in all\)"):
        Gate(rate=0.5)(delight, mask)
    with pytest.raises(ValueError, match="NaN in unit 3 "):
        Gate(price=0.0)(torch.tensor([1.0, 0.0, -INF, NAN]))


@pytest.mark.parametrize(
    ("delight", "mask", "message"),
    [
        ([1.0], None, "values must be a floating-point tensor, got list"),
        (torch.tensor([1]), None, "values must be floating point"),
        (torch.ones(2), torch.ones(2), "mask must be a bool tensor"),
        (torch.ones(2), torch.ones(3, dtype=torch.bool), r"mask must have shape \[2\]"),
    ],
)
def test_bad_input_is_named(delight, mask, message):
    with pytest.raises(ValueError, match=message):
        Gate(rate=0.5)(delight, mask)


def test_a_refused_batch_leaves_no_trace():
    gate = Gate(rate=0.5, temperature=1.0, window=2)
    before = gate.state_dict()
    with pytest.raises(ValueError, match="NaN"):
        gate(torch.tensor([1.0, NAN]))
    assert gate.state_dict() == before


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (Gate(rate=0.03), "Gate(rate=0.03)"),
        (
            Gate(price=0.0, temperature=1.0),
            "Gate(price=0.0, temperature=1.0)",
        ),
        (Gate(rate=1.0, window=8), "Gate(rate=1.0, window=8, warmup=2)"),
    ],
)
def test_repr_is_the_call_that_builds_it(gate, text):
    assert repr(gate) == text
    assert repr(eval(text, {"Gate": kondo.Gate})) == text
