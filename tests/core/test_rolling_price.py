"""The rolling window: its price, what it forgets, and its state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.strategies import tensors
from kondo.core.rolling_price import MAX_VALUES_PER_STEP, RollingPrice
from tolerances import assert_close

INF = math.inf


def everything(values):
    return torch.ones_like(values, dtype=torch.bool)


class Window(RollingPrice):
    """A window whose every value can be chosen, and whose answers are numbers."""

    def push(self, values, num_valid):
        super().push(values, everything(values), torch.tensor([num_valid], device=values.device))

    def quantile_price(self, rate):
        price, share = super().quantile_price(rate)
        return price.item(), share.item()

    def held(self):
        values, weight = self.pooled()
        return values[weight > 0], weight[weight > 0]

    def valid(self):
        return self.state_dict().get("valid", torch.zeros(0)).tolist()


def test_rolling_price_literal():
    # Past delight 1..5 and three zeros, 8 units. Half of 8 is 4: the price is 2, and all of the
    # one unit at 2 is kept. A quarter of 8 is 2: the price is 4. 5% is 0.4: 0.4 of the unit at 5.
    window = Window(3)
    window.push(torch.tensor([5.0, 1.0, 2.0]), 5)
    window.push(torch.tensor([3.0, 4.0]), 3)
    assert window.quantile_price(0.5) == (2.0, 1.0)
    assert window.quantile_price(0.25) == (4.0, 1.0)
    price, share = window.quantile_price(0.05)
    assert price == 5.0
    assert_close(share, 0.4, torch.float64)
    # Five of the eight can be kept at all: 70% keeps everything.
    assert window.quantile_price(0.7) == (-INF, 1.0)


def test_rolling_price_shares_out_ties():
    # Ten units at 1, two at 2: 50% of 12 is 6, of which 2 above the price and 4 of the 10 at it.
    window = Window(1)
    window.push(torch.tensor([1.0] * 10 + [2.0] * 2), 12)
    price, share = window.quantile_price(0.5)
    assert price == 1.0
    assert_close(share, 0.4, torch.float64)


@given(
    st.lists(tensors(st.sampled_from([-1.0, 0.1, 0.7, 2.0])), min_size=1, max_size=4),
    st.floats(0.01, 1.0),
)
def test_rolling_price_keeps_its_rate_over_the_window(steps, rate):
    window = Window(4)
    for step in steps:
        window.push(step, step.numel())
    price, share = window.quantile_price(rate)
    pool = torch.cat(steps)
    kept = float((pool > price).sum() + share * (pool == price).sum())
    assert_close(kept, rate * pool.numel(), torch.float32)
    assert 0 <= share <= 1


def test_a_window_without_delight_keeps_whatever_comes():
    window = Window(2)
    window.push(torch.zeros(0), 9)
    assert window.quantile_price(0.1) == (-INF, 1.0)


def test_the_window_forgets_the_oldest():
    window = Window(2)
    for value in (9.0, 1.0, 2.0):
        window.push(torch.tensor([value]), 1)
    assert window.valid() == [1, 1]
    assert window.held()[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_window_holds_delight_as_precisely_as_it_came(dtype):
    # Discrete delight must equal its own price, or a rate starves (price rounded up) or overshoots.
    window = Window(1)
    window.push(torch.full((10,), 0.1, dtype=dtype), 10)
    price, share = window.quantile_price(0.3)
    assert bool((torch.full((1,), 0.1, dtype=dtype) == price).all())
    assert_close(share, 0.3, torch.float64)


def test_a_large_step_is_summarised_by_its_quantiles():
    size, window = 10 * MAX_VALUES_PER_STEP, Window(2)
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0)).float() + 1
    window.push(shuffled, size)
    pool, weight = window.held()
    assert pool.numel() == MAX_VALUES_PER_STEP
    assert weight.tolist() == [10.0] * MAX_VALUES_PER_STEP
    # Delight is 1 .. size: the top 10% starts at 0.9 size, to within one summarised step.
    price, _ = window.quantile_price(0.1)
    assert abs(price - 0.9 * size) <= 10
    # A second, small step is not drowned and not inflated: its values weigh 1 each.
    window.push(torch.full((4,), -1.0), 4)
    assert window.pooled()[1].sum().item() == size + 4


@pytest.mark.parametrize("steps", [2, 17, 49])
def test_rolling_weights_add_up_for_huge_steps(steps):
    # Tens of millions of units a step: float32 sums would lose whole units, and with them the
    # smallest budgets.
    window = Window(steps)
    for i in range(steps):
        size = 30_000_001 + 7919 * i
        step = torch.randn(2000, generator=torch.Generator().manual_seed(i))
        window.push(step, size)
        window._stands_for[-1] = size / MAX_VALUES_PER_STEP  # as if the step had had that many
    price, share = window.quantile_price(1e-9)
    pool, weight = window.held()
    assert price == pool[-1].item()
    assert_close(share * weight[-1].item(), 1e-9 * sum(window.valid()))


def test_window_state_round_trip():
    window, other = Window(3), Window(2)
    for value in (9.0, 1.0, 2.0):
        window.push(torch.tensor([value]), 2)
    other.load_state_dict(window.state_dict())
    assert other.held()[0].tolist() == [1.0, 2.0]  # a shorter window keeps the newest
    assert other.valid() == [2, 2]
    nothing = Window(0)
    nothing.load_state_dict(window.state_dict())
    assert nothing.valid() == []


def test_saved_state_is_a_copy():
    window = Window(2)
    window.push(torch.tensor([1.0]), 1)
    state = window.state_dict()
    window.push(torch.tensor([2.0]), 1)
    assert len(state["values"]) == 1


def test_a_loaded_window_follows_the_next_call(device):
    window = Window(4)
    window.push(torch.tensor([1.0, 2.0]), 2)
    other = Window(4)
    other.load_state_dict(window.state_dict())
    other.push(torch.tensor([3.0], device=device), 1)
    assert other.held()[0].tolist() == [1.0, 2.0, 3.0]
    assert other.held()[0].device.type == device.type


def test_a_window_belongs_to_its_members():
    window = RollingPrice(2)
    window.prepare(torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"leading dimensions of earlier calls, \[3\], got \[4\]"):
        window.prepare(torch.ones(4, 5))
