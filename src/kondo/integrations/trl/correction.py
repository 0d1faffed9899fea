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
from kondo.integrations.trl.grpo_inputs import loss_mask

_SAMPLED_BY = ("sampling_per_token_logps", "old_per_token_logps")
_CLIP = "sequence ratios are capped, not clipped; kondo_correction_cap is the cap"
_REPLACED = "kondo_correction replaces vLLM's correction; kondo_correction_cap is the cap"

# Option -> what it may be with kondo_correction="sequence", and why.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": (("dapo", "grpo", "bnpo", "dr_grpo"), "the others have a rule for ratios"),
    "importance_sampling_level": (("token",), "'sequence' is GSPO's geometric mean, another ratio"),
    "kondo_unit": (("sequence",), "a ratio of a completion needs its every token"),
    "epsilon": ((0.2,), _CLIP),
    "epsilon_high": ((None,), _CLIP),
    "delta": ((None,), _CLIP),
    "off_policy_mask_threshold": ((None,), "it is another correction of the same"),
    "vllm_importance_sampling_mode": (("sequence_mask",), _REPLACED),
    "vllm_importance_sampling_clip_max": ((3.0,), _REPLACED),
    "vllm_importance_sampling_clip_min": ((None,), _REPLACED),
}


def check_options(args: Any) -> None:
    """Raise ValueError for options that contradict a correction, or have no effect beside it."""
    cap = args.kondo_correction_cap
    if not cap > 0:
        raise ValueError(f"kondo_correction_cap must be > 0, got {cap}.")
    if args.kondo_correction == "none":
        if cap != 2.0:
            raise ValueError(
                f"kondo_correction_cap must be 2.0 with kondo_correction='none', got {cap}: there "
                f"is nothing to cap. Set kondo_correction='sequence', or leave it out."
            )
        return
    for name, (allowed, why) in _ALLOWED.items():
        if getattr(args, name) not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))} with "
                f"kondo_correction='sequence', got {getattr(args, name)!r}: {why}."
            )
    if args.beta != 0.0 and args.use_bias_correction_kl:
        raise ValueError(
            f"use_bias_correction_kl must be False with kondo_correction='sequence' and beta = "
            f"{args.beta}, got True: it multiplies the KL by the token ratio, which is 1 here."
        )


def check_effect(trainer: Any) -> None:
    """Raise ValueError where every ratio would be 1."""
    args = trainer.args
    served = args.steps_per_generation * args.num_iterations
    stale = args.gradient_accumulation_steps % served != 0
    if not stale and not trainer.use_vllm and trainer.rollout_func is None:
        raise ValueError(
            f"kondo_correction='sequence' has no effect here: completions are sampled by the "
            f"policy that is trained, and num_iterations ({args.num_iterations}) and "
            f"steps_per_generation ({args.steps_per_generation}) use them for one optimizer step, "
            f"so every ratio is 1. Leave it out."
        )


def at_ratio_one(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return inputs for which TRL's loss has a ratio of 1, and the sampler's log-probs, [b, T]."""
    found = [inputs[name] for name in _SAMPLED_BY if name in inputs]
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
