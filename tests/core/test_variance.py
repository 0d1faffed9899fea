"""kondo.VarianceGate: held to every set there is, and to what it says of zeros and ties."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kondo
import zoo
from core.strategies import distinct_delights, permutations, rates, signed, tensors
from kondo import VarianceGate
from kondo.core.sampling import lottery
from oracles import engine as dense
from oracles.variance import (
    best_sets,
    best_sets_without_zeros_afterwards,
    variance,
    wanted,
)
from tolerances import assert_close

INF, NAN = math.inf, math.nan

# Rewards of 0 and 1 around their mean: nearly all ties, and zeros.
coarse = tensors(st.sampled_from([-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75]), max_size=9)
small = st.one_of(coarse, tensors(signed, max_size=9))


def kept(values, rate, mask=None):
    return VarianceGate(rate=rate)(values, mask).keep


def indices(keep):
    return set(keep.nonzero().flatten().tolist())


# What is kept.


@pytest.mark.parametrize(
    ("values", "rate", "expected"),
    [
        ([3.0, -1.0, 1.0, -3.0, 2.0], 0.4, [0, 3]),  # the best and the worst
        ([5.0, -1.0, 1.0, 4.0, -4.0], 0.6, [0, 3, 4]),  # 5, 4, -4: 16.2 beats 5, -1, -4: 14
        ([4.0, -1.0, 1.0, -5.0, -4.0], 0.6, [0, 3, 4]),
        ([-2.0, -1.0, 1.0, 2.0], 0.75, [0, 2, 3]),  # as good as -2, -1, 2: more high ones
        ([-2.0, -1.0, 1.0, 2.0], 0.25, [3]),  # one unit has no variance
        ([-2.0, -1.0, 1.0, 2.0], 0.01, [3]),  # at least one
        ([-2.0, -1.0, 1.0, 2.0], 1.0, [0, 1, 2, 3]),
        ([0.5, 0.4, 0.3], 0.67, [0, 2]),  # all on one side
        # Both high ones are further from the mean of all, but near each other.
        ([1.0, 0.9, 0.2, 0.21, 0.22, 0.23], 0.34, [0, 2]),
    ],
)
def test_literals(values, rate, expected, device):
    out = VarianceGate(rate=rate)(torch.tensor(values, device=device))
    assert sorted(indices(out.keep)) == expected
    assert out.keep.device.type == out.weight.device.type == device.type
    assert_close(out.rate, len(expected) / len(values))


@settings(max_examples=150)
@given(small, rates, st.data())
def test_no_other_set_of_as_many_varies_more(values, rate, data):
    size = values.numel()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    found = indices(kept(values, rate, mask))
    assert found in best_sets(values.tolist(), mask.tolist(), rate)


@given(st.one_of(coarse, tensors(signed)), rates)
def test_exactly_the_rate_is_kept_as_long_as_there_is_something(values, rate):
    count = min(wanted(rate, [True] * values.numel()), int((values != 0).sum()))
    assert int(kept(values, rate).sum()) == count


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("low", [-1.0, -0.3, -0.7, -1 / 3, -3 / 7])
@pytest.mark.parametrize("count", range(1, 12))
def test_of_equally_good_sets_the_most_balanced_is_taken(count, low, dtype):
    # Two values only: k and count - k high ones vary alike, but for their rounding.
    values = torch.tensor([low, 0.4, 0.0] * 12, dtype=dtype)
    found = kept(values, count / 36)
    assert int((found & (values > 0)).sum()) == math.ceil(count / 2)


@pytest.mark.parametrize("value", [0.1, -0.1, 1 / 3, 1e-30])
def test_equal_values_fall_by_lot_from_both_ends(value):
    for size in range(30, 90, 4):
        values = torch.full((size,), value, dtype=torch.float64)
        by_lot = lottery(torch.arange(size), salt=values).argsort().tolist()
        half = size // 4
        assert indices(kept(values, 2 * half / size)) == {*by_lot[:half], *by_lot[-half:]}


# Zeros.


def test_zeros_are_left_out_before_the_choice():
    """Where the two rules differ: zeros that are chosen and then dropped leave fewer than K."""
    values = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert len(indices(kept(torch.tensor(values), 0.5))) == 4
    afterwards = best_sets_without_zeros_afterwards(values, [True] * 8, 0.5)
    assert {len(each) for each in afterwards} == {2}


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8), rates)
def test_over_centred_values_it_is_the_largest_variance_with_zeros_too(values, rate):
    values = [float(value) for value in [*values, -sum(values)]]
    found = indices(kept(torch.tensor(values), rate))
    count = wanted(rate, [True] * len(values))
    assume(count > 1)  # one unit has no variance, be it zero or not
    assert found in best_sets_without_zeros_afterwards(values, [True] * len(values), rate)


# Ties and order.


@given(values=distinct_delights, rate=rates, data=st.data())
def test_permuting_units_permutes_what_is_kept(values, rate, data):
    order = data.draw(permutations(values.numel()))
    assert torch.equal(kept(values[order], rate), kept(values, rate)[order])


@given(values=coarse, rate=rates, data=st.data())
def test_permuting_tied_units_keeps_the_same_values(values, rate, data):
    order = data.draw(permutations(values.numel()))
    before, after = values[kept(values, rate)], values[order][kept(values[order], rate)]
    assert torch.equal(before.sort().values, after.sort().values)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("sign", [1, -1])
def test_tied_units_are_kept_wherever_they_stand(rate, sign):
    # As for kondo.Gate: the mean position of k of n tied units, here of one value of two.
    size, means = 400, []
    count = round(rate * size)
    for number in range(1, 11):
        values = torch.full((2 * size,), 0.1 * number)
        values[::2] *= -1
        found = kept(values, rate)[values * sign > 0]
        assert int(found.sum()) == count
        means.append(found.nonzero().double().mean().item())
    deviation = math.sqrt((size + 1) * (size - count) / (12 * count) / 10)
    assert abs(sum(means) / 10 - (size - 1) / 2) < 4 * deviation


# Numbers.


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e150, 1e307])
def test_scale_does_not_matter(scale):
    values = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(kept(values * scale, 0.3), kept(values, 0.3))


@pytest.mark.parametrize("offset", [0.0, 100.0, -1e6, 1e11])
def test_an_offset_does_not_matter(offset):
    # Multiples of 1/64, which the offset leaves exact, and none of them 0 with it or without.
    values = torch.randint(1, 9999, (60,), generator=torch.Generator().manual_seed(0)).double() / 64
    assert torch.equal(kept(values + offset + 1 / 128, 0.3), kept(values, 0.3))


def test_tokens_have_the_shape_they_came_in():
    values = torch.tensor([[1.0, -3.0], [2.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    out = VarianceGate(rate=0.67)(values, mask)
    assert out.keep.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("size", [60_000, 200_000])  # decided on the CPU, and where they are
def test_many_units(size, device):
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).exp() - 1
    values = (values * 64).round() / 64  # ties and zeros
    found = kept(values.to(device), 0.05).cpu()
    count = round(0.05 * size)
    assert int(found.sum()) == count
    rising = values[values != 0].sort().values.double()
    spreads = []
    for high in range(0, count + 1, 250):
        both = torch.cat([rising[: count - high], rising[len(rising) - high :]])
        spreads.append(both.var(correction=0).item())
    assert values[found].double().var(correction=0).item() >= max(spreads) * (1 - 1e-9)


# What is refused.


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, NAN])
def test_a_rate_is_a_share(rate):
    with pytest.raises(ValueError, match=r"rate must lie in \(0, 1\]"):
        VarianceGate(rate=rate)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([[1.0, 2.0], [NAN, 1.0]]), r"must not be NaN .* in unit \(1, 0\)"),
        (torch.tensor([1, 2]), "values must be floating point"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        VarianceGate(rate=0.5)(values)


def test_its_words():
    assert repr(VarianceGate(rate=0.1)) == "VarianceGate(rate=0.1)"


# In the engine.


@pytest.mark.parametrize("name", ["mlp", "lstm"])
@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_the_gradient_is_that_of_the_masked_loss(name, rate):
    module, log_prob, batch = zoo.build(name)
    advantages = torch.tensor([0.9, -0.4, 0.0, 0.2, -0.7, 0.1, -0.1])[: zoo.N]
    dtype = next(module.parameters()).dtype
    advantages, log_probs = advantages.to(dtype), log_prob(batch)
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    options = {}
    if mask.ndim == 2:
        mask = torch.arange(zoo.T) < torch.tensor([[1], [5], [4], [2], [5], [3], [1]])
        options = {"unit": "sequence"}
    (best,) = best_sets(advantages.tolist(), [True] * zoo.N, rate)
    keep = torch.tensor([row in best for row in range(zoo.N)])
    keep = keep if mask.ndim == 1 else keep[:, None] & mask
    expected = dense.gradients(
        module, dense.dense_gated_loss(log_probs, advantages, keep, mask.sum())
    )
    report = kondo.backward(
        log_prob, batch, advantages, gate=VarianceGate(rate=rate), mask=mask, **options
    )
    for key, parameter in module.named_parameters():
        assert_close(parameter.grad, expected[key])
    assert (report.kept, report.rows_trained, report.rows_screened) == (len(best), len(best), 0)
    assert (report.rate, report.price) == (len(best) / zoo.N, -INF)
    assert "price" not in str(report)
    assert report.diagnostics["kept_positive_share"] == sum(advantages[i] > 0 for i in best) / len(
        best
    )


def test_variance_by_hand():
    assert variance([1.0, -1.0, 3.0, 1.0]) == 2.0
