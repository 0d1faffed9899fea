"""Which rank trains which kept row in which optimizer step. Imports no verl.

    kept rows, verl's mini-batches -> deal to ranks -> steps of equal size on every rank

A mini-batch here has the kept rows of verl's mini-batch of the same number. One that kept nothing
has no step. All ranks run the same number of micro-batches: a rank with too few rows repeats its
shortest one with weight zero, a filler.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Step(NamedTuple):
    """One optimizer step. Rows are numbered within a rank's part of the plan."""

    rows: list[list[int]]
    """Per rank; all of the same length."""
    weights: list[list[float]]
    """Per rank, of each row; 0 for fillers."""
    micro_batch: int | None
    """Rows of a micro-batch; None where verl cuts them by tokens."""
    num_tokens: int
    """Tokens that count in the whole mini-batch, skipped rows included."""


class Plan(NamedTuple):
    """One update of the actor."""

    ranks: list[list[int]]
    """Per rank, rows of the batch that it is sent; all of the same length."""
    steps: list[Step]
    empty_steps: int
    """Mini-batches that kept nothing."""

    @property
    def rows(self) -> list[int]:
        """Rows of the batch that are sent, rank after rank."""
        return [row for own in self.ranks for row in own]

    @property
    def fillers(self) -> int:
        """Rows that run with weight zero, over all steps and ranks."""
        return sum(own.count(0.0) for step in self.steps for own in step.weights)

    def trained(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return how many rows run, and the sum of their sizes: fillers and repeats included."""
        ran = [
            sizes[own[row]]
            for step in self.steps
            for own, rows in zip(self.ranks, step.rows, strict=True)
            for row in rows
        ]
        return len(ran), sum(ran)


def mini_batches(
    num_rows: int, *, size: int, ranks: int, epochs: int, seed: int | None = None
) -> list[list[Tensor]]:
    """Return the rows of verl's mini-batches, [epochs][mini-batches] of [size] int64.

    verl gives every rank a consecutive part of the batch, and cuts each part into pieces. With
    `seed`, every rank shuffles its part before each epoch, as torch's DataLoader does.

    Example:
        >>> mini_batches(8, size=4, ranks=2, epochs=1)
        [[tensor([0, 1, 4, 5]), tensor([2, 3, 6, 7])]]
    """
    part, piece = num_rows // ranks, size // ranks
    if num_rows % ranks or size % ranks or part % max(piece, 1):
        raise ValueError(
            f"the batch ({num_rows} rows) and ppo_mini_batch_size x rollout.n ({size}) must be "
            f"multiples of the data-parallel size ({ranks}), and the batch one of the mini-batch."
        )
    by_rank: list[list[list[Tensor]]] = []
    for rank in range(ranks):
        own = torch.arange(rank * part, (rank + 1) * part)
        if seed is None:
            by_rank.append([list(torch.split(own, piece))] * epochs)
            continue
        loader: DataLoader[Tensor] = DataLoader(
            own,  # type: ignore[arg-type]
            batch_size=piece,
            collate_fn=torch.stack,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed + rank),
        )
        by_rank.append([list(loader) for _ in range(epochs)])
    return [
        [torch.cat(pieces) for pieces in zip(*(own[epoch] for own in by_rank), strict=True)]
        for epoch in range(epochs)
    ]


def make_plan(
    keep: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    counted: Sequence[int],
    epochs: Sequence[Sequence[Tensor]],
    *,
    ranks: int,
    micro_batch: int | None,
) -> Plan:
    """Deal the kept rows to the ranks, and say what each optimizer step runs.

    Args:
        keep: [N] bool.
        weight: [N] float, of kept rows.
        sizes: tokens of each row, prompt included: what a forward pays for.
        counted: tokens of each row that verl's mean over tokens counts.
        epochs: mini-batches by `mini_batches`.
        ranks: data-parallel size.
        micro_batch: rows of a micro-batch of one rank; None where verl cuts them by tokens.

    Example:
        >>> import torch
        >>> keep = torch.tensor([True, False, True, True])
        >>> batches = mini_batches(4, size=4, ranks=2, epochs=1)
        >>> plan = make_plan(
        ...     keep, torch.ones(4), [3, 1, 5, 4], [2, 1, 4, 3], batches, ranks=2, micro_batch=1
        ... )
        >>> plan.ranks, plan.steps[0].rows, plan.steps[0].weights
        ([[2, 1], [3, 0]], [[0, 1], [0, 1]], [[1.0, 0.0], [1.0, 1.0]])
    """
    kept = [[batch[keep[batch]].tolist() for batch in epoch] for epoch in epochs]
    dealt = _deal(kept[0] if kept else [], sizes, ranks)
    most = max((len(own) for own in dealt), default=0)
    spare = sorted((~keep).nonzero().squeeze(1).tolist(), key=lambda row: sizes[row])
    for own in dealt:  # verl sends every rank the same number of rows
        while len(own) < most:
            own.append(spare.pop(0))
    place = {row: (rank, at) for rank, own in enumerate(dealt) for at, row in enumerate(own)}
    fillers = [_shortest(own, sizes) for own in dealt if most]
    pairs = _paired(epochs, kept)
    steps = []
    for batch, rows in pairs:
        if rows:
            parts, weights = _parts(rows, place, weight, sizes, ranks)
            micro = _fill(parts, weights, fillers, micro_batch)
            steps.append(Step(parts, weights, micro, sum(counted[row] for row in batch.tolist())))
    return Plan(dealt, steps, len(pairs) - len(steps))


def _parts(
    rows: Sequence[int],
    place: dict[int, tuple[int, int]],
    weight: Tensor,
    sizes: Sequence[int],
    ranks: int,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return each rank's rows of a step, the longest first, and their weights."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    weights: list[list[float]] = [[] for _ in range(ranks)]
    for row in sorted(rows, key=lambda row: sizes[row], reverse=True):
        rank, at = place[row]
        parts[rank].append(at)
        weights[rank].append(float(weight[row]))
    return parts, weights


def _fill(
    parts: Sequence[list[int]],
    weights: Sequence[list[float]],
    fillers: Sequence[int],
    micro_batch: int | None,
) -> int | None:
    """Add fillers until all ranks have as many rows; return the rows of a micro-batch."""
    length, micro = _even(max(len(own) for own in parts), micro_batch)
    for own, given, filler in zip(parts, weights, fillers, strict=True):
        missing = length - len(own)
        own += [filler] * missing
        given += [0.0] * missing
    return micro


def _shortest(rows: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the place of the shortest row."""
    return min(range(len(rows)), key=lambda at: sizes[rows[at]])


def _paired(
    epochs: Sequence[Sequence[Tensor]], kept: Sequence[Sequence[list[int]]]
) -> list[tuple[Tensor, list[int]]]:
    """Return every mini-batch of every epoch with its kept rows, in order."""
    return [
        pair
        for batches, rows in zip(epochs, kept, strict=True)
        for pair in zip(batches, rows, strict=True)
    ]


def _deal(batches: Sequence[list[int]], sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank: of every mini-batch as many as of the others, or one more.

    The longest row goes first, to the rank with the fewest rows of its mini-batch, then the fewest
    of all, then the fewest tokens.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for rows in batches:
        here = [0] * ranks
        for row in sorted(rows, key=lambda row: sizes[row], reverse=True):
            load = [(here[rank], len(dealt[rank]), tokens[rank], rank) for rank in range(ranks)]
            rank = min(load)[-1]
            dealt[rank].append(row)
            here[rank] += 1
            tokens[rank] += sizes[row]
    return dealt


def _even(rows: int, micro_batch: int | None) -> tuple[int, int | None]:
    """Return how many rows, fillers included, fill micro-batches of which size.

    As few micro-batches as verl's size allows, and as small as they then can be.
    """
    if micro_batch is None:
        return rows, None
    calls = math.ceil(rows / micro_batch)
    size = math.ceil(rows / calls)
    return calls * size, size
