"""Options of the trainers with a gate: TRL's own, what the gate needs, and what contradicts it.

    kondo_gate = "unbiased:0.1"                  text, for files and command lines
    kondo_gate = kondo.UnbiasedGate(rate=0.1)    any gate
    kondo_rate = 0.1                             the first, for command lines with a rate

A config is checked when it is made, by `check_options`; a gate that is put into a trainer, by
`check_gate` and, with the trainer that TRL built, `check_trainer`.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from trl.trainer.grpo_config import GRPOConfig

import kondo
from kondo.arguments import check_flag, check_optional, require
from kondo.integrations.trl._version import older_than

_logger = logging.getLogger(__name__)

DEFAULT_GATE = "unbiased:0.1"
"""The gate of a trainer without a config."""

# transformers' command line reads the text out of such a union.
AnyGate = Callable[..., kondo.Choice] | str | None

_Rule = tuple[str, tuple[Any, ...], str]
"""An option, what it may be, and why."""

_CLIP = "sequence ratios are capped, not clipped; kondo_correction_cap is the cap"
_REPLACED = "kondo_correction replaces vLLM's correction; kondo_correction_cap is the cap"
_WITH_CORRECTION: list[_Rule] = [
    ("loss_type", ("dapo", "grpo", "bnpo", "dr_grpo"), "the others have a rule for ratios"),
    (
        "importance_sampling_level",
        ("token",),
        "'sequence' is GSPO's geometric mean, another ratio",
    ),
    ("kondo_unit", ("sequence",), "a ratio of a completion needs its every token"),
    ("epsilon", (0.2,), _CLIP),
    ("epsilon_high", (None,), _CLIP),
    ("delta", (None,), _CLIP),
    ("off_policy_mask_threshold", (None,), "it is another correction of the same"),
    ("vllm_importance_sampling_mode", ("sequence_mask",), _REPLACED),
    ("vllm_importance_sampling_clip_max", (3.0,), _REPLACED),
    ("vllm_importance_sampling_clip_min", (None,), _REPLACED),
]


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with the help text TRL's command line shows."""
    return field(default=default, metadata={"help": text})


CHECK: Any = option(
    True,
    "Run kondo.check on a few rows of the first batch of a run, before the first optimizer step: "
    "it raises an error for a model that completions cannot be dropped from. False trains without.",
)


class HoldsGate:
    """Part of a config with a gate, before the config of TRL among its bases."""

    kondo_gate: AnyGate

    def make_gate(self) -> kondo.BaseGate | None:
        """Return the gate of these options; None, which keeps everything, for dense."""
        if not (isinstance(self.kondo_gate, str) or callable(self.kondo_gate)):
            raise ValueError(
                f"kondo_gate must be text for kondo.parse_gate, such as 'unbiased:0.1' or "
                f"'dense', a kondo.BaseGate, or a callable (values, mask, generator) -> "
                f"kondo.Choice, got {self.kondo_gate!r}."
            )
        return kondo.parse_gate(self.kondo_gate)

    def to_dict(self) -> dict[str, Any]:
        """Return all options as loggers and JSON files want them: a gate is its repr."""
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return found | {"kondo_gate": shown(self.kondo_gate)}


def shown(gate: AnyGate) -> str | None:
    """Return a gate as text: the text it was given as, or its repr."""
    return gate if gate is None or isinstance(gate, str) else repr(gate)


