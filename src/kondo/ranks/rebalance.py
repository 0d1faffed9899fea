"""Kept rows on the move: which rank trains which row, and how rows get there.

    costs of all kept rows -> deal -> destination of each row -> move -> rows of this rank

The tensors of a nest travel as bytes in one all-to-all, entries of its lists pickled in another.
Rows of ranks with longer sequences make the others' longer: zeros (False) are added at the end of
every dimension that is too short.
"""

import heapq
import math
import pickle
from collections.abc import Iterator, Sequence
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
        spare = order[~stays]
        pool += [
            (-cost, rank, row)
            for cost, row in zip(own[spare].tolist(), spare.tolist(), strict=True)
        ]
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
    tensors = rows.leaves(nest)
    me, wire = ranks.rank, ranks.wire(tensors[0].device)
    shapes = _shapes(ranks, tensors)
    mine = targets[me]
    counts = [int((own == me).sum()) for own in targets]
    nobody = torch.zeros(0, dtype=torch.int64)
    outgoing = [
        nobody if rank == me else (mine == rank).nonzero().flatten() for rank in range(ranks.size)
    ]
    parcels = [
        torch.cat([_bytes(tensor, index).to(wire) for tensor in tensors]) for index in outgoing
    ]
    sizes = [
        0 if rank == me else sum(_num_bytes(tensors, shapes[rank], counts[rank]))
        for rank in range(ranks.size)
    ]
    received = ranks.trade(parcels, sizes)
    stay = (mine == me).nonzero().flatten()
    by_rank = [
        [tensor.index_select(0, stay.to(tensor.device)) for tensor in tensors]
        if rank == me
        else list(_tensors(received[rank], tensors, shapes[rank], counts[rank]))
        for rank in range(ranks.size)
        if counts[rank]
    ]
    total = sum(counts)
    joined = (
        [_join(parts) for parts in zip(*by_rank, strict=True)]
        if by_rank
        else [tensor[:0] for tensor in tensors]
    )
    num_bytes = sum(
        sum(_num_bytes(tensors, shapes[rank], int((own != rank).sum())))
        for rank, own in enumerate(targets)
    )
    lists = [leaf for _, leaf in rows.fields(nest, "rows") if rows.is_sequence(leaf)]
    entries, list_bytes = _move_lists(ranks, lists, outgoing, stay) if lists else ([], 0)
    return Moved(_rebuild(nest, joined, total, entries), total, num_bytes + list_bytes)


def _move_lists(
    ranks: Ranks, lists: Sequence[Sequence[Any]], outgoing: Sequence[Tensor], stay: Tensor
) -> tuple[list[list[Any]], int]:
    """Send entries of lists as `move` does rows; return those of this rank, and bytes sent."""

    def entries(index: Tensor) -> list[list[Any]]:
        places = index.tolist()
        return [[each[place] for place in places] for each in lists]

    told = [pickle.dumps(entries(index)) if len(index) else b"" for index in outgoing]
    lengths = torch.tensor([len(text) for text in told])
    every = ranks.gather(lengths, [ranks.size] * ranks.size)
    parcels = [torch.frombuffer(bytearray(b"\0" + text), dtype=torch.uint8)[1:] for text in told]
    received = ranks.trade(parcels, [int(sizes[ranks.rank]) for sizes in every])
    by_rank = [pickle.loads(bytes(part.tolist())) for part in received if part.numel()]
    before = sum(part.numel() > 0 for part in received[: ranks.rank])
    by_rank.insert(before, entries(stay))
    joined = [list(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]
    return joined, int(sum(map(sum, every)))


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


def _rebuild(
    nest: Any, tensors: Sequence[Tensor], num_rows: int, lists: Sequence[list[Any]]
) -> Any:
    """Return `nest` with other fields in the places of its own, each with `num_rows` rows."""
    following, entries = iter(tensors), iter(lists)

    def replace(leaf: Any) -> Any:
        if rows.is_sequence(leaf):
            return rows.sequence_like(leaf, next(entries))
        if isinstance(leaf, Tensor):
            return next(following)
        return leaf.apply(lambda _: next(following), batch_size=[num_rows])

    return rows.map_fields(nest, replace)


def _shapes(ranks: Ranks, tensors: Sequence[Tensor]) -> list[list[list[int]]]:
    """Return, per rank and tensor, the sizes beside the rows."""
    own = torch.tensor([size for t in tensors for size in t.shape[1:]], dtype=torch.int64)
    told = ranks.gather(own, [own.numel()] * ranks.size)
    return [
        [part.tolist() for part in torch.split(every, [t.ndim - 1 for t in tensors])]
        for every in told
    ]


def _bytes(tensor: Tensor, index: Tensor) -> Tensor:
    taken = tensor.detach().index_select(0, index.to(tensor.device))
    return taken.contiguous().view(-1).view(torch.uint8)


def _num_bytes(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], count: int) -> list[int]:
    return [
        count * math.prod(shape) * tensor.element_size()
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def _tensors(
    parcel: Tensor, like: Sequence[Tensor], shapes: Sequence[Sequence[int]], count: int
) -> Iterator[Tensor]:
    """Yield the tensors of a parcel, in the dtypes and on the devices of `like`."""
    parts = torch.split(parcel, _num_bytes(like, shapes, count))
    for part, tensor, shape in zip(parts, like, shapes, strict=True):
        # A copy: bytes in the middle of a parcel may not be aligned for the dtype.
        yield part.clone().view(tensor.dtype).view(count, *shape).to(tensor.device)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Stack rows, after making the shorter as long as the longest."""
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_pad(part, longest) for part in parts])


def _pad(part: Tensor, longest: Sequence[int]) -> Tensor:
    missing = [
        m
        for size, most in zip(part.shape[:0:-1], longest[::-1], strict=True)
        for m in (0, most - size)
    ]
    return torch.nn.functional.pad(part, missing) if any(missing) else part
