"""Attention of one new token to a cache, what a sampler does most.

    out = softmax(query key' / sqrt(d)) value

Kernels of whole attention work on tiles of a hundred queries: with one they spend nearly all of it
on those that are not there. Here every row and head is a program of its own, which reads its part
of the cache once.

Shapes: N rows, H heads, t tokens in the cache, d width of a head.
"""

import math

import torch
from torch import Tensor

from kondo.lm.head import can_fuse


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
