"""Plan: which process trains which kept row, and in which micro-step.

Kept rows are dealt to the processes and gathered in the last micro-steps of each optimizer step.
"""

import math
from typing import Any

import torch

from kondo.integrations.trl.grpo_inputs import joined, loss_mask, planned
from kondo.integrations.trl.micro_steps import steps_needed, widths_of
from kondo.integrations.trl.row_exchange import exchange
from kondo.ranks.communicator import Ranks

WHOLE_MODELS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Accelerate's ways to run whole models on every process. A micro-step without a forward is known
to be safe there: gradients are synchronised by hooks of the last one. Elsewhere (FSDP) each has at
least a filler."""


def plan(trainer: Any, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move rows between the micro-steps of each optimizer step, and say what each one runs.

    Args:
        trainer: a `KondoGRPOTrainer`.
        slices: TRL's inputs of every micro-step of a generation batch.
    """
    accelerator = trainer.accelerator
    steps = min(trainer.args.gradient_accumulation_steps, len(slices))
    size = slices[0]["kondo_keep"].shape[0]
    block = steps * size
    counted = [loss_mask(part).sum().expand(size) for part in slices]
    batch = joined(slices) | {"kondo_counted": torch.cat(counted)}
    mine = torch.tensor(widths_of(batch["kondo_keep"]), device=accelerator.device)
    widths = accelerator.gather(mine).view(-1, mine.numel()).tolist()
    deals = accelerator.num_processes > 1 and _may_deal(trainer)
    if deals:
        by_row = trainer.use_vllm and trainer.vllm_importance_sampling_mode.startswith("sequence")
        per_row = ("importance_sampling_ratio",) if by_row else ()
        batch = exchange(batch, widths, block=block, ranks=Ranks(), per_row=per_row)
    active = []
    for start in range(0, mine.numel(), block):
        kept = [sum(width > 0 for width in own[start : start + block]) for own in widths]
        most = math.ceil(sum(kept) / len(kept)) if deals else max(kept)
        active.append(_active_steps(accelerator, most, size, steps))
    result = planned(batch, active, steps=steps, size=size)
    for part, before in zip(result, slices, strict=True):
        part["kondo_seen"] = before["prompt_mask"].sum() + before["completion_mask"].sum()
    return result


def _active_steps(accelerator: Any, most: int, size: int, steps: int) -> int:
    """Return how many micro-steps of an optimizer step run; the same on every process.

    `most`: kept rows of the process with the most.
    """
    if accelerator.distributed_type.value in WHOLE_MODELS:
        return steps_needed(most, size)
    return steps if most else 0


def _may_deal(trainer: Any) -> bool:
    """Return whether rows may change processes.

    Not where positions are absolute: TRL counts them from the left padding, and processes pad
    differently.
    """
    return getattr(trainer.model.config.get_text_config(), "rope_parameters", None) is not None
