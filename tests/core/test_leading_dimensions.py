"""What gates are built of, over leading dimensions: counts, sums and a window of each member."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.strategies import tensors
from kondo.core import quantiles, sampling
from kondo.core.rolling_price import MAX_VALUES_PER_STEP, RollingPrice
from tolerances import assert_close

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
