"""Spread the kept rows of all processes evenly, so that none waits for another.

Only kept rows travel. A process that gives more than it gets keeps a skipped copy, and one that
gets more than it gives drops a skipped row of its own: each holds as many rows as before, and
skipped rows matter to a loss by their number alone. (`bnpo` and an entropy bonus divide by the
tokens of a micro-step. `KondoGRPOTrainer` makes up for the ones that moved.)
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kondo import rows
from kondo.integrations.trl.grpo_inputs import OPTIONAL_LOG_PROBS
from kondo.ranks.communicator import Ranks
from kondo.ranks.rebalance import move

# What is 0 in a skipped row.
_ZEROED = ("advantages", "kondo_keep", "kondo_weight", *OPTIONAL_LOG_PROBS)
# What TRL pads on the right, to the longest completion of the process; prompts it pads on the left.
_PER_TOKEN = (
    *(*_ZEROED, "completion_ids", "completion_mask"),
    *("importance_sampling_ratio", "tool_mask"),
)


def in_turn(widths: Sequence[Sequence[int]], *, block: int) -> list[Tensor]:
    """Return the process that trains each kept row: within a block, in turn by width.

    `kondo.ranks.rebalance.deal` evens out cost. Here the number of rows counts: a micro-step holds
    a fixed number of them, and all processes run as many micro-steps. A width is a row's completion
    tokens up to the last kept one, 0 for a skipped row; a block holds the rows of one optimizer
    step, and rows of different ones are not mixed. Returns, per process, int64: the destinations of
    its kept rows, in the order of the rows.

    Example:
        >>> in_turn([[3, 0, 5, 4], [0, 0, 0, 0]], block=4)
        [tensor([0, 0, 1]), tensor([], dtype=torch.int64)]
    """
    kept = sorted(
        (row // block, width, process, row)
        for process, own in enumerate(widths)
        for row, width in enumerate(own)
        if width
    )
    turn = {(process, row): number for number, (_, _, process, row) in enumerate(kept)}
    return [
        torch.tensor([turn[process, row] for row in _kept(own)], dtype=torch.int64) % len(widths)
        for process, own in enumerate(widths)
    ]


def exchange(
    batch: dict[str, Tensor],
    widths: Sequence[Sequence[int]],
    *,
    block: int,
    ranks: Ranks,
    per_row: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return this process's rows after kept rows have moved, within each block of rows.

    The batch holds TRL's inputs, [n, ...] each; 0-d ones pass through. `widths` and `block` are
    those of `in_turn`, of all processes and all n rows. Every process calls. `per_row` names [n, 1]
    tensors with one value per row, which are not padded.
    """
    if not any(map(any, widths)):
        return batch
    device, mine = batch["kondo_keep"].device, widths[ranks.rank]
    padded = _common_width(batch, ranks, per_row)
    with_rows = {name: values for name, values in padded.items() if values.ndim}
    given = torch.tensor(_kept(mine), dtype=torch.int64, device=device)
    targets = in_turn(widths, block=block)
    moved = move(ranks, rows.take(with_rows, given), targets).nest
    # Rows arrive in the order of the processes they come from, each in the order of its own.
    taken = [
        row // block
        for own, to in zip(widths, targets, strict=True)
        for row, target in zip(_kept(own), to.tolist(), strict=True)
        if target == ranks.rank
    ]
    slots = [iter(_slots(mine, start, block)) for start in range(0, len(mine), block)]
    index = torch.tensor([next(slots[which]) for which in taken], dtype=torch.int64, device=device)
    for name, values in with_rows.items():
        own = values.index_fill(0, given, 0) if name in _ZEROED else values
        padded[name] = own.index_copy(0, index, moved[name])
    return padded


def _kept(widths: Sequence[int]) -> list[int]:
    return [row for row, width in enumerate(widths) if width]


def _slots(widths: Sequence[int], start: int, block: int) -> list[int]:
    """Return the places of a block, those of kept rows first."""
    return sorted(range(start, min(start + block, len(widths))), key=lambda row: widths[row] == 0)


def _common_width(
    batch: dict[str, Tensor], ranks: Ranks, per_row: Collection[str]
) -> dict[str, Tensor]:
    """Pad prompts and completions to the widest of all processes."""
    prompt, completion = (batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
    own = torch.tensor([prompt, completion], device=batch["prompt_ids"].device)
    widest = torch.stack(ranks.gather(own, [2] * ranks.size)).amax(dim=0).tolist()
    left, right = (widest[0] - prompt, 0), (0, widest[1] - completion)

    def pad(name: str, values: Tensor) -> Tensor:
        if name in ("prompt_ids", "prompt_mask"):
            return torch.nn.functional.pad(values, left)
        if name in _PER_TOKEN and name not in per_row and values.ndim == 2:
            return torch.nn.functional.pad(values, right)
        return values

    return {name: pad(name, values) for name, values in batch.items()}
