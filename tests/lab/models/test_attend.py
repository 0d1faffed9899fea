"""Attention of one token: by sums, against torch's own; by the kernel, against sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kondo_lab.models.attend import attend, by_sums
from tolerances import assert_close


def asked_and_cached(rows, heads, length, width, *, room=3, dtype=torch.float64, device="cpu"):
    """Return query, key and value as a sampler has them: slices of larger tensors."""
    torch.manual_seed(rows + 10 * heads + 100 * length + 1000 * width)
    mixed = torch.randn(rows, 3, heads, width, dtype=dtype, device=device)
    cache = torch.randn(2, rows, heads, length + room, width, dtype=dtype, device=device)
    return mixed[:, 0], *cache[:, :, :, :length]


@given(
    rows=st.integers(1, 4),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    width=st.integers(1, 6),
)
def test_one_token_attends_like_the_last_of_many(rows, heads, length, width):
    query, key, value = asked_and_cached(rows, heads, length, width)
    expected = scaled_dot_product_attention(query.unsqueeze(2), key, value).squeeze(2)
    assert_close(attend(query, key, value), expected)


def test_sums_of_half_precision_are_taken_in_full():
    query, key, value = asked_and_cached(8, 2, 300, 16, dtype=torch.bfloat16)
    exact = by_sums(query.double(), key.double(), value.double())
    torch.testing.assert_close(by_sums(query, key, value).double(), exact, rtol=4e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "length", "width"),
    [(3, 2, 1, 8), (70_000, 1, 5, 8), (5, 3, 33, 24), (2, 8, 31, 64)],
)
def test_the_kernel_takes_the_same_sums(rows, heads, length, width, dtype):
    given = asked_and_cached(rows, heads, length, width, dtype=dtype, device="cuda")
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(attend(*given), by_sums(*given), rtol=tolerance, atol=tolerance)
