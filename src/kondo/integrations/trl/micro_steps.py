"""Which row is trained in which micro-step. Lists and tensors in and out; TRL is not needed.

A generation batch has b rows per micro-step. The plan moves rows between the micro-steps of one
optimizer step, on their own process, so that the kept ones fill the last few:

    micro-step   0       1       2       3
    before     k....   ..k..   .....   k.k..      k: kept  .: skipped
    after      .....   .....   .....   kkkk.      0 to 2 are idle: no forward, no backward

Every micro-step keeps its b rows, so that each denominator of the loss is the full batch's.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process runs in one micro-step."""

    rows: list[int]  # rows of the micro-step that enter the forward: the kept ones, or one filler
    width: int  # completion tokens of those rows that enter it; nothing is kept after them
    idle: bool  # no process has a kept row in this micro-step: nothing runs


def steps_needed(num_kept: int, rows_per_step: int) -> int:
    """Return the micro-steps that a process needs for its kept rows."""
    return math.ceil(num_kept / rows_per_step)


def order_rows(widths: Sequence[int], *, steps: int, active: int) -> list[int]:
    """Return the order of the rows of one optimizer step: kept rows last, by width.

    A width is a row's completion tokens up to its last kept one; 0 for a skipped row. The rows are
    split into `steps` micro-steps of equal size. Kept rows are dealt evenly to the last `active`
    ones, those of similar width together, which wastes the least padding.

    Example:
        >>> order_rows([5, 0, 0, 0, 3, 0, 0, 4, 0], steps=3, active=2)
        [1, 2, 3, 4, 5, 6, 7, 0, 8]
    """
    size = len(widths) // steps
    kept = sorted((row for row, width in enumerate(widths) if width), key=lambda row: widths[row])
    skipped = iter([row for row, width in enumerate(widths) if not width])
    order: list[int] = []
    for step in range(steps):
        rank = step - (steps - active)
        share = kept[_cut(rank, kept, active) : _cut(rank + 1, kept, active)] if rank >= 0 else []
        order += share
        order += [next(skipped) for _ in range(size - len(share))]
    return order


def _cut(rank: int, kept: Sequence[int], active: int) -> int:
    """Return where the share of the active micro-step `rank` begins."""
    larger = len(kept) % active  # the last micro-steps take one row more
    return rank * (len(kept) // active) + max(0, rank - (active - larger))


def part_of(widths: Sequence[int], lengths: Sequence[int], *, idle: bool) -> Part:
    """Return what a process runs in a micro-step with rows of these widths; see `order_rows`.

    `lengths` counts all completion tokens of each row. Idle: no process has a kept row here.

    Example:
        >>> part_of([0, 2, 0, 3], [4, 4, 4, 4], idle=False)
        Part(rows=[1, 3], width=3, idle=False)
        >>> part_of([0, 0], [4, 2], idle=False)  # a filler, so that every process makes the call
        Part(rows=[1], width=1, idle=False)
    """
    rows = [row for row, width in enumerate(widths) if width]
    if rows:
        return Part(rows=rows, width=max(widths), idle=idle)
    shortest = min(range(len(lengths)), key=lambda row: lengths[row])
    return Part(rows=[shortest], width=1, idle=idle)


def widths_of(keep: Tensor) -> list[int]:
    """Return each row's tokens up to its last kept one, 0 where none is: bool [n, T] -> n."""
    after = torch.arange(1, keep.shape[1] + 1, device=keep.device)
    return [int(width) for width in (keep * after).amax(dim=1).tolist()]
