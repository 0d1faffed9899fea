"""The kernel of `attend`: one program per row and head. Imported where Triton is installed."""

import triton
from triton import language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    out,
    length,
    scale,
    query_row,
    cache_row,
    cache_head,
    cache_token,
    heads: tl.constexpr,
    width: tl.constexpr,
    most_tokens: tl.constexpr,
    most_width: tl.constexpr,
):
    """Write softmax(scale * query key') value of one row and head; names with `_` are strides."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    token, place = tl.arange(0, most_tokens), tl.arange(0, most_width)
    inside = place < width
    asked = tl.load(query + row * query_row + head * width + place, mask=inside, other=0.0)
    cell = row * cache_row + head * cache_head + token[:, None] * cache_token + place[None, :]
    real = (token < length)[:, None] & inside[None, :]
    known = tl.load(key + cell, mask=real, other=0.0).to(tl.float32)
    score = tl.sum(known * asked.to(tl.float32)[None, :], axis=1) * scale
    score = tl.where(token < length, score, -float("inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    given = tl.load(value + cell, mask=real, other=0.0).to(tl.float32)
    found = tl.sum(given * weight[:, None], axis=0)
    tl.store(out + program * width + place, found.to(out.dtype.element_ty), mask=inside)
