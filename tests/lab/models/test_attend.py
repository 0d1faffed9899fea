"""Attention by products and of one token, against torch's own; by the kernel, against sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kondo_lab.models.attend import (
    attend,
    attend_by_products,
    by_sums,
    causal_attention,
    causal_products,
    heads,
)
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


@given(
    rows=st.integers(1, 4),
    num_heads=st.integers(1, 3),
    length=st.integers(1, 9),
    width=st.integers(1, 6),
)
def test_one_token_attends_to_the_filled_part_of_a_cache_by_products(
    rows, num_heads, length, width
):
    query, key, value = asked_and_cached(rows, num_heads, length, width)
    expected = scaled_dot_product_attention(query.unsqueeze(2), key, value).squeeze(2)
    room = torch.full((rows, num_heads, 2, width), 7.0, dtype=key.dtype)
    later = torch.tensor([0.0] * length + [-torch.inf] * 2, dtype=key.dtype)
    key, value = (torch.cat([each, room], dim=2) for each in (key, value))
    assert_close(attend_by_products(query / width**0.5, key, value, later), expected)


def mixed_rows(groups, repeats, length, width, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        groups * repeats * length, 3 * width, generator=generator, dtype=torch.float64
    )


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_rows_that_share_what_precedes_them_attend_as_whole_rows_do(before, length):
    groups, repeats, num_heads, width = 2, 3, 2, 8
    prompt = mixed_rows(groups, 1, before, width, seed=0)
    answers = mixed_rows(groups, repeats, length, width, seed=1)
    repeated = prompt.view(groups, 1, before, -1).expand(-1, repeats, -1, -1)
    whole = torch.cat([repeated, answers.view(groups, repeats, length, -1)], dim=2)
    expected = causal_attention(whole.flatten(0, 2), before + length, num_heads)
    expected = expected.view(groups, repeats, before + length, width)
    scale = torch.ones(3 * width, dtype=torch.float64)
    scale[:width] /= (width / num_heads) ** 0.5
    shared = heads(prompt * scale, groups, 1, before, num_heads)
    own = heads(answers * scale, groups, repeats, length, num_heads)
    assert_close(causal_products(shared).flatten(3), expected[:, :1, :before])
    assert_close(causal_products(own, shared).flatten(3), expected[:, :, before:])


@pytest.mark.parametrize("start", [1, 4])
def test_a_cache_gives_what_all_tokens_at_once_do(start):
    rows, length, num_heads, width = 3, 6, 2, 8
    mixed = mixed_rows(rows, 1, length, width, seed=2)
    expected = causal_attention(mixed, length, num_heads).view(rows, length, width)
    mixed = mixed.view(rows, length, -1)
    cache = torch.empty(2, rows, num_heads, length, width // num_heads, dtype=torch.float64)
    first = causal_attention(mixed[:, :start].flatten(0, 1), start, num_heads, cache)
    found = [first.view(rows, start, width)]
    for place in range(start, length):
        one = causal_attention(mixed[:, place], 1, num_heads, cache, place)
        found.append(one.view(rows, 1, width))
    assert_close(torch.cat(found, dim=1), expected)


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
