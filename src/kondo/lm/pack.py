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
from typing import Literal

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
    position_ids: Tensor
    """int64 like input_ids; 0 in the padding."""
    own_positions: bool
    """Whether position_ids were given, not counted from 0."""
    attention_mask: Tensor | None
    """bool [B, max_length]: not padding; None for "varlen"."""
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


def packs(
    batch: TokenRows,
    keep: Tensor,
    rows: Tensor | None = None,
    *,
    layout: Layout,
    max_tokens: int,
    max_rows: int | None = None,
    device: torch.device | None = None,
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
        host_rows: `rows` on the CPU, where all sampled tokens of these rows are kept: with what
            `TokenRows.check` has read, nothing is read then.
    """
    device, measures = device or batch.device, None if host_rows is None else batch.measures
    if measures is None or host_rows is None:
        known = _measured(batch, keep, rows)
    else:
        starts, ends, counts = measures[:, host_rows]
        known = torch.stack([host_rows, starts, ends - starts, counts])
    known = known[:, known[2].argsort(descending=True, stable=True)]
    number, _, lengths, counts = known
    sizes, num_kept = lengths.tolist(), counts.tolist()
    groups = balanced_groups(
        sizes, max_tokens, padded=layout == "padded", max_size=max_rows or len(sizes)
    )
    ids, positions, places = batch.input_ids, batch.position_ids, number
    if ids.device != device:  # only what is needed crosses over
        wanted = number.to(ids.device)
        ids = _to(ids.index_select(0, wanted), device)
        positions = None if positions is None else _to(positions.index_select(0, wanted), device)
        places = torch.arange(len(sizes))
    index = torch.stack([*known[:3], places])
    index = _to(index.pin_memory() if device.type == "cuda" else index, device)
    here = index[0] if keep.device == device else number.to(keep.device)
    kept = _to(keep.index_select(0, here), device)
    for group in groups:
        parts = index[:, group], kept[group], sizes[group], sum(num_kept[group])
        yield _pack(ids, positions, *parts, layout)


def _measured(batch: TokenRows, keep: Tensor, rows: Tensor | None) -> Tensor:
    """Read what the host must know of the rows with a kept token, [4, R] on the CPU, at once.

    Their numbers, their first real tokens, their lengths up to the last kept token, and how many
    tokens are kept.
    """
    real = batch.attention_mask.to(keep.device)
    number = torch.arange(keep.shape[0], device=keep.device) if rows is None else rows
    if rows is not None:
        real, keep = real.index_select(0, rows), keep.index_select(0, rows)
    starts, first = real.byte().argmax(1), keep.byte().argmax(1)
    ends = keep.shape[1] - keep.flip(1).byte().argmax(1)
    read = torch.stack([number, starts, ends - starts, keep.sum(1), first]).cpu()
    read = read[:, read[3] > 0]
    broken = (read[4] <= read[1]).nonzero()
    if broken.numel():
        raise ValueError(
            f"completion_mask must not hold the first real token of a row, or padding before it: "
            f"nothing precedes it, so it has no log-prob. Got row {int(read[0, broken[0]])}; put a "
            f"prompt or a start token before it."
        )
    return read[:4]


def _pack(
    ids: Tensor,
    positions: Tensor | None,
    index: Tensor,
    keep: Tensor,
    sizes: list[int],
    num_kept: int,
    layout: Layout,
) -> Pack:
    """Lay out the rows of one pack, whose sizes the host knows: nothing is read.

    `index` is [4, R]: numbers of the rows, first real tokens, lengths, and their places in `ids`
    and `positions`; `keep` is [R, S].
    """
    number, first, lengths, places = index
    num_rows, total, longest, device = len(sizes), sum(sizes), sizes[0], index.device
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    begin, corner_of_row = starts[:-1], places * ids.shape[1]
    # The slot of a row's first token in the flattened pack.
    corner = begin if layout == "varlen" else torch.arange(num_rows, device=device) * longest
    offsets = torch.stack([corner_of_row + first - begin, -begin, corner - begin])
    place = offsets.repeat_interleave(lengths, dim=1, output_size=total)
    source, position, slot = (place + torch.arange(total, device=device)).unbind()
    row, column = keep.nonzero_static(size=num_kept).unbind(1)
    shape = (1, total) if layout == "varlen" else (num_rows, longest)
    flat = ids.reshape(-1)
    if positions is not None:
        position = positions.reshape(-1)[source]

    def placed(values: Tensor) -> Tensor:
        """Write one value per token into its slot; what is left, the padding, is 0 or False."""
        if total == shape[0] * shape[1]:
            return values.view(shape)
        return values.new_zeros(shape[0] * shape[1]).index_copy(0, slot, values).view(shape)

    return Pack(
        layout=layout,
        input_ids=placed(flat[source]),
        position_ids=placed(position),
        own_positions=positions is not None,
        attention_mask=None if layout == "varlen" else placed(slot >= 0),
        cu_seqlens=starts.int(),
        max_length=longest,
        read=(corner - first - 1)[row] + column,
        targets=flat[corner_of_row[row] + column],
        rows=number[row],
        columns=column,
        num_rows=num_rows,
        num_tokens=shape[0] * shape[1],
    )


def _to(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for it."""
    return values.to(device, non_blocking=True)


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
    size, columns, found = max(1, max_tokens // width), batch.input_ids.shape[1], []
    for start in range(0, len(ends), size):
        some = slice(start, start + size)
        row, column = keep[some].nonzero_static(size=int(kept[some].sum())).unbind(1)
        rows = row + start if start else row
        real, ids = batch.attention_mask[some, :width], batch.input_ids[some, :width]
        found.append(
            Pack(
                layout="padded",
                input_ids=torch.where(real, ids, 0),  # what stands in the padding may be no id
                position_ids=torch.arange(width, device=ids.device).expand(ids.shape),
                own_positions=False,
                attention_mask=real,
                cu_seqlens=ids.new_zeros(0, dtype=torch.int32),  # of rows laid end to end alone
                max_length=width,
                read=row * width + (column - 1),
                targets=batch.input_ids.reshape(-1).index_select(0, rows * columns + column),
                rows=rows,
                columns=column,
                num_rows=ids.shape[0],
                num_tokens=ids.numel(),
            )
        )
    return found
