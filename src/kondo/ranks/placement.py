"""Which rows this rank has, trains, or runs only to keep step with the others."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo import rows
from kondo.engine.compact import MicroBatch
from kondo.engine.differentiate import micro_batches_of
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.selection import KeptRows
from kondo.ranks.communicator import Ranks
from kondo.ranks.gradients import Gradients
from kondo.ranks.rebalance import deal, move


class Placed(NamedTuple):
    """The kept rows this rank trains."""

    batch: Any
    advantages: Tensor
    loss_inputs: dict[str, Tensor]
    kept: KeptRows
    rows_of: list[int]
    """Rows that each rank trains."""
    rows_moved: int
    """Rows that changed rank, over all ranks."""
    bytes_moved: int
    """Bytes of those rows, over all ranks."""


def with_a_row(ranks: Ranks, local: Rows, sizes: Sequence[int]) -> Rows:
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
    return local if local.size else Rows(*moved.nest)


def place(ranks: Ranks, inputs: Inputs, kept: KeptRows, num_kept: Sequence[int]) -> Placed:
    """Assign the kept rows to ranks, and move those that are assigned elsewhere.

    Args:
        ranks: the group.
        inputs: this rank's.
        kept: what was kept of its rows.
        num_kept: kept rows of every rank.
    """
    local = inputs.rows
    unmoved = Placed(local.batch, local.advantages, local.loss_inputs, kept, list(num_kept), 0, 0)
    if not inputs.options.rebalance:
        return unmoved
    costs = ranks.gather(inputs.policy.row_costs(local.batch, kept), num_kept)
    targets = deal(costs)
    rows_of = [sum(int((own == rank).sum()) for own in targets) for rank in range(ranks.size)]
    num_moved = sum(int((own != rank).sum()) for rank, own in enumerate(targets))
    if num_moved == 0:
        return unmoved
    given = (local.batch, local.advantages, local.loss_inputs)
    going = rows.take((*given, kept.mask, kept.weight, kept.keep), kept.rows)
    moved = move(ranks, going, targets)
    batch, advantages, loss_inputs, mask, weight, keep = moved.nest
    everything = torch.arange(moved.num_rows, device=keep.device)
    # What the host knew of the rows is about those before the move.
    here = kept._replace(mask=mask, weight=weight, keep=keep, rows=everything, host_rows=None)
    return Placed(batch, advantages, loss_inputs, here, rows_of, num_moved, moved.num_bytes)


def planned(ranks: Ranks, inputs: Inputs, placed: Placed) -> tuple[Iterator[MicroBatch], int, int]:
    """Return this rank's micro-batches, their number, and the most that any rank has."""
    compact, size = inputs.options.compact, inputs.micro_batch
    made = micro_batches_of(
        inputs, placed.batch, placed.advantages, placed.loss_inputs, placed.kept
    )
    if compact is None and inputs.policy.plain:
        calls = [math.ceil(n / (size or n)) if n else 0 for n in placed.rows_of]
    else:
        made = list(made)  # all of them now: only then is their number known
        calls = [number for (number,) in ranks.say(len(made))]
    return iter(made), calls[ranks.rank], max(calls)


def filler(inputs: Inputs, kept: KeptRows) -> MicroBatch:
    """Return a micro-batch of one row of which nothing is kept: its gradient is exactly zero.

    Args:
        inputs: this rank's.
        kept: what was kept of this rank's rows; for its shapes.
    """
    spare = inputs.spare
    assert spare is not None
    policy, compact = inputs.policy, inputs.options.compact
    row = policy.cheapest_row(spare.batch)
    batch, advantages, loss_inputs = rows.take(
        (spare.batch, spare.advantages, spare.loss_inputs), slice(row, row + 1)
    )
    if compact is None and policy.plain:
        return MicroBatch(batch, advantages, loss_inputs, None, None, 0, 0, filler=True)
    # A compaction lays out kept elements: it is shown one, which is then not kept after all.
    width = kept.keep.shape[1:]
    shape = width if spare.mask is None or spare.mask.ndim == 1 else spare.mask.shape[1:]
    nothing = torch.zeros(1, *shape, dtype=torch.bool, device=kept.keep.device)
    one = policy.one_element(batch, nothing)
    only = torch.zeros(1, dtype=torch.int64, device=one.device)
    this = kept._replace(mask=one, weight=None, keep=one, rows=only, host_rows=None)
    (micro,) = (compact or policy.compact)(batch, advantages, this, loss_inputs=loss_inputs, size=1)
    return micro._replace(keep=None, weight=None, num_rows=0, num_tokens=0, filler=True)


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
