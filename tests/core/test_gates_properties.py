"""Gate properties that hold for any delight: masks, permutation, splitting, scale, consistency."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from core.strategies import delights, distinct_delights, masked, permutations, rates
from kondo import Gate
from oracles import core as oracle
from tolerances import assert_close

# Every mode; fresh gates, since some have a memory.
MODES = {
    "rate": {"rate": 0.3},
    "price": {"price": 0.1},
    "drawn_rate": {"rate": 0.3, "temperature": 0.5},
    "drawn_price": {"price": 0.1, "temperature": 0.5},
    "reserve": {"rate": 0.5, "reserve": 0.5},
    "quota": {"rate": 0.5, "negative_quota": 0.5},
    "unbiased": {"rate": 0.3, "temperature": 0.5, "inverse_propensity": True},
    "window": {"rate": 0.3, "window": 4, "warmup": 1},
}


def gated(options, delight, mask=None, calls=1):
    gate, generator = Gate(**options), torch.Generator().manual_seed(0)
    for _ in range(calls):
        out = gate(delight, mask, generator)
    return out


@given(delights, rates, st.data())
def test_a_rate_against_the_oracle(delight, rate, data):
    size = delight.numel()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    count, must, may = oracle.rate_choice(delight.tolist(), rate, mask.tolist())
    out = Gate(rate=rate)(delight, mask)
    kept = set(out.keep.nonzero().flatten().tolist())
    assert len(kept) == count
    assert must <= kept <= may
    if count:
        assert out.price.item() == min(delight[i].item() for i in kept)


@given(delights, rates)
def test_kept_units_are_worth_no_less_than_skipped_ones(delight, rate):
    keep = Gate(rate=rate)(delight).keep
    skipped = delight[~keep & (delight != 0)]
    if keep.any() and skipped.numel():
        assert delight[keep].min() >= skipped.max()


@given(distinct_delights, rates)
def test_a_rate_is_met_within_one_unit(delight, rate):
    out = Gate(rate=rate)(delight)
    assert abs(out.keep.sum().item() - rate * delight.numel()) <= 1


@pytest.mark.parametrize("name", ["rate", "price", "drawn_rate", "drawn_price", "quota"])
@given(units=masked())
def test_masked_units_might_as_well_not_be_there(name, units):
    delight, mask, _ = units
    assume(delight[mask].unique().numel() == mask.sum())
    whole, alone = gated(MODES[name], delight, mask), gated(MODES[name], delight[mask])
    assert_close(whole.probability[mask], alone.probability)
    assert torch.equal(whole.price, alone.price) or name == "drawn_rate"


@pytest.mark.parametrize("name", ["rate", "price", "quota"])
@given(delight=distinct_delights, data=st.data())
def test_permuting_units_permutes_what_is_kept(name, delight, data):
    order = data.draw(permutations(delight.numel()))
    out, permuted = gated(MODES[name], delight), gated(MODES[name], delight[order])
    assert torch.equal(permuted.keep, out.keep[order])
    # A sigmoid's last digit may depend on where in a vector register it is computed.
    assert_close(permuted.weight, out.weight[order])
    assert torch.equal(permuted.price, out.price)


@pytest.mark.parametrize("name", ["drawn_rate", "drawn_price"])
@given(delight=distinct_delights, data=st.data())
def test_permuting_units_permutes_their_probability(name, delight, data):
    order = data.draw(permutations(delight.numel()))
    out, permuted = gated(MODES[name], delight), gated(MODES[name], delight[order])
    assert_close(permuted.probability, out.probability[order], torch.float32)


@pytest.mark.parametrize("name", ["price"])
@given(delight=delights, cut=st.integers(0, 23))
def test_splitting_the_batch_at_a_fixed_price_changes_nothing(name, delight, cut):
    whole = gated(MODES[name], delight)
    parts = [gated(MODES[name], part) for part in (delight[:cut], delight[cut:])]
    assert torch.equal(torch.cat([part.keep for part in parts]), whole.keep)
    assert_close(torch.cat([part.weight for part in parts]), whole.weight)


@given(distinct_delights, rates, st.floats(1e-3, 1e3))
def test_a_rate_ignores_the_scale_of_delight(delight, rate, factor):
    scaled = factor * delight
    assume(scaled.unique().numel() == delight.numel())
    assert torch.equal(Gate(rate=rate)(scaled).keep, Gate(rate=rate)(delight).keep)


@given(delights, st.floats(0.01, 0.99), st.floats(0.05, 5))
def test_the_expected_rate_is_the_one_asked_for(delight, rate, temperature):
    out = Gate(rate=rate, temperature=temperature)(delight)
    worth = (delight != 0).sum().item()
    expected = min(rate * delight.numel(), worth)
    assert_close(out.probability.sum(), expected, torch.float32)


@given(delights)
def test_units_of_any_shape_are_gated_alike(delight):
    for options in (MODES["rate"], MODES["drawn_rate"]):
        flat = gated(options, delight)
        shaped = gated(options, delight.reshape(1, -1, 1))
        assert torch.equal(shaped.weight.flatten(), flat.weight)