@dataclass
class KondoGRPOConfig(HoldsGate, GRPOConfig):
    """TRL's `GRPOConfig` and the gate's options.

    Give `kondo_gate`, or `kondo_rate` for an unbiased one. `kondo_gate="dense"`, or
    `kondo_rate=1.0`, without `delight_eta` and `kondo_correction` is TRL's trainer, bit for bit.

    A text makes a new gate for every trainer; a gate that is given is used as it is, so give each
    trainer its own. A function that a text names by its import path is called more than once, by
    the config to check the options and by each trainer, and must return a new gate each time.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl import KondoGRPOConfig
        >>> args = KondoGRPOConfig("out", kondo_gate="unbiased:0.1", use_cpu=True, bf16=False)
        >>> args.make_gate()
        UnbiasedGate(rate=0.1)
    """

    kondo_gate: AnyGate = field(
        default=None,
        metadata={
            "help": "The gate. As text: 'unbiased:0.1', 'noise:1.5', 'variance:0.1', "
            "'delight:0.03', 'price:0', 'dense', or 'package.module:name' for a gate of your own. "
            "In Python also any kondo.BaseGate or callable (values, mask, generator) -> "
            "kondo.Choice."
        },
    )
    kondo_rate: float | None = option(
        None, "Short for kondo_gate='unbiased:RATE', which takes its place; 1.0 for 'dense'."
    )
    kondo_unit: Literal["sequence", "token"] = option(
        "sequence", "What is gated: whole completions or single tokens."
    )
    kondo_screen: Literal["auto", "rollout", "exact"] = option(
        "auto",
        "Where the log-probs of the screen come from. 'rollout': the sampler's, free, with vLLM or "
        "a rollout_func. 'exact': the current policy's; the trainer's old log-probs where it has "
        "them, otherwise a forward without a graph. 'auto': the old log-probs where the trainer "
        "has them, then the sampler's, then a forward.",
    )
    delight_eta: float | None = option(
        None,
        "Weight the advantage of what is trained by sigmoid(delight / delight_eta), as DG does; "
        "with kondo_gate='dense', of everything.",
    )
    kondo_correction: Literal["none", "sequence"] = option(
        "none",
        "'sequence': weight each completion by the ratio of its probabilities under the policy and "
        "under the policy that sampled it, capped, in the place of the clipped ratios of tokens "
        "and of vLLM's correction. For completions that are stale or of a mismatched sampler.",
    )
    kondo_correction_cap: float = option(
        2.0, "Cap of the weight of a completion, with kondo_correction='sequence'."
    )
    kondo_check: bool = CHECK

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        check_options(self)


_KNOWN = {known.name for known in dataclasses.fields(GRPOConfig)}
OPTIONS = {own.name: own for own in dataclasses.fields(KondoGRPOConfig) if own.name not in _KNOWN}
"""Our options."""

# Before a command line is parsed, which changes the types of fields.
_ALLOWED = {n: get_args(own.type) for n, own in OPTIONS.items() if get_origin(own.type) is Literal}


def check_options(args: Any) -> None:
    """Raise ValueError for options that are out of range or contradict each other."""
    for name, allowed in _ALLOWED.items():
        given = getattr(args, name)
        require(given in allowed, f"{name} must be one of {allowed}, got {given!r}.")
    for name in ("kondo_rate", "delight_eta", "kondo_correction_cap"):
        check_optional(name, getattr(args, name))
    check_flag("kondo_check", args.kondo_check)
    gate, rate, eta = args.kondo_gate, args.kondo_rate, args.delight_eta
    if (gate is None) == (rate is None):
        raise ValueError(
            f"give kondo_gate, such as 'unbiased:0.1', or kondo_rate=0.1, which is short for it, "
            f"got kondo_gate={shown(gate)!r} and kondo_rate={rate}. Other options of a gate go "
            f"into the text, as in 'delight:0.1,negative_quota=0.3'."
        )
    if rate is not None:
        require(0.0 < rate <= 1.0, f"kondo_rate must lie in (0, 1], got {rate}.")
        args.kondo_gate, args.kondo_rate = "dense" if rate == 1 else f"unbiased:{rate}", None
    require(
        eta is None or (eta > 0 and math.isfinite(eta)),
        f"delight_eta must be finite and > 0, got {eta}; None leaves survivors unweighted.",
    )
    cap = args.kondo_correction_cap
    require(cap > 0, f"kondo_correction_cap must be > 0, got {cap}.")
    rules = [("kondo_correction_cap", (2.0,), "there is nothing to cap")]
    if args.kondo_correction != "none":
        rules = list(_WITH_CORRECTION)
        if args.beta != 0.0:
            why = f"with beta = {args.beta} it multiplies the KL by the token ratio, 1 here"
            rules.append(("use_bias_correction_kl", (False,), why))
    _require(args, rules, f"kondo_correction={args.kondo_correction!r}")
    check_gate(HoldsGate.make_gate(args), args)


