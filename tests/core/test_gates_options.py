"""Gate options: reserve, negatives' quota, inverse propensity, window, contradictions."""

import math

import pytest
import torch

from kondo import Gate
from kondo.core.adapters import adapter_of
from oracles import core as oracle
from tolerances import assert_close

INF, NAN = math.inf, math.nan


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def mean_over_draws(gate: Gate, delight: torch.Tensor, draws: int) -> tuple[torch.Tensor, ...]:
    """Return mean keep and mean weight of each unit over seeded draws, and its probability."""
    # Leading dimensions are drawn independently: one choice instead of thousands of calls.
    many, once = delight.expand(draws, -1), gate(delight, generator=seeded())
    out = gate.choose(many, torch.ones_like(many, dtype=torch.bool), seeded())
    assert_close(out.probability, once.probability.expand(draws, -1))
    return out.keep.double().mean(0), out.weight.mean(0), once.probability


# Reserve.


def test_reserve_literal():
    # Half of 8 is 4 kept: a quarter of them, 1, from the reserve; the top 3 for certain; each of
    # the other 5 with probability 1/5.
    delight = torch.tensor([5.0, -1.0, 4.0, -2.0, 3.0, -3.0, -4.0, -5.0])
    out = Gate(rate=0.5, reserve=0.25)(delight, generator=seeded())
    top = [0, 2, 4]
    assert out.keep.sum() == 4
    assert out.keep[top].all()
    expected = torch.full((8,), 0.2)
    expected[top] = 1.0
    assert_close(out.probability, expected)
    assert_close(out.weight, out.keep.float())
    assert out.price.item() == 3.0


def test_reserve_is_uniform_over_the_units_the_price_skips():
    delight, draws = torch.arange(1, 13).double(), 3000
    keep, _, probability = mean_over_draws(Gate(rate=0.5, reserve=0.5), delight, draws)
    # 6 kept: 12, 11, 10 for certain; 3 of the other 9.
    assert_close(probability, torch.tensor([1 / 3] * 9 + [1.0] * 3, dtype=torch.float64))
    deviation = math.sqrt(1 / 3 * 2 / 3 / draws)
    assert ((keep - probability).abs() <= 5 * deviation).all()


def test_reserve_never_draws_units_that_are_worth_nothing():
    delight, mask = gaussian(40), torch.arange(40) % 4 != 0
    delight[:10] = 0.0
    gate, generator = Gate(rate=0.3, reserve=1.0), seeded()
    for _ in range(50):
        out = gate(delight, mask, generator)
        assert out.keep.sum() == 9  # 30% of 30
        assert not out.keep[(delight == 0) | ~mask].any()


def test_a_small_reserve_still_reserves_one_of_several():
    # 3 kept, a tenth of them is 0.3: rounded to none, the rest would be invisible for ever.
    out = Gate(rate=0.03, reserve=0.1)(gaussian(100), generator=seeded())
    assert out.keep.sum() == 3
    assert (out.probability > 0).all()
    # But of a single kept unit none is spared, unless the draw is what the weights correct for.
    assert (Gate(rate=0.01, reserve=0.1)(gaussian(100)).probability > 0).sum() == 1
    unbiased = Gate(rate=0.01, reserve=0.1, inverse_propensity=True)
    assert_close(
        unbiased(gaussian(100)).probability, torch.full((100,), 0.01).double(), torch.float32
    )


# Negatives' quota.


def test_negative_quota_literal():
    # 4 of 8: half of them, 2, the highest negatives -1 and -2; then the two highest of the rest.
    delight = torch.tensor([5.0, -1.0, 4.0, -2.0, 3.0, -3.0, 2.0, -5.0])
    out = Gate(rate=0.5, negative_quota=0.5)(delight)
    assert out.keep.tolist() == [True, True, True, True, False, False, False, False]
    assert out.price.item() == 4.0
    assert torch.equal(out.weight, out.keep.float())


@pytest.mark.parametrize(("quota", "negatives"), [(0.0, 0), (0.2, 2), (0.5, 5), (1.0, 10)])
def test_negative_quota_is_met_exactly(quota, negatives):
    delight = gaussian(100)
    assert (delight > 0).sum() > 20
    keep = Gate(rate=0.1, negative_quota=quota)(delight).keep
    assert keep.sum() == 10
    assert (delight[keep] < 0).sum() == negatives


def test_negatives_that_run_out_are_made_up_for_at_the_top():
    delight = torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0, 6.0])
    keep = Gate(rate=0.5, negative_quota=1.0)(delight).keep
    assert keep.tolist() == [False, False, False, True, True, True]
    assert Gate(rate=0.5, negative_quota=1.0)(delight.abs()).keep.sum() == 3


