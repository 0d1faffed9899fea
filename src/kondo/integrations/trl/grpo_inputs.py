"""TRL's inputs: dicts of tensors with one row per completion, and a few of 0 dimensions.

n rows of a generation batch, b of a micro-step, T completion tokens. Ours among them: `kondo_keep`,
bool [n, T]; `kondo_weight`, [n, T], factor of a token's gradient; `kondo_part`, a `Part`;
`kondo_counted`, [n], the tokens that count in the micro-step that TRL put a row into;
`kondo_seen`, the micro-step's tokens before rows were moved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kondo.integrations.trl.micro_steps import order_rows, part_of, widths_of
from kondo.lm.rows import TokenRows

OPTIONAL_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the completion tokens that TRL's loss counts: bool [n, T]."""
    mask = inputs["completion_mask"]
    counted: Tensor = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    return counted.bool()


def token_rows(inputs: dict[str, Any]) -> TokenRows:
    """Return prompts and completions as rows of tokens, which gates can be bound to."""
    prompts = inputs["prompt_ids"], inputs["prompt_mask"]
    return TokenRows.join(*prompts, inputs["completion_ids"], loss_mask(inputs))


def rows_to_try(inputs: dict[str, Any], *, halves: bool) -> TokenRows:
    """Return rows for `kondo.check`: each has a token that counts, also where TRL masks all.

    Args:
        inputs: TRL's.
        halves: whether completions are cut to half of their columns.
    """
    ids, mask = inputs["completion_ids"], loss_mask(inputs)
    columns = -(-ids.shape[1] // 2) if halves else ids.shape[1]
    mask = mask[:, :columns].clone()
    mask[:, 0] |= ~mask.any(dim=1)
    return TokenRows.join(inputs["prompt_ids"], inputs["prompt_mask"], ids[:, :columns], mask)


def gated_inputs(
    output: dict[str, Any], keep: Tensor, weight: Tensor, factor: Tensor, *, unit: str
) -> dict[str, Tensor]:
    """Return what replaces TRL's inputs: skipped tokens have advantage, log-ratio and KL 0.

    `keep` is bool [n, T]; `weight`, [n, T], the factor of all gradients of a token, 0 where not
    kept; `factor`, [n, T], that of the advantage alone. Unit "sequence" leaves one advantage per
    row, "token" makes it one per token.
    """
    advantages, factor = output["advantages"], factor * keep
    if unit == "token":
        advantages = advantages.unsqueeze(1) * factor
    else:
        advantages = advantages * factor.amax(dim=1)  # one per row, 0 where it is skipped
    changed = {"advantages": advantages, "kondo_keep": keep, "kondo_weight": weight}
    for name in OPTIONAL_LOG_PROBS:
        if name in output:
            changed[name] = torch.where(keep, output[name], 0.0)
    return changed


def joined(slices: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the micro-steps' rows in one batch; 0-d tensors are the same in all."""
    first = slices[0]
    return {
        name: torch.cat([part[name] for part in slices]) if first[name].ndim else first[name]
        for name in first
    }


def planned(
    batch: dict[str, Tensor], active: Sequence[int], *, steps: int, size: int
) -> list[dict[str, Any]]:
    """Return micro-steps of `size` rows each, kept rows in the last ones of each optimizer step.

    An optimizer step has `steps` micro-steps, of which as many run as `active` says for it.
    """
    widths, block = widths_of(batch["kondo_keep"]), steps * size
    lengths = batch["completion_mask"].sum(dim=1).tolist()
    order: list[int] = []
    for start, count in zip(range(0, len(widths), block), active, strict=True):
        rows = order_rows(widths[start : start + block], steps=steps, active=count)
        order += [start + row for row in rows]
    slices: list[dict[str, Any]] = []
    for number in range(len(order) // size):
        rows = order[number * size : (number + 1) * size]
        index = torch.tensor(rows, device=batch["kondo_keep"].device)
        slices.append({name: v[index] if v.ndim else v for name, v in batch.items()})
        slices[-1]["kondo_part"] = part_of(
            [widths[row] for row in rows],
            [lengths[row] for row in rows],
            idle=number % steps < steps - active[number // steps],
        )
    return slices
