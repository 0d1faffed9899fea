"""Packs: the kept tokens and the prefixes they need, cut and laid out so that little is computed.

A causal model reads a row from its first real token to its last kept one; what follows cannot
influence a kept token and is cut. Rows are ordered by length and dealt into packs of a bounded
number of tokens, either end to end ("varlen", no padding) or side by side with padding on the
right ("padded").

    input_ids   a b c d | e f g        varlen [1, total]
    kept            ^ ^       ^        targets c, d, g, read from the hidden states of b, c, f

One read tells how long the kept rows are; everything else is laid out on the device.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from kondo.lm.rows import TokenRows

Layout = Literal["varlen", "padded"]

# A dense step leaves its rows as they lie where at least this share of their tokens is real.
_FULL = 0.75


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
    """int32 [B + 1]: where each row starts among the `total` tokens; empty for rows as they lie."""
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
    """Rows that keep something, longest first, on the device of the packs. R rows of S tokens."""

    rows: Tensor
    """int64 [R]: which rows of the batch."""
    starts: Tensor
    """int64 [R]: first real token."""
    lengths: Tensor
    """int64 [R]: tokens up to and including the last kept one."""
    keep: Tensor
    """bool [R, S]."""
    places: Tensor
    """int64 [R]: which rows of `_Tokens`."""


class _Sizes(NamedTuple):
    """What the host knows of the same rows, in the same order."""

    rows: Tensor
    """int64 [R] on the CPU."""
    starts: Tensor
    """int64 [R] on the CPU."""
    lengths: list[int]
    kept: list[int]
    """Kept tokens."""


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
    host_rows: Tensor | None = None,
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
        host_rows: `rows` on the CPU, where all sampled tokens of these rows are kept: with what
            `TokenRows.check` has read, nothing is read then.
    """
    device = device or batch.input_ids.device
    measures = None if host_rows is None else batch.measures
    if measures is None or host_rows is None:
        sizes = _measured(batch, keep, rows)
    else:
        sizes = _known(measures, host_rows)
    groups = balanced_groups(
        sizes.lengths,
        max_tokens,
        padded=layout == "padded",
        max_size=max_rows or len(sizes.lengths),
    )
    ids, positions = batch.input_ids, batch.position_ids
    places = sizes.rows
    if ids.device != device:  # only what is needed crosses over
        ids, positions = _rows_of(ids, sizes.rows), _rows_of(positions, sizes.rows)
        places = torch.arange(len(sizes.lengths))
    tokens = _Tokens(
        _flat(ids, device),
        None if positions is None else _flat(positions, device),
        ids.shape[1],
    )
    parts = (sizes.rows, sizes.starts, torch.tensor(sizes.lengths, dtype=torch.int64), places)
    number, starts, lengths, places = _copy(parts, device)
    here = number if keep.device == device else sizes.rows.to(keep.device)
    kept = _to(keep.index_select(0, here), device)
    cut = _Cut(number, starts, lengths, kept, places)
    bare = bare and layout == "padded" and positions is None
    for group in groups:
        some = _Cut(*(part[group] for part in cut))
        yield _pack(tokens, some, sizes.lengths[group], sum(sizes.kept[group]), layout, bare)


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


def _measured(batch: TokenRows, keep: Tensor, rows: Tensor | None) -> _Sizes:
    """Return how long the rows with a kept token are, longest first; the one read."""
    real = batch.attention_mask.to(keep.device)
    number = torch.arange(keep.shape[0], device=keep.device) if rows is None else rows
    if rows is not None:
        real, keep = real.index_select(0, rows), keep.index_select(0, rows)
    starts, first = real.byte().argmax(1), keep.byte().argmax(1)
    ends = keep.shape[1] - keep.flip(1).byte().argmax(1)
    read = torch.stack([number, starts, ends - starts, keep.sum(1), first], 1).cpu()
    read = read[read[:, 3] > 0]
    number, starts, lengths, kept, first = read[read[:, 2].argsort(descending=True, stable=True)].T
    broken = (first <= starts).nonzero()
    if broken.numel():
        raise ValueError(
            f"completion_mask must not hold the first real token of a row, or padding before it: "
            f"nothing precedes it, so it has no log-prob. Got row {int(number[broken[0]])}; put a "
            f"prompt or a start token before it."
        )
    return _Sizes(number, starts, lengths.tolist(), kept.tolist())


