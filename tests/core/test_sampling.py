"""Numbers of units for a rate, and the lots that break ties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.core.sampling import count_for, lottery
from oracles import core as oracle


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
