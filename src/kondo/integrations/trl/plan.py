"""Plan: which process trains which kept row, and in which micro-step.

A generation batch has b rows per micro-step. Kept rows are dealt evenly to the processes, so that
none waits for another, then moved between the micro-steps of one optimizer step, so that they fill
the last few:

    micro-step   0       1       2       3
    before     k....   ..k..   .....   k.k..      k: kept  .: skipped
    after      .....   .....   .....   kkkk.      0 to 2 are idle: no forward, no backward

Every micro-step keeps its b rows, so that each denominator of the loss is the full batch's. Only
kept rows travel: a process that gives more than it gets keeps a skipped copy, and one that gets
more than it gives drops a skipped row of its own, since skipped rows matter to a loss by their
number alone. (`bnpo` and an entropy bonus divide by the tokens of a micro-step. `KondoGRPOTrainer`
makes up for the ones that moved.)
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

import kondo
from kondo.integrations.trl.gated_trainer import WHOLE_MODELS
from kondo.integrations.trl.selection import OPTIONAL_LOG_PROBS, loss_mask
from kondo.ranks.communicator import Ranks
from kondo.ranks.rebalance import move

# What is 0 in a skipped row.
_ZEROED = ("advantages", "kondo_keep", "kondo_weight", *OPTIONAL_LOG_PROBS)
# What TRL pads on the right, to the longest completion of the process; prompts it pads on the left.
_PER_TOKEN = (
    *(*_ZEROED, "completion_ids", "completion_mask"),
    *("importance_sampling_ratio", "tool_mask"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process runs in one micro-step."""

    rows: list[int]  # rows of the micro-step that enter the forward: the kept ones, or one filler
    width: int  # completion tokens of those rows that enter it; nothing is kept after them
    idle: bool  # no process has a kept row in this micro-step: nothing runs


