"""Kept rows on the move: which rank trains which row, and how rows get there.

    costs of all kept rows -> deal -> destination of each row -> move -> rows of this rank

The tensors of a nest travel as bytes in one all-to-all, entries of its lists pickled in another.
Rows of ranks with longer sequences make the others' longer: zeros (False) are added at the end of
every dimension that is too short.
"""

import heapq
import math
import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo import rows
from kondo.ranks.communicator import Ranks


class Moved(NamedTuple):
    """What came of a move."""

    nest: Any
    """The rows this rank has now, in the order of the ranks they came from."""
    num_rows: int
    num_bytes: int
    """Bytes that changed rank, over all ranks."""


def deal(costs: Sequence[Tensor]) -> list[Tensor]:
    """Return the rank that trains each kept row: about the same cost for all, few rows moved.

    A rank keeps its dearest rows up to its share, cost of all / ranks; the others go, dearest
    first, to whoever has the least. No rank gets more than a share and one row.

    Args:
        costs: per rank, [K_r] int64, cost of each of its kept rows.

    Returns:
        Per rank, [K_r] int64: destinations.

    Example:
        >>> import torch
        >>> deal([torch.tensor([5, 1, 3]), torch.tensor([1])])
        [tensor([0, 1, 1]), tensor([1])]
    """
    share = sum(int(own.sum()) for own in costs) / len(costs)
    targets, loads, pool = [], [], []
    for rank, own in enumerate(costs):
        order = own.argsort(descending=True, stable=True)
        stays = own[order].cumsum(0) <= share
        targets.append(torch.full_like(own, rank))
        loads.append(int(own[order[stays]].sum()))
        pool += [(-int(own[row]), rank, row) for row in order[~stays].tolist()]
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    for cost, owner, row in sorted(pool):
        while lightest[0][0] != loads[lightest[0][1]]:
            heapq.heappop(lightest)  # this rank was given a row since
        least, target = lightest[0]
        target = owner if loads[owner] == least else target
        loads[target] -= cost
        heapq.heappush(lightest, (loads[target], target))
        targets[owner][row] = target
    return targets


def move(ranks: Ranks, nest: Any, targets: Sequence[Tensor]) -> Moved:
    """Send each row of `nest` to its rank; return the rows of this one.

    Args:
        ranks: the group.
        nest: any nest with K_r rows, K_r >= 0; of one structure and one set of dtypes on all ranks,
            sizes beside the rows may differ.
        targets: per rank, [K_r] int64: destination of each of its rows, the same on all ranks.
    """
    tensors, me = rows.leaves(nest), ranks.rank
    sizes = torch.tensor([size for t in tensors for size in t.shape[1:]], dtype=torch.int64)
    shapes = [  # of one row of each tensor, on every rank
        [part.tolist() for part in torch.split(told, [t.ndim - 1 for t in tensors])]
        for told in ranks.gather(sizes, [sizes.numel()] * ranks.size)
    ]
    widths = [  # in bytes
        [math.prod(shape) * t.element_size() for t, shape in zip(tensors, theirs, strict=True)]
        for theirs in shapes
    ]
    counts = [int((own == me).sum()) for own in targets]
    places = [(targets[me] == rank).nonzero().flatten() for rank in range(ranks.size)]
    going = [[t.index_select(0, index.to(t.device)) for t in tensors] for index in places]
    stay, going[me] = going[me], [t[:0] for t in tensors]
    wire = ranks.wire(tensors[0].device)
    parcels = [
        torch.cat(
            [part.detach().contiguous().view(-1).view(torch.uint8).to(wire) for part in parts]
        )
        for parts in going
    ]
    expected = [count * sum(width) for count, width in zip(counts, widths, strict=True)]
    expected[me] = 0
    received = ranks.trade(parcels, expected)

    def opened(rank: int) -> list[Tensor]:
        """Return the tensors of a parcel, in the dtypes and on the devices of ours."""
        parts = torch.split(received[rank], [counts[rank] * width for width in widths[rank]])
        # A copy: bytes in the middle of a parcel may not be aligned for the dtype.
        return [
            part.clone().view(t.dtype).view(counts[rank], *shape).to(t.device)
            for part, t, shape in zip(parts, tensors, shapes[rank], strict=True)
        ]

    arrived = [stay if rank == me else opened(rank) for rank in range(ranks.size) if counts[rank]]
    joined = iter([_join(parts) for parts in zip(*arrived, strict=True)] if arrived else stay)
    num_bytes = sum(
        int((own != rank).sum()) * sum(widths[rank]) for rank, own in enumerate(targets)
    )
    lists = [leaf for _, leaf in rows.fields(nest, "rows") if rows.is_sequence(leaf)]
    entries, list_bytes = _move_lists(ranks, lists, places) if lists else ([], 0)
    remaining = iter(entries)

    def replace(leaf: Any) -> Any:
        if rows.is_sequence(leaf):
            return rows.sequence_like(leaf, next(remaining))
        if isinstance(leaf, Tensor):
            return next(joined)
        return leaf.apply(lambda _: next(joined), batch_size=[sum(counts)])

    return Moved(rows.map_fields(nest, replace), sum(counts), num_bytes + list_bytes)


def _move_lists(
    ranks: Ranks, lists: Sequence[Sequence[Any]], places: Sequence[Tensor]
) -> tuple[list[list[Any]], int]:
    """Send entries of lists as `move` does rows; return those of this rank, and bytes sent."""
    going = [[[each[place] for place in index.tolist()] for each in lists] for index in places]
    stay, empty = going[ranks.rank], torch.zeros(0, dtype=torch.uint8)
    parcels = [
        torch.frombuffer(bytearray(pickle.dumps(entries)), dtype=torch.uint8)
        if rank != ranks.rank and len(places[rank])
        else empty
        for rank, entries in enumerate(going)
    ]
    lengths = torch.tensor([parcel.numel() for parcel in parcels])
    every = ranks.gather(lengths, [ranks.size] * ranks.size)
    received = ranks.trade(parcels, [int(sizes[ranks.rank]) for sizes in every])
    arrived = [
        stay if rank == ranks.rank else pickle.loads(bytes(parcel.tolist()))
        for rank, parcel in enumerate(received)
        if rank == ranks.rank or parcel.numel()
    ]
    joined = [list(chain.from_iterable(parts)) for parts in zip(*arrived, strict=True)]
    return joined, int(torch.stack(every).sum())


def structure(nest: Any, name: str) -> dict[str, str]:
    """Say for each field of a nest what must be the same on all ranks for it to travel."""
    described = {}
    for path, leaf in rows.fields(nest, name):
        if rows.is_sequence(leaf):
            described[path] = "a list"
            continue
        inner = [leaf] if isinstance(leaf, Tensor) else rows.leaves(leaf)
        described[path] = ", ".join(f"{t.ndim}-d {t.dtype}" for t in inner)
    return described


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Stack rows, after making the shorter as long as the longest."""
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [
            m
            for size, most in zip(part.shape[:0:-1], longest[::-1], strict=True)
            for m in (0, most - size)
        ]
        padded.append(torch.nn.functional.pad(part, missing) if any(missing) else part)
    return torch.cat(padded)
