"""Deal the kept rows of all processes out evenly, so that none waits for another.

Only kept rows travel. A process that gives more than it gets keeps a skipped copy, and one that
gets more than it gives drops a skipped row of its own: each goes on holding as many rows as
before, and skipped rows matter to a loss by their number alone. (Not to `bnpo`, nor to an entropy
bonus, which divide by the tokens at hand: see `KondoGRPOTrainer`.)
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

# What TRL pads on the right, to the longest completion of the process; prompts it pads on the left.
_PER_TOKEN = (
    "advantages",
    "completion_ids",
    "completion_mask",
    "importance_sampling_ratio",
    "kondo_keep",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "tool_mask",
)
# What is 0 in a skipped row.
_ZEROED = (
    "advantages",
    "kondo_keep",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)

Place = tuple[int, int]


def deal(widths: Sequence[Sequence[int]]) -> list[list[Place]]:
    """Return the kept rows each process trains, as (process, row): by width, dealt in turn.

    Args:
        widths: per process and row, completion tokens up to the last kept one; 0 for a skipped row.

    Example:
        >>> deal([[3, 0, 5, 4], [0, 0, 0, 0]])
        [[(0, 0), (0, 2)], [(0, 3)]]
    """
    kept = sorted(
        (width, process, row)
        for process, own in enumerate(widths)
        for row, width in enumerate(own)
        if width
    )
    hands: list[list[Place]] = [[] for _ in widths]
    for number, (_, process, row) in enumerate(kept):
        hands[number % len(widths)].append((process, row))
    return hands


def exchange(
    batch: dict[str, Tensor],
    widths: Sequence[Sequence[int]],
    *,
    block: int,
    process: int,
    gather: Callable[[Tensor], Tensor],
    per_row: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return this process's rows after dealing, within each block of rows.

    Args:
        batch: TRL's inputs, [n, ...] each; 0-d ones pass through.
        widths: as for `deal`, of all processes and all n rows.
        block: rows of one optimizer step; rows of different ones are not mixed.
        process: this process's index.
        gather: [m, ...] of every process -> all, one after another; every process calls it alike.
        per_row: names of [n, 1] tensors with one value per row, which are not padded.
    """
    sent = [[row for row, width in enumerate(own) if width] for own in widths]
    most = max(len(rows) for rows in sent)
    if most == 0:
        return batch
    device = batch["kondo_keep"].device
    padded = _common_width(batch, gather, per_row)
    # Gathering needs as many rows from each: who has fewer repeats row 0.
    mine = torch.tensor(sent[process] + [0] * (most - len(sent[process])), device=device)
    source, target = [], []
    for start in range(0, len(widths[process]), block):
        hand = deal([own[start : start + block] for own in widths])[process]
        for slot, (giver, row) in zip(_slots(widths[process], start, block), hand, strict=False):
            source.append(giver * most + sent[giver].index(start + row))
            target.append(slot)
    given = torch.tensor(sent[process], dtype=torch.long, device=device)
    to, of = torch.tensor(target, dtype=torch.long), torch.tensor(source, dtype=torch.long)
    result = dict(padded)
    for name, values in padded.items():
        if values.ndim:
            pool = gather(values[mine])
            own = values.index_fill(0, given, 0) if name in _ZEROED else values
            result[name] = own.index_copy(0, to.to(device), pool[of.to(device)])
    return result


def _slots(widths: Sequence[int], start: int, block: int) -> list[int]:
    """Return the places of a block, those of kept rows first."""
    return sorted(range(start, min(start + block, len(widths))), key=lambda row: widths[row] == 0)


def _common_width(
    batch: dict[str, Tensor], gather: Callable[[Tensor], Tensor], per_row: Collection[str]
) -> dict[str, Tensor]:
    """Pad prompts and completions to the widest of all processes."""
    prompt, completion = (batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
    own = torch.tensor([[prompt, completion]], device=batch["prompt_ids"].device)
    widest_prompt, widest_completion = gather(own).amax(dim=0).tolist()
    left, right = (widest_prompt - prompt, 0), (0, widest_completion - completion)

    def pad(name: str, values: Tensor) -> Tensor:
        if name in ("prompt_ids", "prompt_mask"):
            return torch.nn.functional.pad(values, left)
        if name in _PER_TOKEN and name not in per_row and values.ndim == 2:
            return torch.nn.functional.pad(values, right)
        return values

    return {name: pad(name, values) for name, values in batch.items()}