def plan(trainer: Any, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move rows between the micro-steps of each optimizer step, and say what each one runs.

    Adds to TRL's inputs of a micro-step `kondo_part`, a `Part`; `kondo_counted`, [b], the tokens
    that count in the micro-step that TRL put a row into; and `kondo_seen`, those of the micro-step
    before rows moved, prompts included.

    Args:
        trainer: a `KondoGRPOTrainer`.
        slices: TRL's inputs of every micro-step of a generation batch.
    """
    accelerator, first = trainer.accelerator, slices[0]
    steps = min(trainer.args.gradient_accumulation_steps, len(slices))
    size = first["kondo_keep"].shape[0]
    block = steps * size
    # 0-d tensors are the same in all.
    batch = {
        name: torch.cat([part[name] for part in slices]) if first[name].ndim else first[name]
        for name in first
    }
    counted = [loss_mask(part).sum().expand(size) for part in slices]
    batch["kondo_counted"] = torch.cat(counted)
    mine = torch.tensor(widths_of(batch["kondo_keep"]), device=accelerator.device)
    widths = accelerator.gather(mine).view(-1, mine.numel()).tolist()
    # TRL counts absolute positions from the left padding, and processes pad differently.
    text_config = trainer.model.config.get_text_config()
    relative = getattr(text_config, "rope_parameters", None) is not None
    deals = accelerator.num_processes > 1 and relative
    if deals:
        by_row = trainer.use_vllm and trainer.vllm_importance_sampling_mode.startswith("sequence")
        per_row = ("importance_sampling_ratio",) if by_row else ()
        batch = exchange(batch, widths, block=block, ranks=Ranks(), per_row=per_row)
    own, lengths = widths_of(batch["kondo_keep"]), batch["completion_mask"].sum(dim=1).tolist()
    result: list[dict[str, Any]] = []
    for start in range(0, len(own), block):
        kept = [sum(width > 0 for width in each[start : start + block]) for each in widths]
        most = math.ceil(sum(kept) / len(kept)) if deals else max(kept)
        whole = accelerator.distributed_type.value in WHOLE_MODELS
        active = math.ceil(most / size) if whole or not most else steps
        order = order_rows(own[start : start + block], steps=steps, active=active)
        for step in range(steps):
            rows = [start + row for row in order[step * size : (step + 1) * size]]
            index = torch.tensor(rows, device=batch["kondo_keep"].device)
            part = {name: v[index] if v.ndim else v for name, v in batch.items()}
            part["kondo_part"] = part_of(
                [own[row] for row in rows],
                [lengths[row] for row in rows],
                idle=step < steps - active,
            )
            before = slices[len(result)]
            part["kondo_seen"] = before["prompt_mask"].sum() + before["completion_mask"].sum()
            result.append(part)
    return result


def widths_of(keep: Tensor) -> list[int]:
    """Return each row's tokens up to its last kept one, 0 where none is: bool [n, T] -> n."""
    after = torch.arange(1, keep.shape[1] + 1, device=keep.device)
    return [int(width) for width in (keep * after).amax(dim=1).tolist()]


def order_rows(widths: Sequence[int], *, steps: int, active: int) -> list[int]:
    """Return the order of the rows of one optimizer step: kept rows last, by width.

    The rows are split into `steps` micro-steps of equal size. Kept rows are dealt evenly to the
    last `active` ones, those of similar width together, which wastes the least padding.

    Example:
        >>> order_rows([5, 0, 0, 0, 3, 0, 0, 4, 0], steps=3, active=2)
        [1, 2, 3, 4, 5, 6, 7, 0, 8]
    """
    size = len(widths) // steps
    kept = sorted((row for row, width in enumerate(widths) if width), key=lambda row: widths[row])
    skipped = iter([row for row, width in enumerate(widths) if not width])
    order: list[int] = []
    for step in range(steps):
        left = steps - step  # micro-steps, this one included; the last ones take one row more
        number = len(kept) // left if left <= active else 0
        share, kept = kept[:number], kept[number:]
        order += share
        order += [next(skipped) for _ in range(size - number)]
    return order


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
    those of `in_turn`. Every process calls. `per_row` names [n, 1] tensors, which are not padded.
    """
    if not any(map(any, widths)):
        return batch
    device, mine = batch["kondo_keep"].device, widths[ranks.rank]
    # To the widest of all processes.
    prompt, completion = (batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
    own = torch.tensor([prompt, completion], device=device)
    widest = torch.stack(ranks.gather(own, [2] * ranks.size)).amax(dim=0).tolist()
    left, right = (widest[0] - prompt, 0), (0, widest[1] - completion)
    padded = dict(batch)
    for name, values in batch.items():
        if name in ("prompt_ids", "prompt_mask"):
            padded[name] = torch.nn.functional.pad(values, left)
        elif name in _PER_TOKEN and name not in per_row and values.ndim == 2:
            padded[name] = torch.nn.functional.pad(values, right)
    with_rows = {name: values for name, values in padded.items() if values.ndim}
    given = torch.tensor(_kept(mine), dtype=torch.int64, device=device)
    targets = in_turn(widths, block=block)
    moved = move(ranks, kondo.rows.take(with_rows, given), targets).nest
    # Rows arrive in the order of the processes they come from, each in the order of its own.
    taken = [
        row // block
        for kept_there, to in zip(widths, targets, strict=True)
        for row, target in zip(_kept(kept_there), to.tolist(), strict=True)
        if target == ranks.rank
    ]
    # The places of each block, those of kept rows first.
    places = [range(start, min(start + block, len(mine))) for start in range(0, len(mine), block)]
    slots = [iter(sorted(rows, key=lambda row: mine[row] == 0)) for rows in places]
    index = torch.tensor([next(slots[which]) for which in taken], dtype=torch.int64, device=device)
    for name, values in with_rows.items():
        stays = values.index_fill(0, given, 0) if name in _ZEROED else values
        padded[name] = stays.index_copy(0, index, moved[name])
    return padded


def _kept(widths: Sequence[int]) -> list[int]:
    return [row for row, width in enumerate(widths) if width]
