"""Causal attention: by torch's kernels, by plain products, and of one new token to a cache.

    out = softmax(query key' / sqrt(d)) value

Plain products are for thousands of rows of ten tokens, where fused kernels, made for long rows, are
many times slower; their query is scaled already. Rows may then share what precedes them.

Kernels of whole attention work on tiles of a hundred queries: for one token they would spend nearly
all of it on those that are not there. `attend` makes every row and head a program of its own, which
reads its part of the cache once.

Shapes: N rows, H heads, T tokens of a row, t tokens in the cache, D width, d width of a head.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from kondo.lm.head import can_fuse

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of a population's attention: not cuDNN's, which plans anew for every shape, and a sampler
has one for every length of its cache."""


def causal_attention(
    mixed: Tensor, length: int, num_heads: int, cache: Tensor | None = None, start: int = 0
) -> Tensor:
    """Return attention within rows of `length` tokens laid end to end, [..., D] of [..., 3 D].

    With a cache, [2 (key, value), rows, heads, t, d], the tokens are those from `start` on: their
    keys and values are written there, and those before are read. One token sees all of these;
    several must start at 0.
    """
    rows = mixed.reshape(-1, length, 3, num_heads, mixed.shape[-1] // (3 * num_heads))
    query, key, value = rows.transpose(1, 3).unbind(2)  # each [rows, heads, length, D / heads]
    causal = True
    if cache is not None:
        cache[0, :, :, start : start + length] = key
        cache[1, :, :, start : start + length] = value
        key, value = cache[:, :, :, : start + length]
        causal = length > 1
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return attended.transpose(1, 2).reshape(*mixed.shape[:-1], -1)


class Heads(NamedTuple):
    """What attention by products works on, each [groups, heads, repeats, length, d]."""

    query: Tensor
    """Scaled."""
    key: Tensor
    value: Tensor


def heads(mixed: Tensor, groups: int, repeats: int, length: int, num_heads: int) -> Heads:
    """Return query, key and value of [..., 3 D], [groups, heads, repeats, length, d]."""
    mixed = mixed.reshape(groups, repeats, length, 3, num_heads, -1)
    return Heads(*mixed.permute(3, 0, 4, 1, 2, 5))


def causal_products(own: Heads, before: Heads | None = None) -> Tensor:
    """Return causal attention by plain products, [groups, repeats, length, heads, d].

    Every row sees its own past and all of `before`, which the rows of its group share (one
    repeat).
    """
    groups, num_heads, repeats, length, size = own.query.shape
    query = own.query
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ own.key.transpose(-1, -2)).masked_fill(later, -math.inf)
    if before is None:
        attended = scores.softmax(dim=-1) @ own.value
    else:
        shared = query.reshape(groups, num_heads, repeats * length, size)
        shared = shared @ before.key.squeeze(2).transpose(-1, -2)
        shared = shared.view(groups, num_heads, repeats, length, -1)
        weight = torch.cat([shared, scores], dim=-1).softmax(dim=-1)
        # One cut, not two slices: the gradient then comes back in one piece.
        of_shared, of_own = torch.split(weight, [before.key.shape[-2], length], dim=-1)
        past = of_shared.reshape(groups, num_heads, repeats * length, -1) @ before.value.squeeze(2)
        attended = past.view_as(own.value) + of_own @ own.value
    return attended.permute(0, 2, 3, 1, 4)


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, later: Tensor) -> Tensor:
    """Return [N, H, d] of one token to a whole cache, by plain products.

    Args:
        query: [N, H, d], scaled.
        key: [N, H, t, d]; finite also in the places that are masked.
        value: like key.
        later: [t], minus infinity in the places that are not filled yet and 0 elsewhere: products
            of one size, whatever the token.
    """
    asked = query.reshape(-1, 1, query.shape[-1])
    weight = (torch.bmm(asked, key.flatten(0, 1).transpose(1, 2)) + later).softmax(dim=-1)
    return torch.bmm(weight, value.flatten(0, 1)).view_as(query)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return [N, H, d]; not differentiable. Sums are taken in float32 at least.

    Args:
        query: [N, H, d]; a row's heads stand together in memory.
        key: [N, H, t, d]; the last dimension stands together in memory.
        value: like key, with its strides.

    Example:
        >>> import torch
        >>> from kondo_lab.models.attend import attend
        >>> cached = torch.ones(2, 3, 5, 4)
        >>> attend(torch.ones(2, 3, 4), cached, cached).shape
        torch.Size([2, 3, 4])
    """
    if can_fuse(query.device) and query.dtype != torch.float64:
        return _by_kernel(query, key, value)
    return by_sums(query, key, value)


def by_sums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same by torch's own operations, a pass over the cache for each."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (key.to(dtype) * query.to(dtype).unsqueeze(2)).sum(dim=3)
    weight = (scores / math.sqrt(query.shape[-1])).softmax(dim=2)
    return (weight.unsqueeze(3) * value.to(dtype)).sum(dim=2).to(query.dtype)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from kondo_lab.models.attend_kernel import kernel  # Triton, which a CPU build does not have

    rows, heads, length, width = key.shape
    assert query.stride()[1:] == (width, 1), "a row's heads must stand together in memory"
    assert value.stride() == key.stride(), "keys and values must lie alike in memory"
    assert key.stride(3) == 1, "a token's numbers must stand together in memory"
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    kernel[(rows * heads,)](
        query,
        key,
        value,
        out,
        length,
        1 / math.sqrt(width),
        query.stride(0),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        heads=heads,
        width=width,
        # Compiled for powers of two: a cache that grows token by token needs few of them.
        most_tokens=_power_of_two(length),
        most_width=_power_of_two(width),
        num_warps=1,
    )
    return out


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