def test_quota_and_reserve_share_the_count():
    # 4 kept: 2 in reserve, and the quota of 4 negatives cut to the remaining 2.
    delight = torch.tensor([5.0, -1.0, 4.0, -2.0, 3.0, -3.0, 2.0, -5.0])
    gate, generator = Gate(rate=0.5, negative_quota=1.0, reserve=0.5), seeded()
    for _ in range(20):
        out = gate(delight, generator=generator)
        assert out.keep.sum() == 4
        assert out.keep[[1, 3]].all()
        assert_close(out.probability[[0, 2, 4, 5, 6, 7]], torch.full((6,), 2 / 6))


# Inverse propensity.


@pytest.mark.parametrize(
    "gate",
    [
        Gate(rate=0.3, temperature=0.5, inverse_propensity=True),
        Gate(price=0.0, temperature=1.0, inverse_propensity=True),
        Gate(rate=0.5, reserve=0.4, inverse_propensity=True),
        Gate(rate=0.5, reserve=0.2, negative_quota=0.3, inverse_propensity=True),
        Gate(rate=0.1, reserve=0.2, inverse_propensity=True),
    ],
    ids=repr,
)
def test_inverse_propensity_weights_average_to_one(gate):
    # A weight of 1/p with probability p has mean 1 and variance (1 - p) / p.
    delight, draws = torch.linspace(-1.0, 1.1, 14, dtype=torch.float64), 2000
    keep, weight, p = mean_over_draws(gate, delight, draws)
    assert (p > 0).all()
    assert ((keep - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all()
    assert ((weight - 1).abs() <= 5 * ((1 - p) / p / draws).sqrt()).all()


def test_inverse_propensity_literal():
    # sigmoid(log 3) = 3/4: a kept unit weighs 4/3, a skipped one nothing.
    delight = torch.full((50,), math.log(3), dtype=torch.float64)
    out = Gate(price=0.0, temperature=1.0, inverse_propensity=True)(delight, generator=seeded())
    assert 25 < out.keep.sum() < 50
    assert_close(out.weight, out.keep * torch.tensor(4 / 3, dtype=torch.float64))


def test_the_draw_does_not_keep_what_is_all_but_impossible():
    # p = sigmoid(-40) = 4e-18. A float32 uniform is exactly 0 once in 2^24 draws, 0 < p, and the
    # unit would come with a weight of 2e17. Seed 34 draws that 0 as its 298,484th number.
    gate = Gate(price=0.0, temperature=1.0, inverse_propensity=True)
    delight = torch.full((300_000,), -40.0)
    assert not gate(delight, generator=seeded(34)).keep.any()


# Window.


def test_window_literal():
    gate = Gate(rate=0.5, window=2, warmup=1)
    # Warm-up: the call's own top 2 of 4.
    assert gate(torch.tensor([1.0, 2.0, 3.0, 4.0])).keep.tolist() == [False, False, True, True]
    # Past: 1 2 3 4. Half of 4 is 2, so the price is 3, whatever this call holds.
    out = gate(torch.tensor([5.0, 6.0, 7.0, 0.5]))
    assert out.keep.tolist() == [True, True, True, False]
    assert out.price.item() == 3.0
    assert_close(out.rate, 0.75)
    # Past: 0.5 1 2 3 4 5 6 7. Half of 8 is 4: the price is 4, and nothing here meets it.
    out = gate(torch.tensor([1.0, -1.0]))
    assert not out.keep.any()
    assert out.price.item() == 4.0
    # The first call is forgotten: -1 0.5 1 5 6 7, half of 6 is 3.
    assert gate(torch.tensor([1.0, 5.5])).price.item() == 5.0


def test_warmup_calls_keep_their_own_exact_rate():
    gate = Gate(rate=0.25, window=8, warmup=3)
    for call in range(3):
        assert gate((1 + call) * gaussian(40, seed=call)).keep.sum() == 10
    assert gate(100 + gaussian(40, seed=3)).keep.all()


@pytest.mark.parametrize(("window", "warmup"), [(1, 1), (3, 1), (8, 2), (100, 25)])
def test_warmup_is_a_quarter_of_the_window(window, warmup):
    assert Gate(rate=0.1, window=window).warmup == warmup


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rolling_price_holds_the_rate_over_small_batches(temperature, discrete, dtype):
    # Seven units a call cannot hold 10%; 600 calls can. Discrete delight (0.1, 0.3 or 0.7, as of
    # 0/1 rewards) has all its units at a price: a share of those must be kept.
    gate, generator = Gate(rate=0.1, temperature=temperature, window=50), seeded()
    kept = units = 0
    for _ in range(600):
        delight = torch.randn(7, generator=generator, dtype=dtype)
        if discrete:
            choice = torch.randint(0, 3, (7,), generator=generator)
            delight = torch.tensor([0.1, 0.3, 0.7], dtype=dtype)[choice]
        kept += gate(delight, generator=generator).keep.sum().item()
        units += 7
    # Counting noise of the calls and of the price, each about sqrt(0.1 * 0.9 / n).
    noise = math.sqrt(0.09 / units) + math.sqrt(0.09 / 350 / 12)
    assert abs(kept / units - 0.1) < 5 * noise


def test_a_rolling_price_does_not_repeat_its_lots():
    # The same tied batch again and again: every unit has its turn.
    gate, kept = Gate(rate=0.25, window=8, warmup=1), torch.zeros(8)
    for _ in range(100):
        kept += gate(torch.ones(8)).keep
    # 25 of 100 turns each, standard deviation sqrt(100 * 0.25 * 0.75) = 4.3.
    assert ((kept - 25).abs() < 5 * 4.33).all()


def test_a_rolling_drawn_price_is_solved_over_the_past():
    gate = Gate(rate=0.2, temperature=0.5, window=4, warmup=1)
    past = [gaussian(30, seed=call) for call in range(3)]
    for delight in past:
        gate(delight)
    out = gate(gaussian(10, seed=9))
    expected = oracle.solved_price(torch.cat(past).tolist(), 0.2 * 90, 0.5)
    assert_close(out.price, expected, torch.float32)


def test_zero_delight_counts_in_the_window_as_a_unit():
    # Past: 1 2 3 4 5 among 40 units that count; 10% of 40 is four of them, so the price is 2.
    gate = Gate(rate=0.1, window=2, warmup=1)
    gate(torch.cat([torch.arange(1.0, 6.0), torch.zeros(35)]))
    assert gate(torch.tensor([1.5, 2.0])).keep.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_a_dead_stretch_does_not_make_the_next_batch_free(temperature):
    """Zero-advantage and all-masked calls leave no price behind: the live call sets its own."""
    gate = Gate(rate=0.1, window=16, temperature=temperature)
    for _ in range(5):
        gate(torch.zeros(100))
        gate(torch.ones(4), torch.zeros(4, dtype=torch.bool))
    out = gate(gaussian(100, seed=3), generator=torch.Generator().manual_seed(0))
    assert float(out.rate) < 0.3
    assert_close(out.probability.double().mean(), 0.1, torch.float32)


def test_a_call_without_units_is_not_a_past_call():
    gate = Gate(rate=0.5, window=4, warmup=1)
    gate(torch.ones(4), torch.zeros(4, dtype=torch.bool))
    assert gate.state_dict()["past"]["valid"].tolist() == []


def test_eta_is_the_temperature_in_units_of_delight():
    assert adapter_of(Gate(rate=0.5)).eta == 0.0
    assert adapter_of(Gate(rate=0.5, temperature=0.3)).eta == 0.3


# Contradictions and nonsense.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of rate and price, got rate=None, price=None"),
        ({"rate": 0.1, "price": 0.0}, "exactly one of rate and price"),
        ({"rate": 0.0}, r"rate must lie in \(0, 1\], got 0.0"),
        ({"rate": 1.5}, r"rate must lie in \(0, 1\]"),
        ({"rate": NAN}, r"rate must lie in \(0, 1\]"),
        ({"price": NAN}, "price must be a number"),
        ({"rate": 0.1, "temperature": -1.0}, "temperature must be finite and >= 0, got -1.0"),
        ({"rate": 0.1, "temperature": INF}, "temperature must be finite"),
        ({"rate": 0.1, "temperature": NAN}, "temperature must be finite"),
        ({"rate": 0.1, "reserve": 1.5}, r"reserve must lie in \[0, 1\], got 1.5"),
        ({"rate": 0.1, "negative_quota": -0.5}, r"negative_quota must lie in \[0, 1\]"),
        ({"rate": 0.1, "window": -1}, "window must be >= 0"),
        ({"rate": 0.1, "warmup": 1}, r"warmup must lie between 1 and window \(0\)"),
        ({"rate": 0.1, "window": 4, "warmup": 5}, "warmup must lie between 1 and window"),
        ({"rate": 0.1, "window": 4, "warmup": 0}, "warmup must lie between 1 and window"),
        ({"price": 0.0, "reserve": 0.1}, "divide an exact count"),
        ({"price": 0.0, "negative_quota": 0.1}, "divide an exact count"),
        ({"rate": 0.1, "temperature": 1.0, "reserve": 0.1}, "divide an exact count"),
        ({"rate": 0.1, "window": 4, "negative_quota": 0.1}, "divide an exact count"),
        ({"rate": 0.1, "inverse_propensity": True}, "inverse_propensity needs a draw"),
        ({"price": 0.0, "window": 4}, "with a fixed price drop it"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Gate(**options)
