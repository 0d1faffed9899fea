"""Which rank trains which kept row in which optimizer step, with which weight. Imports no verl.

    kept rows, verl's mini-batches -> deal to ranks -> steps of equal size on every rank

A mini-batch here has the kept rows of verl's mini-batch of the same number. One that kept nothing
has no step. All ranks run the same number of micro-batches: a rank with too few rows repeats its
shortest one with weight zero, a filler.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """
    part, piece = num_rows // ranks, size // ranks
    if num_rows % ranks or size % ranks or part % max(piece, 1):
        raise ValueError(
            f"the batch ({num_rows} rows) and ppo_mini_batch_size x rollout.n ({size}) must be "
            f"multiples of the data-parallel size ({ranks}), and the batch one of the mini-batch."
        )
    by_rank: list[list[list[Tensor]]] = []
    for rank in range(ranks):
        loader: DataLoader[Tensor] = DataLoader(
            torch.arange(rank * part, (rank + 1) * part),  # type: ignore[arg-type]
            batch_size=piece,
            collate_fn=torch.stack,
            shuffle=seed is not None,
            generator=torch.Generator().manual_seed((seed or 0) + rank),
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
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    place: dict[int, tuple[int, int]] = {}
    for batch in epochs[0]:
        # The longest row goes first, to the rank with the fewest rows of its mini-batch, then the
        # fewest of all, then the fewest tokens.
        here = [0] * ranks
        for row in _kept_of(batch, keep, sizes):
            rank = min(range(ranks), key=lambda own: (here[own], len(dealt[own]), tokens[own]))
            place[row] = rank, len(dealt[rank])
            dealt[rank].append(row)
            here[rank] += 1
            tokens[rank] += sizes[row]
    spare = sorted((~keep).nonzero().squeeze(1).tolist(), key=lambda row: sizes[row])
    for own in dealt:  # verl sends every rank the same number of rows
        while len(own) < max(map(len, dealt)):
            own.append(spare.pop(0))

    steps, empty_steps = [], 0
    for batch in itertools.chain.from_iterable(epochs):
        rows: list[list[int]] = [[] for _ in range(ranks)]
        weights: list[list[float]] = [[] for _ in range(ranks)]
        for row in _kept_of(batch, keep, sizes):
            rank, at = place[row]
            rows[rank].append(at)
            weights[rank].append(float(weight[row]))
        length, micro = max(map(len, rows)), micro_batch
        if length == 0:
            empty_steps += 1
            continue
        if micro_batch is not None:
            # As few micro-batches as verl's size allows, and as small as they then can be.
            calls = math.ceil(length / micro_batch)
            micro = math.ceil(length / calls)
            length = calls * micro
        for rank, own in enumerate(dealt):
            filler = min(range(len(own)), key=lambda at: sizes[own[at]])
            missing = length - len(rows[rank])
            rows[rank] += [filler] * missing
            weights[rank] += [0.0] * missing
        steps.append(Step(rows, weights, micro, sum(counted[row] for row in batch.tolist())))
    return Plan(dealt, steps, empty_steps)


def _kept_of(batch: Tensor, keep: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the kept rows of a mini-batch, the longest first."""
    return sorted(batch[keep[batch]].tolist(), key=lambda row: sizes[row], reverse=True)


def weigh_outputs(outputs: Mapping[str, Any], weight: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Return verl's model outputs, whose gradients are multiplied by the weights of their rows.

    Every term of verl's loss depends on the policy through log-probs and entropies of tokens. So a
    factor on their gradients weighs the policy loss, the KL and the entropy bonus alike. The loss's
    value stays as it is.

    Args:
        outputs: log-probs, and entropies if there are any, each [tokens of all rows], or jagged
            with one row per sequence.
        weight: [n] float.
        lengths: [n] int64, tokens of each row.
    """
    factor = weight.repeat_interleave(lengths)

    def scaled(grad: Tensor) -> Tensor:
        # Not a plain product: 0 times an infinite gradient of a filler is NaN.
        return torch.where(factor == 0, 0.0, grad * factor.to(grad.dtype))

    weighed = dict(outputs)
    for name in ("log_probs", "entropy"):
        output = weighed.get(name)
        if output is None:
            continue
        values = output.values() if output.is_nested else output
        values = values.view_as(values)
        if values.requires_grad:
            values.register_hook(scaled)
        if output.is_nested:
            values = torch.nested.nested_tensor_from_jagged(values, offsets=output.offsets())
        weighed[name] = values
    return weighed
