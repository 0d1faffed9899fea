"""Choices over [P, M] are P choices of their own, and no choice reads from the device."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.strategies import tensors
from kondo import Gate, UnbiasedGate, VarianceGate
from kondo.core import quantiles, sampling
from kondo.core.rolling_price import MAX_VALUES_PER_STEP, RollingPrice
from no_reads import NoReads
from tolerances import assert_close

GATES = {
    "rate": Gate(rate=0.3),
    "price": Gate(price=0.1),
    "drawn_rate": Gate(rate=0.3, temperature=0.5),
    "drawn_price": Gate(price=0.1, temperature=0.5),
    "soft": Gate(price=0.0, temperature=1.0, soft=True),
    "soft_rate": Gate(rate=0.3, temperature=1.0, soft=True),
    "reserve": Gate(rate=0.5, reserve=0.5),
    "quota": Gate(rate=0.5, negative_quota=0.5),
    "quota_and_reserve": Gate(rate=0.5, negative_quota=0.5, reserve=0.3),
    "unbiased": Gate(rate=0.3, temperature=0.5, inverse_propensity=True),
    "normalise": Gate(price=0.1, temperature=0.5, normalise=True),
    "relative": Gate(rate=0.3, temperature=0.5, normalise="temperature", scale_decay=0.5),
    "window": Gate(rate=0.3, window=4, warmup=1),
    "drawn_window": Gate(rate=0.3, temperature=0.4, window=4, warmup=1),
    "variance": VarianceGate(rate=0.4),
    "proportional": UnbiasedGate(rate=0.3),
    "noise": UnbiasedGate(noise=1.5),
    "floor": UnbiasedGate(rate=0.3, max_weight=5.0),
    "noise_and_floor": UnbiasedGate(noise=1.5, max_weight=3.0),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())

P, M = 5, 24


def calls(count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return values with ties and zeros, masks that leave one member nothing, and draws."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        values = torch.randint(-4, 5, (P, M), generator=generator) / 2
        mask = torch.rand(P, M, generator=generator) < 0.8
        mask[1] = False
        values[2] = 0.0
        found.append((values, mask, torch.rand(P, M, generator=generator, dtype=torch.float64)))
    return found


@every_gate
def test_many_members_choose_as_each_would_alone(gate):
    together, alone = copy.deepcopy(gate), [copy.deepcopy(gate) for _ in range(P)]
    for values, mask, draws in calls(7):
        out = together.choose(values, mask, draws)
        parts = [
            single.choose(values[member], mask[member], draws[member])
            for member, single in enumerate(alone)
        ]
        assert out.price.shape == out.rate.shape == (P,)
        for name, found, *expected in zip(out._fields, out, *parts, strict=True):
            stacked = torch.stack(expected)
            if found.dtype == torch.bool:
                assert torch.equal(found, stacked), name
            else:
                assert_close(found, stacked)


@every_gate
def test_no_choice_reads_from_the_device(gate):
    gate = copy.deepcopy(gate)
    for values, mask, _ in calls(3):
        with NoReads():
            gate.choose(values, mask)
            gate.choose(values, mask, torch.Generator().manual_seed(0))
    fresh = copy.deepcopy(GATES["rate"])
    out = fresh.choose(values.to("meta"), mask.to("meta"))
    assert out.keep.device.type == "meta"


def test_the_check_would_find_a_read():
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        float(torch.ones(3).sum())
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        _ = torch.ones(3)[torch.ones(3, dtype=torch.bool)]


coarse = st.sampled_from([-1.0, -0.5, 0.5, 1.0, 2.0])


@settings(max_examples=50)
@given(tensors(coarse, min_size=6, max_size=6), st.integers(0, 6), st.integers(0, 63))
def test_counts_may_differ_between_members(values, count, bits):
    able = torch.tensor([bool(bits >> place & 1) for place in range(6)])
    both, counts = torch.stack([values, -values]), torch.tensor([[count], [6 - count]])
    ables = torch.stack([able, ~able])
    keep, price = quantiles.highest(both, ables, counts)
    for row in range(2):
        alone, lowest = quantiles.highest(both[row], ables[row], int(counts[row]))
        assert torch.equal(alone, keep[row])
        assert torch.equal(lowest, price[row])
        assert int(alone.sum()) == min(int(counts[row]), int(ables[row].sum()))
        assert not bool((alone & ~ables[row]).any())
    lots = sampling.lottery(torch.arange(6), salt=both)
    counts = torch.minimum(counts, ables.sum(-1, keepdim=True))
    keep = quantiles.most_variance(both, ables, counts, lots)
    assert keep.sum(-1).tolist() == counts.squeeze(-1).tolist()
    assert not bool((keep & ~ables).any())


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_sums_on_a_device_are_those_of_the_cpu(size, device):
    values = torch.randn(2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(sampling.running_sum(values.to(device)).cpu(), values.cumsum(-1))


def test_a_window_summarises_each_member_by_itself():
    # One member has more units than a call stores, the other fewer.
    width = 3 * MAX_VALUES_PER_STEP
    values = torch.arange(1.0, width + 1).expand(2, width)
    able = torch.stack([values[0] > 0, values[1] <= 10])
    together = RollingPrice(2)
    together.push(values, able, able.sum(-1, keepdim=True))
    for member in range(2):
        alone = RollingPrice(2)
        alone.push(values[member], able[member], able[member].sum(-1, keepdim=True))
        for rate in (0.1, 0.5, 1.0):
            for mine, other in zip(
                together.quantile_price(rate), alone.quantile_price(rate), strict=True
            ):
                assert torch.equal(mine[member], other)