def check_gate(gate: kondo.BaseGate | None, args: Any) -> None:
    """Raise ValueError for a gate that does not fit the other options; None, dense, fits all.

    The config calls it for its own gate, the trainer for each that is put in, and each choice for
    what the gate is by then.
    """
    if gate is None:
        return
    unbiased = isinstance(gate, kondo.UnbiasedGate)
    screens = kondo.signals.needs_log_probs(gate.signal)
    rules: list[_Rule] = []
    if isinstance(gate, kondo.VarianceGate):
        rules.append(("kondo_unit", ("sequence",), "tokens of one completion have one reward"))
    if not screens:
        why = "its signal needs no log-probs, so there is no screen"
        rules.append(("kondo_screen", ("auto",), why))
    if gate.signal is not kondo.delight:
        why = "it weighs what is trained by delight, and the gate's signal is another"
        rules.append(("delight_eta", (None,), why))
    if unbiased and not screens:
        why = (
            "a completion without an advantage has a KL, and would never be drawn; a signal that "
            "reads log-probs, such as gradient_norm, sees it"
        )
        rules.append(("beta", (0.0,), why))
    if unbiased:
        why = (
            "completions without an advantage are never drawn, so that their entropy would be "
            "missing from the mean gradient"
        )
        rules.append(("entropy_coef", (0.0,), why))
    _require(args, rules, f"the gate {gate!r}")


def _require(args: Any, rules: Iterable[_Rule], beside: str) -> None:
    for name, allowed, why in rules:
        if getattr(args, name) not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))} with {beside}, got "
                f"{getattr(args, name)!r}: {why}. Leave it out, or choose other options beside it."
            )


def mean_entropy(trainer: Any) -> bool:
    """Return whether TRL's entropy bonus is a mean over the tokens of a micro-step."""
    return not older_than(1, 10) or trainer.loss_type not in ("cispo", "dapo", "vespo")


def check_any_trainer(trainer: Any, more: Mapping[str, bool] | None = None) -> None:
    """Raise ValueError for the first option of a built trainer that does not fit a gate.

    An auxiliary loss of the router is switched off, with a warning, where nobody asked for it:
    models with experts have one by default.

    Args:
        trainer: of TRL.
        more: why an option does not fit this kind of trainer -> whether it is in use.
    """
    # What the config says where nobody asked: None, the model's own, or in older versions a number.
    unasked = GRPOConfig.__dataclass_fields__["router_aux_loss_coef"].default
    if trainer.aux_loss_enabled and trainer.args.router_aux_loss_coef == unasked:
        _logger.warning(
            "The model's auxiliary loss of the router (router_aux_loss_coef %s) is switched off: "
            "the load of the experts must be balanced over all tokens, and skipped ones never "
            "reach the router. router_aux_loss_coef=0.0 says the same without this warning.",
            trainer.router_aux_loss_coef,
        )
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = False, 0.0
    for why, broken in {
        **(more or {}),
        "router_aux_loss_coef must be 0.0: the load of the experts must be balanced over all "
        "tokens, and skipped ones never reach the router.": trainer.aux_loss_enabled,
        "fp16 must be False: a step that keeps nothing has no gradients for the loss scaler to "
        "check. Use bf16.": trainer.args.fp16,
        "DeepSpeed does not fit a gate: it steps the optimizer inside its own backward, so a step "
        "that keeps nothing could not be left out. Use DDP or FSDP.": trainer.is_deepspeed_enabled,
    }.items():
        if broken:
            raise ValueError(
                f"{why} kondo_gate='dense' without delight_eta leaves TRL's trainer as it is."
            )


def check_trainer(trainer: Any) -> None:
    """Do what `check_any_trainer` does for a `KondoGRPOTrainer`."""
    args = trainer.args
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    no_log_probs = not trainer.use_vllm and trainer.rollout_func is None
    sequence_ratio = args.importance_sampling_level == "sequence"
    contradictions = {
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
            and (not sequence_ratio or args.beta or trainer.use_vllm)
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
    for what, used in {
        "importance_sampling_level='sequence': its ratio": sequence_ratio,
        "loss_type='vespo': its sequence weight": args.loss_type == "vespo",
        "off_policy_mask_threshold: its mean KL": args.off_policy_mask_threshold is not None,
    }.items():
        why = (
            f"kondo_unit='token' with {what} needs the log-probs of a row's every token, and "
            f"skipped ones have none."
        )
        contradictions[why] = used and args.kondo_unit == "token"
    check_any_trainer(trainer, contradictions)
