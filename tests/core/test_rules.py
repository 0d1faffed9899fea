"""kondo.core.rules: counts, exact tops, fair ties, solved prices, the rolling window."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.strategies import distinct_delights, nonzero, permutations, tensors
from kondo.core import rules
from kondo.core.rolling_price import MAX_VALUES_PER_STEP, RollingPrice
from kondo.core.rules import count_for, lottery
from oracles import core as oracle
from tolerances import TOLERANCES, assert_close

INF = math.inf


def everything(values):
    return torch.ones_like(values, dtype=torch.bool)


def top(values, count, *, position=None):
    keep, price = rules.highest(values, everything(values), count, position)
    return keep, price.squeeze(-1)


def solve_price(values, count, temperature, *, weight=None):
    return rules.solve_price(values, everything(values), count, temperature, weight).squeeze(-1)


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


@pytest.mark.parametrize(
    ("rate", "units", "count"),
    [
        (0.03, 100, 3),
        (0.03, 110, 3),  # 3.3
        (0.03, 120, 4),  # 3.6
        (0.001, 10, 1),  # 0.01, and at least one
        (1.0, 7, 7),
    ],
)
def test_count_for_literal(rate, units, count):
    assert count_for(rate, units) == count


@given(st.floats(1e-6, 1.0), st.integers(1, 10**9))
def test_count_for_is_within_one_unit_of_the_rate(rate, units):
    assert abs(count_for(rate, units) - rate * units) <= 1
    assert 1 <= count_for(rate, units) <= units


def test_top_literal(device):
    delight = torch.tensor([0.1, 3.0, -1.0, 2.0, -INF, INF], device=device)
    keep, price = top(delight, 3)
    assert keep.tolist() == [False, True, False, True, False, True]
    assert price.item() == 2.0
    assert top(delight, 6)[0].all()


@given(tensors(st.sampled_from([-2.0, -1.0, 1.0, 2.0, 3.0])), st.data())
def test_top_keeps_exactly_the_count_under_ties(delight, data):
    count = data.draw(st.integers(1, delight.numel()))
    keep, price = top(delight, count)
    assert int(keep.sum()) == count
    assert price.item() == delight.sort(descending=True).values[count - 1].item()
    assert delight[keep].min() == price
    assert count == delight.numel() or delight[~keep].max() <= price
    assert torch.equal(top(delight, count)[0], keep)  # deterministic


@given(distinct_delights, st.data())
def test_permuting_units_permutes_the_top(delight, data):
    count = data.draw(st.integers(1, delight.numel()))
    order = data.draw(permutations(delight.numel()))
    assert torch.equal(top(delight[order], count)[0], top(delight, count)[0][order])


@pytest.mark.parametrize("size", [5, 64, 1001, 40_000])
@pytest.mark.parametrize("share", [0.03, 0.5])
def test_ties_favour_no_position(size, share):
    # Among n tied units, k drawn without replacement have a mean position of (n - 1) / 2 with
    # variance (n + 1) (n - k) / (12 k); over `repeats` tied values the variance divides.
    count, repeats = count_for(share, size), max(20, 20_000 // size)
    position = torch.arange(size).double()
    kept = torch.stack([top(torch.full((size,), 0.1 * (1 + i)), count)[0] for i in range(repeats)])
    mean = (kept.double() @ position).mean() / count
    deviation = math.sqrt((size + 1) * (size - count) / (12 * count) / repeats)
    assert abs(mean - (size - 1) / 2) < 4 * deviation
    # The first unit and the last are kept as often as any: share * repeats of the time.
    expected, spread = repeats * count / size, math.sqrt(repeats * count / size)
    for place in (0, size - 1):
        assert abs(kept[:, place].sum() - expected) < 4 * spread


def test_tied_units_are_chosen_by_position_and_not_by_order_of_arrival():
    # The same units in another order, with their positions: the same units win.
    delight, position = torch.full((50,), 0.5), torch.arange(100, 150)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    keep = top(delight, 7, position=position)[0]
    assert torch.equal(top(delight, 7, position=position[order])[0], keep[order])
    assert not torch.equal(top(delight, 7)[0], keep)


def test_different_tied_values_draw_different_lots():
    keeps = {tuple(top(torch.full((40,), 0.1 * i), 10)[0].tolist()) for i in range(1, 21)}
    assert len(keeps) == 20


def test_lottery_is_uniform_and_without_repeats():
    # Standardised to [0, 1): mean 1/2 with standard deviation 1 / sqrt(12 n), no two alike, and
    # neighbours uncorrelated (1 / sqrt(n)).
    lots = lottery(torch.arange(100_000), salt=torch.tensor(1.5))
    assert lots.unique().numel() == lots.numel()
    share = lots.double() / 2.0**64 + 0.5
    assert abs(share.mean() - 0.5) < 4 / math.sqrt(12 * share.numel())
    pair = torch.stack([share[:-1], share[1:]])
    assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(share.numel())


def test_lottery_is_fixed_for_ever():
    # Resumed runs must break ties as before; a change here is a change of results.
    lots = lottery(torch.tensor([0, 1, 12345678901]), salt=torch.tensor(-0.3)).tolist()
    assert lots == [oracle.lot(place, -0.3) for place in (0, 1, 12345678901)]


def test_solved_price_literal():
    # sigmoid((chi - lambda) / eta) = 1/4 for every unit: lambda = chi + eta log 3.
    price = solve_price(torch.full((8,), 0.5), 2.0, 0.1)
    assert_close(price, 0.5 + 0.1 * math.log(3), torch.float64)
    # chi = +-1 are mirror images: half of them in expectation at lambda = 0, whatever eta.
    assert abs(solve_price(torch.tensor([1.0, -1.0]), 1.0, 0.3).item()) <= 1e-9


@given(
    tensors(nonzero, min_size=2),
    st.floats(0.01, 0.99),
    st.floats(-3, 3).map(lambda power: 10**power),
)
def test_solved_price_meets_the_expectation(delight, share, temperature):
    count = share * delight.numel()
    price = solve_price(delight, count, temperature).item()
    kept = oracle.expected_count(delight.tolist(), price, temperature)
    # A price can be no finer than its own rounding: the sum moves by at most M / (4 eta) per step.
    rounding = delight.numel() * abs(price) / temperature * TOLERANCES[torch.float64]["rtol"]
    assert abs(kept - count) <= 2e-9 * count + rounding


@given(tensors(st.floats(-3, 3), min_size=2), st.floats(0.05, 0.95), st.floats(0.1, 10))
def test_solved_price_against_bisection(delight, share, temperature):
    count = share * delight.numel()
    price = solve_price(delight, count, temperature)
    expected = oracle.solved_price(delight.tolist(), count, temperature)
    assert_close(price, expected, torch.float32)


def test_solved_price_counts_infinities_first():
    # One unit is surely kept, one surely not: the two in the middle share the remaining 1.
    price = solve_price(torch.tensor([INF, -INF, 2.0, 2.0]), 2.0, 1.0)
    assert_close(price, 2.0, torch.float64)


@pytest.mark.parametrize(("count", "price"), [(3.0, -INF), (4.0, -INF), (1.0, INF), (0.5, INF)])
def test_a_count_that_no_price_meets_has_an_infinite_one(count, price):
    # One infinite delight is kept at any price, and there are three to keep at most.
    assert solve_price(torch.tensor([INF, 1.0, 2.0]), count, 1.0).item() == price


def test_a_temperature_of_next_to_nothing_gives_the_order_statistic():
    # The gate is a step: 0.7 of two units lies between, where no price but 1 itself will do.
    assert_close(solve_price(torch.tensor([0.5, 1.0]), 0.7, 1e-300), 1.0)
    # And a price next to nothing is found to well within rounding, if not to its last digit.
    assert_close(solve_price(torch.tensor([-1e-200, 1.0]).double(), 1.3, 1e-300), 0.0)


def test_a_weighted_value_stands_for_its_copies():
    values, weight = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([3.0, 1.0, 2.0])
    copies = values.repeat_interleave(weight.long())
    price = solve_price(values, 1.5, 0.7, weight=weight)
    assert_close(price, solve_price(copies, 1.5, 0.7), torch.float32)


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
