"""Packs: the kept tokens and the prefixes they need, cut and laid out so that little is computed.

A causal model reads a row from its first real token to its last kept one; what follows cannot
influence a kept token and is cut. Rows are ordered by length and dealt into packs of a bounded
number of tokens, either end to end ("varlen", no padding) or side by side with padding on the
right ("padded").

    input_ids   a b c d | e f g        varlen [1, total]
    kept            ^ ^       ^        targets c, d, g, read from the hidden states of b, c, f

Everything is laid out on the CPU after one device sync, and copied once per pack.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from kondo.lm.rows import TokenRows

Layout = Literal["varlen", "padded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Cut rows for one forward. B rows of `total` tokens together, K of them kept."""

    layout: Layout
    """Either "varlen", one row of `total` tokens, or "padded", B rows of `max_length`."""
    input_ids: Tensor
    """int64 [1, total] or [B, max_length]; 0 in the padding."""
    position_ids: Tensor | None
    """int64 like input_ids; 0 in the padding. None in a bare pack."""
    own_positions: bool
    """Whether position_ids were given, not counted from 0."""
    attention_mask: Tensor | None
    """bool [B, max_length]: not padding; None for "varlen" and in a bare pack."""
    cu_seqlens: Tensor
    """int32 [B + 1]: where each row starts among the `total` tokens."""
    max_length: int
    """Tokens of the longest row."""
    read: Tensor
    """int64 [K]: whose flattened hidden state predicts each kept token, the one before it."""
    targets: Tensor
    """int64 [K]: the kept tokens."""
    rows: Tensor
    """int64 [K]: row of the batch of each kept token."""
    columns: Tensor
    """int64 [K]: its column."""
    num_rows: int
    """B."""
    num_tokens: int
    """Tokens that enter the forward, padding included."""


class _Tokens(NamedTuple):
    """Rows of the batch in one dimension, on the device of the packs."""

    ids: Tensor
    """int64 [rows * S]."""
    positions: Tensor | None
    """int64 [rows * S], where they were given."""
    num_columns: int
    """S."""


class _Cut(NamedTuple):
    """Rows that keep something, on the CPU. R rows of S tokens."""

    rows: Tensor
    """int64 [R]: which rows of the batch, longest first."""
    starts: Tensor
    """int64 [R]: first real token."""
    lengths: Tensor
    """int64 [R]: tokens up to and including the last kept one."""
    keep: Tensor
    """bool [R, S]."""
    places: Tensor
    """int64 [R]: which rows of `_Tokens`."""


def packs(
    batch: TokenRows,
    keep: Tensor,
    rows: Tensor | None = None,
    *,
    layout: Layout,
    max_tokens: int,
    max_rows: int | None = None,
    device: torch.device | None = None,
    bare: bool = False,
) -> Iterator[Pack]:
    """Yield packs that hold every kept token once, each with its prefix.

    Args:
        batch: N rows of S tokens.
        keep: bool [N, S]: tokens whose log-probs are wanted.
        rows: int64 [R]: rows with a kept token, where they are known already.
        layout: how rows lie in a pack.
        max_tokens: most tokens of a pack, padding included; a longer row is a pack of its own.
        max_rows: most rows of a pack.
        device: where the packs go; by default where the batch is.
        bare: leave out masks and positions of "padded" packs, for models that count positions
            themselves; positions that were given are never left out.
    """
    device = device or batch.input_ids.device
    cut = _cut(batch, keep, rows)
    lengths = cut.lengths.tolist()
    groups = balanced_groups(
        lengths, max_tokens, padded=layout == "padded", max_size=max_rows or len(lengths)
    )
    ids, positions = batch.input_ids, batch.position_ids
    if ids.device != device:  # only what is needed crosses over
        ids, positions = _rows_of(ids, cut.rows), _rows_of(positions, cut.rows)
        cut = cut._replace(places=torch.arange(len(lengths)))
    tokens = _Tokens(
        _flat(ids, device),
        None if positions is None else _flat(positions, device),
        ids.shape[1],
    )
    bare = bare and layout == "padded" and positions is None
    for group in groups:
        yield _pack(tokens, _Cut(*(part[group] for part in cut)), layout, bare)


def balanced_groups(lengths: list[int], budget: int, *, padded: bool, max_size: int) -> list[slice]:
    """Deal rows, longest first, into the fewest runs that fit the budget, then even them out.

    The smallest budget that still needs no more runs leaves no small remainder at the end, and the
    lowest peak of memory.
    """
    groups = _groups(lengths, budget, padded, max_size)
    low, high = 1, budget if len(groups) > 1 else 1  # one run is as even as it gets
    while low < high:
        middle = (low + high) // 2
        tried = _groups(lengths, middle, padded, max_size)
        if len(tried) <= len(groups):
            groups, high = tried, middle
        else:
            low = middle + 1
    return groups


