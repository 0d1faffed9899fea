"""Options of TRL that cannot be right together with a gate, each with its reason."""

import dataclasses
import logging
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from kondo.integrations.trl._version import older_than

_logger = logging.getLogger(__name__)

# What the config says where nobody asked: None, the model's own, or in older versions a number.
_DEFAULT_ROUTER = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}[
    "router_aux_loss_coef"
]

_ROUTER = (
    "router_aux_loss_coef must be 0.0: the load of the experts must be balanced over all tokens, "
    "and skipped ones never reach the router."
)
_FP16 = (
    "fp16 must be False: a step that keeps nothing has no gradients for the loss scaler to check. "
    "Use bf16."
)
_DEEPSPEED = (
    "DeepSpeed does not fit a gate: it steps the optimizer inside its own backward, so a step that "
    "keeps nothing could not be left out. Use DDP or FSDP."
)


def turn_off_router_loss(trainer: Any) -> None:
    """Switch an auxiliary loss of the router off, with a warning, where nobody asked for it.

    Models with experts have one by default. One that the config asks for is left to
    `check_trainer`, which refuses it.
    """
    if trainer.aux_loss_enabled and trainer.args.router_aux_loss_coef == _DEFAULT_ROUTER:
        _logger.warning(
            "The model's auxiliary loss of the router (router_aux_loss_coef %s) is switched off: "
            "the load of the experts must be balanced over all tokens, and skipped ones never "
            "reach the router. router_aux_loss_coef=0.0 says the same without this warning.",
            trainer.router_aux_loss_coef,
        )
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = False, 0.0


def check_trainer(trainer: Any) -> None:
    """Raise ValueError for the first option of a built trainer that does not fit a gate."""
    contradictions = _contradictions(trainer) | any_trainer(trainer)
    for why, broken in (contradictions | _token_contradictions(trainer.args)).items():
        if broken:
            raise ValueError(
                f"{why} kondo_gate='dense' without delight_eta leaves TRL's trainer as it is."
            )


def mean_entropy(trainer: Any) -> bool:
    """Return whether TRL's entropy bonus is a mean over the tokens of a micro-step."""
    return not older_than(1, 10) or trainer.loss_type not in ("cispo", "dapo", "vespo")


def any_trainer(trainer: Any) -> dict[str, bool]:
    """Return why an option fits no trainer with a gate -> whether it is in use."""
    return {
        _ROUTER: trainer.aux_loss_enabled,
        _FP16: trainer.args.fp16,
        _DEEPSPEED: trainer.is_deepspeed_enabled,
    }


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
        "use_liger_kernel must be False with this version of TRL: Liger's loss takes the place of "
        "TRL's, and runs all rows. From trl 1.14 on the option is allowed.": (
            args.use_liger_kernel and hasattr(trainer, "compute_liger_loss")
        ),
        "loss_type='luspo' needs importance_sampling_level='sequence', beta=0.0 and no vLLM with "
        "this version of TRL: otherwise its loss counts padding, which has no log-probs here. "
        "From trl 1.10 on it does not.": (
            older_than(1, 10)
            and args.loss_type == "luspo"
            and (args.importance_sampling_level != "sequence" or args.beta or trainer.use_vllm)
        ),
        "top_entropy_quantile must be 1.0: its threshold needs the entropy of every token, "
        "and skipped ones have no forward. kondo_unit='token' selects tokens instead.": (
            args.top_entropy_quantile < 1.0
        ),
        "use_adaptive_entropy must be False: its controller measures the entropy of every "
        "token, and skipped ones have no forward. A fixed entropy_coef acts on trained "
        "tokens.": args.use_adaptive_entropy,
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
