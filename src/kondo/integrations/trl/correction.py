"""Sequence ratios in TRL's loss, in the place of its clipped ratios of tokens.

    weight of a completion = min(product over its tokens of pi / mu, cap),  not differentiated
    loss of a token        = -weight * A * log pi,  with TRL's denominators

mu is the policy that sampled: by the sampler's log-probs (vLLM or a `rollout_func`), else by the
old ones that TRL computes where a generation batch serves several optimizer steps. So one weight
corrects both stale and mismatched samples. TRL's own loss is computed at a ratio of 1, with weight
* A as its advantage: -min(r A, clip(r) A) then has the gradient -A grad log pi.
"""

from typing import Any

import torch
from torch import Tensor

import kondo
from kondo.integrations.trl.selection import loss_mask


def at_ratio_one(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return inputs for which TRL's loss has a ratio of 1, and the sampler's log-probs, [b, T]."""
    names = ("sampling_per_token_logps", "old_per_token_logps")
    found = [inputs[name] for name in names if name in inputs]
    if not found:
        raise ValueError(
            "kondo_correction='sequence' needs the log-probs of the policy that sampled, and this "
            "rollout returned none; return them as 'logprobs' of rollout_func, or leave "
            "kondo_correction out."
        )
    # Without old log-probs TRL takes the new ones, detached.
    rest = {name: value for name, value in inputs.items() if name != "old_per_token_logps"}
    return rest, found[0]


def weighted_advantages(
    log_probs: Tensor, behaviour: Tensor, inputs: dict[str, Any], cap: float
) -> Tensor:
    """Return the advantages times the weight of each completion, [b, T].

    Args:
        log_probs: [b, T] float, of the policy; not differentiated here.
        behaviour: [b, T] float, of the policy that sampled; NaN where vLLM could not score a token,
            whose ratio is 1 as in TRL's own correction.
        inputs: TRL's.
        cap: of the weight.
    """
    ours = log_probs.detach()
    ours = ours if ours.dtype == torch.float64 else ours.float()
    theirs = torch.where(behaviour.isnan(), ours, behaviour)
    rows = torch.arange(len(ours), device=ours.device).unsqueeze(1)
    index = torch.where(loss_mask(inputs), rows, -1)
    ratio = kondo.ratios.sequence_ratio(ours, theirs, index, max_weight=cap)
    advantages: Tensor = inputs["advantages"]
    return kondo.ratios.weighted(
        ratio, advantages if advantages.ndim == 2 else advantages.unsqueeze(1)
    )