def _groups(lengths: list[int], budget: int, padded: bool, max_size: int) -> list[slice]:
    """Deal rows into runs in order: a run ends before it would cost more than the budget."""
    found: list[slice] = []
    start = cost = 0
    for index, length in enumerate(lengths):
        size = index - start
        # Rows come longest first: the padding of a run is set by its first row.
        cost = (size + 1) * lengths[start] if padded else cost + length
        if size and (cost > budget or size == max_size):
            found.append(slice(start, index))
            start, cost = index, length
    if lengths:
        found.append(slice(start, len(lengths)))
    return found


def _cut(batch: TokenRows, keep: Tensor, rows: Tensor | None) -> _Cut:
    """Bring the kept rows to the CPU in one piece, the one sync, and measure them there."""
    real = batch.attention_mask.to(keep.device)
    number = torch.arange(keep.shape[0], device=keep.device) if rows is None else rows
    if rows is not None:
        real, keep = real.index_select(0, rows), keep.index_select(0, rows)
    numbers = torch.stack([number, real.byte().argmax(1)], 1)
    together = torch.cat([numbers.view(torch.uint8), keep.view(torch.uint8)], 1).cpu()
    width = together.shape[1] - keep.shape[1]
    number, starts = together[:, :width].reshape(-1).view(torch.int64).view(-1, 2).unbind(1)
    kept = together[:, width:].bool()
    if rows is None:
        some = kept.any(1)
        number, starts, kept = number[some], starts[some], kept[some]
    lengths = kept.shape[1] - kept.flip(1).byte().argmax(1) - starts
    first = (kept.byte().argmax(1) <= starts).nonzero()
    if first.numel():
        raise ValueError(
            f"completion_mask must not hold the first real token of a row, or padding before it: "
            f"nothing precedes it, so it has no log-prob. Got row {int(number[first[0]])}; put a "
            f"prompt or a start token before it."
        )
    order = lengths.argsort(descending=True, stable=True)
    number = number[order]
    return _Cut(number, starts[order], lengths[order], kept[order], number)


def _pack(tokens: _Tokens, cut: _Cut, layout: Layout, bare: bool) -> Pack:
    """Lay out the rows of one pack: everything that is an index on the CPU, the rest by gather."""
    num_rows, lengths = len(cut.rows), cut.lengths
    total, longest = int(lengths.sum()), int(lengths.max())
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    begin, corner_of_row = starts[:-1], cut.places * tokens.num_columns
    # The slot of a row's first token in the flattened pack.
    corner = begin if layout == "varlen" else torch.arange(num_rows) * longest
    offsets = torch.stack([corner_of_row + cut.starts - begin, -begin, corner - begin])
    place = offsets.repeat_interleave(lengths, dim=1, output_size=total) + torch.arange(total)
    row, column = cut.keep.nonzero().unbind(1)
    read = (corner - cut.starts - 1)[row] + column
    parts = (*place.unbind(), read, corner_of_row[row] + column, cut.rows[row], column, starts)
    source, position, slot, read, taken, row, column, starts = _copy(parts, tokens.ids.device)

    shape = (1, total) if layout == "varlen" else (num_rows, longest)
    if tokens.positions is not None:
        position = tokens.positions[source]
    needs_mask = layout == "padded" and not bare
    real = torch.ones_like(slot, dtype=torch.bool) if needs_mask else None
    return Pack(
        layout=layout,
        input_ids=_place(tokens.ids[source], slot, shape),
        position_ids=None if bare else _place(position, slot, shape),
        own_positions=tokens.positions is not None,
        attention_mask=None if real is None else _place(real, slot, shape),
        cu_seqlens=starts.int(),
        max_length=longest,
        read=read,
        targets=tokens.ids[taken],
        rows=row,
        columns=column,
        num_rows=num_rows,
        num_tokens=shape[0] * shape[1],
    )


def _place(values: Tensor, slot: Tensor, shape: tuple[int, int]) -> Tensor:
    """Write one value per token into its slot; what is left, the padding, is 0 or False."""
    if values.numel() == shape[0] * shape[1]:
        return values.view(shape)
    return values.new_zeros(shape[0] * shape[1]).index_copy(0, slot, values).view(shape)


@overload
def _rows_of(values: Tensor, rows: Tensor) -> Tensor: ...
@overload
def _rows_of(values: None, rows: Tensor) -> None: ...
def _rows_of(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values.index_select(0, rows.to(values.device))


def _flat(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, non_blocking=True).reshape(-1)


def _copy(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Copy index tensors to the device in one piece, without waiting for it."""
    sizes = [part.numel() for part in parts]
    together = torch.cat(parts)
    if device.type == "cuda":
        together = together.pin_memory()
    return torch.split(together.to(device, non_blocking=True), sizes)
