"""Which rows this rank has, trains, or runs only to keep step with the others."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.engine import rows
from kondo.engine.compact import Compact, MicroBatch, micro_batches
from kondo.engine.screen import LogProb
from kondo.engine.select import Selection
from kondo.ranks import tokens
from kondo.ranks.exchange import deal, leaves, move
from kondo.ranks.gradients import Gradients
from kondo.ranks.ranks import Ranks


class LocalRows(NamedTuple):
    """Everything of this rank that has rows."""

    batch: Any
    advantages: Tensor
    """[N] or [N, T]."""
    mask: Tensor | None
    loss_inputs: dict[str, Tensor]
    screen: Tensor | LogProb | None

    @property
    def size(self) -> int:
        """N; may be 0."""
        return int(self.advantages.shape[0])


class Placed(NamedTuple):
    """The kept rows this rank trains."""

    batch: Any
    advantages: Tensor
    loss_inputs: dict[str, Tensor]
    selection: Selection
    rows_of: list[int]
    """Rows that each rank trains."""
    rows_moved: int
    """Rows that changed rank, over all ranks."""
    bytes_moved: int
    """Bytes of those rows, over all ranks."""


def count_rows(batch: Any, name: str) -> int:
    """Return the rows of a nest, which may have none."""
    if all(tensor.ndim and tensor.shape[0] == 0 for tensor in leaves(batch)):
        return 0 if leaves(batch) else rows.num_rows(batch, name)  # no tensor at all: an error
    return rows.num_rows(batch, name)


def with_a_row(ranks: Ranks, local: LocalRows, sizes: Sequence[int]) -> LocalRows:
    """Return the local rows, or a copy of another rank's first one where there are none.

    Ranks without rows need one to run, wherever a forward is a collective: under FSDP2, and under
    DDP with buffers.
    """
    if all(sizes):
        return local
    if not any(sizes):
        raise ValueError("batch must not be empty on all ranks, got 0 rows; skip the step instead.")
    lender = next(rank for rank, size in enumerate(sizes) if size)
    empty = torch.tensor([rank for rank, size in enumerate(sizes) if not size])
    nothing = torch.zeros(0, dtype=torch.int64)
    lent = rows.take(local, torch.zeros_like(empty) if ranks.rank == lender else nothing)
    targets = [empty if rank == lender else nothing for rank in range(ranks.size)]
    moved = move(ranks, lent, targets)
    return local if local.size else LocalRows(*moved.nest)


def place(
    ranks: Ranks,
    local: LocalRows,
    chosen: Selection,
    num_kept: Sequence[int],
    rebalance: bool,
) -> Placed:
    """Deal the kept rows to ranks, and move those that are dealt elsewhere.

    Args:
        ranks: the group.
        local: this rank's rows.
        chosen: what was kept of them.
        num_kept: kept rows of every rank.
        rebalance: False leaves every row where it is.
    """
    unmoved = Placed(local.batch, local.advantages, local.loss_inputs, chosen, list(num_kept), 0, 0)
    if not rebalance:
        return unmoved
    costs = ranks.gather(tokens.row_costs(local.batch, chosen), num_kept)
    targets = deal(costs)
    rows_of = [sum(int((own == rank).sum()) for own in targets) for rank in range(ranks.size)]
    num_moved = sum(int((own != rank).sum()) for rank, own in enumerate(targets))
    if num_moved == 0:
        return unmoved
    inputs = (local.batch, local.advantages, local.loss_inputs)
    kept = rows.take((*inputs, chosen.mask, chosen.weight, chosen.keep), chosen.rows)
    moved = move(ranks, kept, targets)
    batch, advantages, loss_inputs, mask, weight, keep = moved.nest
    everything = torch.arange(moved.num_rows, device=keep.device)
    selection = chosen._replace(mask=mask, weight=weight, keep=keep, rows=everything)
    return Placed(batch, advantages, loss_inputs, selection, rows_of, num_moved, moved.num_bytes)


def planned(
    ranks: Ranks, placed: Placed, compact: Compact | None, size: int | None
) -> tuple[Iterator[MicroBatch], int, int]:
    """Return this rank's micro-batches, their number, and the most that any rank has."""
    made: Iterable[MicroBatch] = ()
    if placed.rows_of[ranks.rank]:
        made = (compact or micro_batches)(
            placed.batch,
            placed.advantages,
            placed.selection,
            loss_inputs=placed.loss_inputs,
            size=size,
        )
    if compact is None:
        calls = [math.ceil(n / (size or n)) if n else 0 for n in placed.rows_of]
    else:
        made = list(made)  # all of them now: only then is their number known
        calls = [number for (number,) in ranks.say(len(made))]
    return iter(made), calls[ranks.rank], max(calls)


def filler(
    local: LocalRows, screened: Tensor, chosen: Selection, compact: Compact | None
) -> MicroBatch:
    """Return a micro-batch of one row of which nothing is kept: its gradient is exactly zero.

    Args:
        local: rows to take it from; at least one.
        screened: [n] or [n, T] log-probs of those rows.
        chosen: what was kept of this rank's rows; for its dtypes.
        compact: as for the rows that are trained.
    """
    row = tokens.cheapest_row(local.batch)
    index = slice(row, row + 1)
    batch, advantages, loss_inputs = rows.take(
        (local.batch, local.advantages, local.loss_inputs), index
    )
    nothing = torch.zeros_like(screened[index], dtype=torch.bool)
    weight = chosen.weight.new_zeros(nothing.shape)
    if compact is None:
        return MicroBatch(batch, advantages, loss_inputs, nothing, weight, 0, 0)
    # A compaction lays out kept elements: it is shown one, which is then not kept after all.
    one = tokens.one_element(batch, nothing)
    only = torch.zeros(1, dtype=torch.int64, device=one.device)
    selection = chosen._replace(mask=one, weight=weight, keep=one, rows=only)
    (micro,) = compact(batch, advantages, selection, loss_inputs=loss_inputs, size=1)
    keep, weight = torch.zeros_like(micro.keep), torch.zeros_like(micro.weight)
    return micro._replace(keep=keep, weight=weight, num_rows=0, num_tokens=0)


def in_step(
    micros: Iterator[MicroBatch],
    calls: int,
    fill: Callable[[], MicroBatch],
    gradients: Gradients,
) -> Generator[MicroBatch]:
    """Yield exactly `calls` micro-batches, each while `gradients` holds for its call."""
    for number in range(calls):
        micro = next(micros, None)
        with gradients.call(last=number == calls - 1):
            yield fill() if micro is None else micro
