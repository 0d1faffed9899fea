"""kondo.diagnostics: plain numbers about one gated batch."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from core.strategies import masked, permutations, rates
from oracles import core as oracle
from tolerances import assert_close

NAN, INF = math.nan, math.inf

KEYS = {
    "rate",
    "price",
    "delight_q05",
    "delight_q25",
    "delight_q50",
    "delight_q75",
    "delight_q95",
    "delight_rms",
    "gate_spread",
    "off_neutral",
    "positive_share",
    "positives_kept",
    "kept_positive_share",
    "zero_share",
    "noise",
    "bias_positive",
    "bias_negative",
    "effective_units",
    "nan_count",
}


def test_literal(device):
    # Kept at 50%: 3 and 1 of the four units that count. The fifth is masked.
    delight = torch.tensor([3.0, -4.0, 0.0, 1.0, NAN], device=device)
    mask = torch.tensor([True, True, True, True, False], device=device)
    gate = kondo.Gate(rate=0.5)(delight, mask)
    numbers = kondo.diagnostics(delight, gate, mask=mask)
    assert numbers.keys() == KEYS
    assert all(type(value) is float for value in numbers.values())
    assert numbers["rate"] == 0.5
    assert numbers["price"] == 1.0
    assert_close(numbers["delight_rms"], math.sqrt(26 / 4), torch.float32)  # 9 + 16 + 0 + 1
    # w = sigmoid(3), sigmoid(-4), 1/2, sigmoid(1) = 0.952574, 0.017986, 0.5, 0.731059: three are
    # further than 0.1 from 1/2; mean 0.550405, deviations 0.402169, -0.532419, -0.050405, 0.180654.
    assert numbers["off_neutral"] == 0.75
    spread = math.sqrt((0.402169**2 + 0.532419**2 + 0.050405**2 + 0.180654**2) / 4)
    assert_close(numbers["gate_spread"], spread, torch.float32)
    assert numbers["positive_share"] == 0.5
    assert numbers["positives_kept"] == 1.0
    assert numbers["kept_positive_share"] == 1.0
    assert numbers["zero_share"] == 0.25
    # 3 and 1 of 3, -4, 1: squares 10 of 26; all of what is positive, nothing of what is negative.
    assert_close(numbers["noise"], 10 / 26)
    assert numbers["bias_positive"] == 0.0
    assert numbers["bias_negative"] == 1.0
    assert_close(numbers["effective_units"], (3 + 1) ** 2 / 10)
    assert numbers["nan_count"] == 1.0


def test_an_unbiased_gate_has_no_bias_and_the_noise_of_its_budget():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate = kondo.UnbiasedGate(noise=1.5)
    numbers = kondo.diagnostics(values, gate(values))
    assert 1.499 < numbers["noise"] <= 1.5
    assert numbers["bias_positive"] == numbers["bias_negative"] == 0.0
    # A draw of fixed size has the sum of all values, whichever units are drawn.
    expected = values.abs().sum() ** 2 / (1.5 * values.square().sum())
    assert_close(numbers["effective_units"], float(expected), torch.bfloat16)


@pytest.mark.parametrize(
    ("gate", "positive", "negative"),
    [
        (kondo.Gate(price=0.0), 0.0, 1.0),
        (kondo.Gate(rate=1.0), 0.0, 0.0),
        # A draw, whose expected weight is its probability: sigmoid(1) and sigmoid(-1).
        (kondo.Gate(price=0.0, temperature=1.0), 0.269, 0.731),
        (kondo.Gate(price=0.0, temperature=1.0, inverse_propensity=True), 0.0, 0.0),
    ],
)
def test_bias_by_sign(gate, positive, negative):
    values = torch.tensor([1.0, -1.0] * 100)
    numbers = kondo.diagnostics(values, gate(values, generator=torch.Generator().manual_seed(0)))
    assert numbers["bias_positive"] == pytest.approx(positive, abs=1e-3)
    assert numbers["bias_negative"] == pytest.approx(negative, abs=1e-3)


def test_a_draw_that_kept_nothing_says_nothing_of_its_bias():
    values = torch.ones(1000)
    choice = kondo.Gate(rate=0.001, temperature=1.0)(
        values, generator=torch.Generator().manual_seed(0)
    )
    nothing = choice._replace(keep=torch.zeros_like(choice.keep), weight=torch.zeros(1000))
    assert math.isnan(kondo.diagnostics(values, nothing)["bias_positive"])


def test_quantiles_literal():
    # Of 0 .. 100 the quantile q is 100 q.
    delight = torch.arange(101.0)[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight))
    names = ("q05", "q25", "q50", "q75", "q95")
    assert [numbers[f"delight_{q}"] for q in names] == [5.0, 25.0, 50.0, 75.0, 95.0]


def test_quantiles_of_many_units_are_read_from_a_sample():
    # 200,000 units, more than are sorted: quantiles of a uniform hold to about 1 / sqrt(sample).
    delight = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight))
    for q in (5, 25, 50, 75, 95):
        assert abs(numbers[f"delight_q{q:02d}"] - q / 100) < 0.01


def test_failures_kept_are_seen():
    # A price of -2 keeps -1, 1 and 2: two of the three are successes, and all successes are kept.
    delight = torch.tensor([-3.0, -1.0, 1.0, 2.0])
    numbers = kondo.diagnostics(delight, kondo.Gate(price=-2.0)(delight))
    assert_close(numbers["kept_positive_share"], 2 / 3, torch.float32)
    assert numbers["positives_kept"] == 1.0
    assert numbers["positive_share"] == 0.5


def test_eta_is_the_temperature_of_the_judged_weights():
    # sigmoid(1 / 10) = 0.525: within 0.1 of neutral; at eta = 1, sigmoid(1) = 0.73 is not.
    delight = torch.tensor([1.0, -1.0])
    gate = kondo.Gate(rate=0.5)(delight)
    assert kondo.diagnostics(delight, gate)["off_neutral"] == 1.0
    warm = kondo.diagnostics(delight, gate, eta=10.0)
    assert warm["off_neutral"] == 0.0
    assert_close(warm["gate_spread"], oracle.sigmoid(0.1) - 0.5, torch.float32)


@given(masked(), rates, st.floats(0.1, 10))
def test_against_the_oracle(units, rate, eta):
    delight, mask, dirty = units
    gate = kondo.Gate(rate=rate)(dirty, mask)
    numbers = kondo.diagnostics(dirty, gate, mask=mask, eta=eta)
    if mask.any():
        expected = oracle.diagnostics(delight.tolist(), gate.keep.tolist(), mask.tolist(), eta)
        expected["nan_count"] = float(dirty.isnan().sum())
        for name, value in expected.items():
            assert_close(numbers[name], value, torch.float32)


@given(masked(), st.data())
def test_masked_units_and_order_do_not_matter(units, data):
    delight, mask, dirty = units
    order = data.draw(permutations(delight.numel()))
    gate = kondo.Gate(price=0.0)
    clean = kondo.diagnostics(delight[mask], gate(delight[mask]))
    other = kondo.diagnostics(dirty[order], gate(dirty[order], mask[order]), mask=mask[order])
    for name in KEYS - {"nan_count"}:
        assert_close(other[name], clean[name], torch.float32)


def test_nan_hidden_by_the_mask_is_counted_and_does_not_leak():
    delight = torch.tensor([[1.0, NAN, -1.0], [NAN, NAN, 2.0]])
    mask = ~delight.isnan()
    numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight, mask), mask=mask)
    assert numbers["nan_count"] == 3.0
    assert not any(math.isnan(value) for value in numbers.values())


def test_infinite_delight_does_not_hide_the_scale():
    delight = torch.tensor([INF, 3.0, -INF, 4.0])
    numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight))
    assert_close(numbers["delight_rms"], math.sqrt(12.5), torch.float32)
    assert numbers["positive_share"] == 0.75


def test_shares_of_nothing_are_nan():
    delight = torch.tensor([-1.0, -2.0])
    numbers = kondo.diagnostics(delight, kondo.Gate(price=0.0)(delight))
    assert math.isnan(numbers["positives_kept"])  # no positives
    assert math.isnan(numbers["kept_positive_share"])  # nothing kept
    assert numbers["positive_share"] == 0.0


def test_nothing_at_all_is_nan_without_a_warning():
    delight, mask = torch.full((2, 3), NAN), torch.zeros(2, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight, mask), mask=mask)
    assert numbers.keys() == KEYS
    assert numbers["rate"] == 0.0
    assert numbers["nan_count"] == 6.0
    rest = KEYS - {"rate", "price", "nan_count"}
    assert all(math.isnan(numbers[name]) for name in rest)


def test_half_precision_and_gradients_are_taken_as_they_come():
    delight = torch.tensor([3.0, -4.0], dtype=torch.bfloat16, requires_grad=True)
    numbers = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight))
    assert_close(numbers["delight_rms"], math.sqrt(12.5), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": torch.tensor([1, 2])}, "values must be floating point"),
        ({"mask": torch.ones(2)}, "mask must be a bool tensor"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask must have shape \[2\]"),
        ({"eta": 0.0}, "eta must be > 0, got 0.0"),
    ],
)
def test_bad_input_is_named(arguments, message):
    delight = torch.tensor([1.0, 2.0])
    good = {"values": delight, "choice": kondo.Gate(rate=0.5)(delight)}
    with pytest.raises(ValueError, match=message):
        kondo.diagnostics(**(good | arguments))


def test_quantiles_of_a_large_batch_see_every_column():
    """A fixed stride of 16 over [65536, 16] would read one token of each row."""
    delight = torch.arange(1.0, 17.0).repeat(65_536, 1)
    out = kondo.diagnostics(delight, kondo.Gate(rate=0.5)(delight))
    assert out["delight_q05"] == 1.0
    assert 8.0 <= out["delight_q50"] <= 9.0
    assert out["delight_q95"] == 16.0


def test_values_that_are_not_delight_are_not_called_so():
    values = torch.tensor([1.0, 2.0])
    choice = kondo.Gate(rate=0.5)(values)
    names, plain = (
        kondo.diagnostics(values, choice, name="signal"),
        kondo.diagnostics(values, choice),
    )
    assert {"signal_rms", "signal_q05"} <= names.keys()
    assert not [name for name in names if "delight" in name]
    assert repr(list(names.values())) == repr(list(plain.values()))