def _known(measures: Tensor, rows: Tensor) -> _Sizes:
    """Return how long whole rows are, longest first, from what is known of all rows, [3, N]."""
    starts, ends, kept = measures[:, rows]
    lengths, order = (ends - starts).sort(descending=True, stable=True)
    return _Sizes(rows[order], starts[order], lengths.tolist(), kept[order].tolist())


def unpacked(batch: TokenRows, keep: Tensor, *, max_tokens: int) -> list[Pack] | None:
    """Return the batch as it lies, in "padded" packs; None where packing would compute much less.

    For dense steps: rows that start in the first column and have little padding need no layout.

    Args:
        batch: N rows of S tokens, checked.
        keep: bool [N, S]: every sampled token.
        max_tokens: most tokens of a pack, padding included.
    """
    measures = batch.measures
    if measures is None or batch.position_ids is not None or not measures.shape[1]:
        return None
    starts, ends, kept = measures
    width = int(ends.max()) - 1  # nothing is read from the last token
    if bool(starts.any()) or int(ends.sum()) < _FULL * len(ends) * width:
        return None
    size = max(1, max_tokens // width)
    return [
        _as_it_lies(batch, keep, slice(start, start + size), width, kept[start : start + size])
        for start in range(0, len(ends), size)
    ]


def _as_it_lies(batch: TokenRows, keep: Tensor, some: slice, width: int, kept: Tensor) -> Pack:
    ids, columns = batch.input_ids, batch.input_ids.shape[1]
    row, column = keep[some].nonzero_static(size=int(kept.sum())).unbind(1)
    rows = row + some.start if some.start else row
    real, given = batch.attention_mask[some, :width], ids[some, :width]
    return Pack(
        layout="padded",
        input_ids=torch.where(real, given, 0),  # what stands in the padding may be no id at all
        position_ids=torch.arange(width, device=ids.device).expand(given.shape),
        own_positions=False,
        attention_mask=real,
        cu_seqlens=ids.new_zeros(0, dtype=torch.int32),  # of rows laid end to end alone
        max_length=width,
        read=row * width + (column - 1),
        targets=ids.reshape(-1).index_select(0, rows * columns + column),
        rows=rows,
        columns=column,
        num_rows=given.shape[0],
        num_tokens=given.numel(),
    )


def _pack(
    tokens: _Tokens, cut: _Cut, sizes: list[int], num_kept: int, layout: Layout, bare: bool
) -> Pack:
    """Lay out the rows of one pack, whose sizes the host knows: nothing is read."""
    num_rows, total, longest = len(sizes), sum(sizes), sizes[0]
    device = cut.rows.device
    starts = torch.nn.functional.pad(cut.lengths.cumsum(0), (1, 0))
    begin, corner_of_row = starts[:-1], cut.places * tokens.num_columns
    # The slot of a row's first token in the flattened pack.
    corner = begin if layout == "varlen" else torch.arange(num_rows, device=device) * longest
    offsets = torch.stack([corner_of_row + cut.starts - begin, -begin, corner - begin])
    place = offsets.repeat_interleave(cut.lengths, dim=1, output_size=total)
    source, position, slot = (place + torch.arange(total, device=device)).unbind()
    row, column = cut.keep.nonzero_static(size=num_kept).unbind(1)

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
        read=(corner - cut.starts - 1)[row] + column,
        targets=tokens.ids[corner_of_row[row] + column],
        rows=cut.rows[row],
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


def _to(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for it."""
    return values.to(device, non_blocking=True)


def _flat(values: Tensor, device: torch.device) -> Tensor:
    return _to(values, device).reshape(-1)


def _copy(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Copy index tensors to the device in one piece, without waiting for it."""
    sizes = [part.numel() for part in parts]
    together = torch.cat(parts)
    if device.type == "cuda":
        together = together.pin_memory()
    return torch.split(_to(together, device), sizes)
