"""Options of TRL that cannot be right together with a gate, each with its reason."""

from typing import Any

import kondo


def check_trainer(trainer: Any) -> None:
    """Raise ValueError for the first option of a built trainer that does not fit a gate."""
    check_gate(trainer.gate, trainer.args)
    for why, broken in (_contradictions(trainer) | _token_contradictions(trainer.args)).items():
        if broken:
            raise ValueError(
                f"{why} kondo_rate=1.0 without delight_eta leaves TRL's trainer as it is."
            )


def check_gate(gate: Any, args: Any) -> None:
    """Raise ValueError for a gate that does not fit the options; `trainer.gate` may be replaced."""
    if isinstance(gate, kondo.UnbiasedGate) and args.entropy_coef != 0.0:
        raise ValueError(
            f"entropy_coef must be 0.0 with kondo_by='unbiased' or another {gate!r}, got "
            f"{args.entropy_coef}: completions without an advantage are never drawn, so that their "
            f"entropy would be missing from the mean gradient."
        )


def _contradictions(trainer: Any) -> dict[str, bool]:
    """Return why an option does not fit -> whether it is in use."""
    args = trainer.args
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    no_log_probs = not trainer.use_vllm and trainer.rollout_func is None
    return {
        f"one of steps_per_generation ({steps}) and gradient_accumulation_steps "
        f"({accumulated}) must divide the other: rows are regrouped within an optimizer step, "
        f"which otherwise begins in one generation batch and ends in the next.": (
            steps % accumulated != 0 and accumulated % steps != 0
        ),
        "vision-language models do not fit a gate: pixel values are not one row per "
        "completion, so they cannot be regrouped with the rows.": trainer._is_vlm,
        "router_aux_loss_coef must be 0.0: the load of the experts must be balanced over all "
        "tokens, and skipped ones never reach the router.": trainer.aux_loss_enabled,
        "top_entropy_quantile must be 1.0: its threshold needs the entropy of every token, "
        "and skipped ones have no forward. kondo_unit='token' selects tokens instead.": (
            args.top_entropy_quantile < 1.0
        ),
        "use_adaptive_entropy must be False: its controller measures the entropy of every "
        "token, and skipped ones have no forward. A fixed entropy_coef acts on trained "
        "tokens.": args.use_adaptive_entropy,
        "fp16 must be False: a step that keeps nothing has no gradients for the loss scaler "
        "to check. Use bf16.": args.fp16,
        "DeepSpeed does not fit a gate: it steps the optimizer inside its own backward, so a "
        "step that keeps nothing could not be left out. Use DDP or FSDP.": (
            trainer.is_deepspeed_enabled
        ),
        "kondo_screen='rollout' needs a sampler that returns log-probs: use_vllm=True or a "
        "rollout_func; generation with transformers returns none. Use 'auto' or 'exact'.": (
            args.kondo_screen == "rollout" and no_log_probs
        ),
    }


def _token_contradictions(args: Any) -> dict[str, bool]:
    sequence_ratio = args.importance_sampling_level == "sequence"
    needs = {
        "importance_sampling_level='sequence': its ratio": sequence_ratio,
        "loss_type='vespo': its sequence weight": args.loss_type == "vespo",
        "off_policy_mask_threshold: its mean KL": args.off_policy_mask_threshold is not None,
    }
    token = args.kondo_unit == "token"
    whole_row = "needs the log-probs of a row's every token, and skipped ones have none."
    return {f"kondo_unit='token' with {what} {whole_row}": token and needs[what] for what in needs}
