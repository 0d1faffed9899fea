"""kondo.core.ratios: capped before the exponential, and the same for any order of elements."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.core.ratios import capped_ratio, sequence_ratio
from no_reads import NoReads
from oracles.sequences import sequence_weights
from tolerances import assert_close


def test_a_ratio_that_overflows_is_the_cap():
    huge = torch.tensor([1e4, math.inf, 0.0, -1e4, -math.inf])
    assert_close(capped_ratio(huge, 2.0), torch.tensor([2.0, 2.0, 1.0, 0.0, 0.0]))


def test_sequence_ratio_literal():
    # 2 * 1/4 = 1/2; 3 * 2 = 6, capped at 5; outside 0.
    ratios = torch.tensor([2.0, 3.0, 0.25, 2.0, 7.0], dtype=torch.float64)
    index = torch.tensor([1, 0, 1, 0, -1])
    found = sequence_ratio(ratios.log(), torch.zeros(5).double(), index, max_weight=5.0)
    assert_close(found, torch.tensor([0.5, 5.0, 0.5, 5.0, 0.0], dtype=torch.float64))


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    cap=st.sampled_from([0.5, 1.0, 2.0, 1e9]),
    seed=st.integers(0, 99),
)
def test_any_order_of_flat_elements_has_the_ratios_of_rows(lengths, cap, seed):
    draws = torch.Generator().manual_seed(seed)
    shape = (len(lengths), 5)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    log_probs, behaviour = (-torch.rand(shape, generator=draws).double() for _ in range(2))
    expected = sequence_weights(log_probs, behaviour, mask, cap)[:, None] * mask
    broken = torch.where(mask, behaviour, math.nan)  # what does not count does not matter
    rows = torch.arange(len(lengths))[:, None].expand(shape)
    index = torch.where(mask, rows, -1)
    assert_close(sequence_ratio(log_probs, broken, index, max_weight=cap), expected)
    row, column = mask.nonzero()[torch.randperm(int(mask.sum()), generator=draws)].unbind(1)
    number = row.unique(return_inverse=True)[1]
    flat = sequence_ratio(log_probs[row, column], behaviour[row, column], number, max_weight=cap)
    assert_close(flat, expected[row, column])
    whole = sequence_ratio(log_probs, behaviour, max_weight=cap)
    everything = sequence_weights(log_probs, behaviour, torch.ones_like(mask), cap)
    assert_close(whole, everything[:, None].expand(shape))


def test_nothing_is_read_from_the_device():
    log_probs, index = -torch.rand(6), torch.tensor([0, 0, 1, 1, 1, -1])
    with NoReads():
        sequence_ratio(log_probs, log_probs - 0.1, index, max_weight=2.0)
