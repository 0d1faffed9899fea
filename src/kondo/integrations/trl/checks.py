"""Options of TRL that cannot be right together with a gate, each with its reason."""

from typing import Any


def check_trainer(trainer: Any) -> None:
    """Raise ValueError for the first option of a built trainer that does not fit a gate."""
    for broken, why in _contradictions(trainer):
        if broken:
            raise ValueError(
                f"{why} kondo_rate=1.0 without delight_eta leaves TRL's trainer as it is."
            )


def _contradictions(trainer: Any) -> list[tuple[bool, str]]:
    args = trainer.args
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    return [
        (
            steps % accumulated != 0 and accumulated % steps != 0,
            f"one of steps_per_generation ({steps}) and gradient_accumulation_steps "
            f"({accumulated}) must divide the other: rows are regrouped within an optimizer step, "
            f"which otherwise begins in one generation batch and ends in the next.",
        ),
        (
            trainer._is_vlm,
            "vision-language models do not fit a gate: pixel values are not one row per "
            "completion, so they cannot be regrouped with the rows.",
        ),
        (
            trainer.aux_loss_enabled,
            "router_aux_loss_coef must be 0.0: the load of the experts must be balanced over all "
            "tokens, and skipped ones never reach the router.",
        ),
        (
            args.top_entropy_quantile < 1.0,
            "top_entropy_quantile must be 1.0: its threshold needs the entropy of every token, "
            "and skipped ones have no forward. kondo_unit='token' selects tokens instead.",
        ),
        (
            args.use_adaptive_entropy,
            "use_adaptive_entropy must be False: its controller measures the entropy of every "
            "token, and skipped ones have no forward. A fixed entropy_coef acts on trained tokens.",
        ),
        (
            args.fp16,
            "fp16 must be False: a step that keeps nothing has no gradients for the loss scaler "
            "to check. Use bf16.",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed does not fit a gate: it steps the optimizer inside its own backward, so a "
            "step that keeps nothing could not be left out. Use DDP or FSDP.",
        ),
        (
            args.kondo_screen == "rollout"
            and not trainer.use_vllm
            and trainer.rollout_func is None,
            "kondo_screen='rollout' needs a sampler that returns log-probs: use_vllm=True or a "
            "rollout_func; generation with transformers returns none. Use 'auto' or 'exact'.",
        ),
        *_token_contradictions(args),
    ]


def _token_contradictions(args: Any) -> list[tuple[bool, str]]:
    needs = {
        "importance_sampling_level='sequence': its ratio": (
            args.importance_sampling_level == "sequence"
        ),
        "loss_type='vespo': its sequence weight": args.loss_type == "vespo",
        "off_policy_mask_threshold: its mean KL": args.off_policy_mask_threshold is not None,
    }
    whole_row = "needs the log-probs of a row's every token, and skipped ones have none."
    return [
        (args.kondo_unit == "token" and used, f"kondo_unit='token' with {what} {whole_row}")
        for what, used in needs.items()
    ]
