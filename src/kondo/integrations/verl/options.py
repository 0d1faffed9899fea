"""Versions of verl that we build on, options under `trainer.v1.kondo`, and options of verl that do
not fit a gate. Imports no verl.

`config` is verl's, an OmegaConf config or any nest of mappings.
"""

import dataclasses
from typing import Any

import kondo
from kondo.integrations.framework import Framework

VERL = Framework(package="verl", lowest=(0, 9, 1), below=(0, 10), tested="0.9.1")

# Method -> its first parameters. tests/integrations/verl/test_contract.py holds more.
TRAINER_SEAMS = {
    "_init_resource_pool_mgr": ("self",),
    "_init_tokenizer": ("self",),
    "_load_checkpoint": ("self",),
    "_save_checkpoint": ("self",),
    "_update_actor": ("self", "batch", "metrics"),
}
WORKER_SEAMS = {
    "set_loss_fn": ("self", "loss_fn"),
    "train_batch": ("self", "data"),
    "train_mini_batch": ("self", "data"),
}
ENGINE_SEAMS = {
    "eval_mode": ("self", "kwargs"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "train_mode": ("self", "kwargs"),
}

SECTION = "trainer.v1.kondo"
ACTOR = "actor_rollout_ref.actor"

# Policy losses that sum over tokens or sequences, and divide by what `agg_loss` of verl is told.
LOSS_MODES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode", "dro"),
)

_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_NORMALIZE = f"{ACTOR}.policy_loss.rollout_correction.rollout_is_batch_normalize"
_NEVER = "rows without an advantage are never drawn by an unbiased gate, so that their"

# Option of verl -> what it may be beside None, and why nothing else.
FITTING: dict[str, tuple[tuple[Any, ...], str]] = {
    "distillation.enabled": (
        (False,),
        "distillation replaces the loss, and needs the teacher's log-probs of every row.",
    ),
    f"{ACTOR}.strategy": (
        ("fsdp", "fsdp2"),
        "updates of the other engines have not been tested with rows left out.",
    ),
    _LOSS_MODE: (
        LOSS_MODES,
        "clip_cov, kl_cov and geo_mean compare or count the rows of a micro-batch, and of other "
        "losses it is not known whether they do.",
    ),
    f"{ACTOR}.use_prefix_grouper": (
        (False,),
        "it needs all responses to a prompt in one micro-batch.",
    ),
    "actor_rollout_ref.model.mtp.enable": (
        (False,),
        "its loss is a mean over the tokens of a micro-batch.",
    ),
    _NORMALIZE: (
        (False,),
        "the loss then normalises weights over the rows of a micro-batch.",
    ),
}
# The same with an unbiased gate, checked after those.
FITTING_UNBIASED: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{ACTOR}.entropy_coeff": ((0,), f"{_NEVER} entropy would be missing from the mean gradient."),
    _LOSS_MODE: (
        LOSS_MODES[:-1],
        f"{_NEVER} quadratic penalty in dro would be missing from the mean gradient.",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the trainer was asked for."""

    gate: kondo.BaseGate | None
    """None: dense, verl's own update."""
    seed: int
    """Seed of the gate's draws."""
    check: bool
    """Whether `kondo.check` tries the model on the first batch."""


def look_up(config: Any, path: str, default: Any = None) -> Any:
    """Return the option at a dotted path, or the default where a part is missing or None."""
    for part in path.split("."):
        config = config.get(part) if hasattr(config, "get") else None
        if config is None:
            return default
    return config


def read_options(config: Any) -> Options:
    """Return the options, after checking that verl's others fit.

    Raises:
        ValueError: an option that is missing, unknown or does not fit, with its full name.
    """
    section = look_up(config, SECTION, {})
    spec = look_up(section, "gate")
    if spec is None:
        raise ValueError(
            f"{SECTION}.gate must say which rows to train, got none; add "
            f"+{SECTION}.gate=unbiased:0.1, or another spec of kondo.parse_gate."
        )
    unknown = sorted(set(section) - {"gate", "seed", "check"})
    if unknown:
        raise ValueError(f"{SECTION} takes gate, seed and check, got {unknown}.")
    check = section.get("check", True)
    if not isinstance(check, bool):
        raise ValueError(
            f"{SECTION}.check must be True or False, got {check!r}; False leaves out the check of "
            f"the first batch."
        )
    try:
        gate = kondo.parse_gate(spec)
    except ValueError as error:
        raise ValueError(f"{SECTION}.gate: {error}") from error
    if gate is not None:
        _check_fit(config, gate)
    return Options(gate=gate, seed=int(section.get("seed") or 0), check=check and gate is not None)


def kl_in_loss(config: Any) -> tuple[float, str]:
    """Return the coefficient of the KL term in the loss, 0 if there is none, and its type."""
    actor = look_up(config, ACTOR, {})
    coefficient = float(actor.get("kl_loss_coef") or 0.0) if actor.get("use_kl_loss") else 0.0
    return coefficient, str(actor.get("kl_loss_type") or "low_var_kl")


def _check_fit(config: Any, gate: kondo.BaseGate) -> None:
    """Raise ValueError for the first option of verl that does not fit a gate."""

    def refuse(name: str, wanted: str, why: str) -> None:
        raise ValueError(
            f"{name} must be {wanted} with {SECTION}.gate, got {look_up(config, name)!r}: {why} "
            f"{SECTION}.gate=dense leaves verl's update as it is."
        )

    unbiased = isinstance(gate, kondo.UnbiasedGate)
    for name, (fitting, why) in (*FITTING.items(), *(FITTING_UNBIASED.items() if unbiased else ())):
        if look_up(config, name) not in (None, *fitting):
            shown = ", ".join(map(str, fitting))
            refuse(name, shown if len(fitting) == 1 else f"one of {shown}", why)
    if (
        look_up(config, f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"
        and look_up(config, f"{ACTOR}.loss_scale_factor") is None
    ):
        refuse(
            f"{ACTOR}.loss_scale_factor",
            "set for loss_agg_mode=seq-mean-token-sum-norm",
            "without it verl divides by the longest response of a micro-batch, and a micro-batch "
            "of kept rows has another one.",
        )
    coefficient, _ = kl_in_loss(config)
    if unbiased and coefficient and not kondo.signals.needs_log_probs(gate.signal):
        refuse(
            f"{ACTOR}.use_kl_loss",
            "False for a signal without log-probs",
            f"{_NEVER} KL would be missing from the mean gradient. The default signal, "
            f"gradient_norm, includes it.",
        )
    if type(kondo.adapters.adapter_of(gate)).row_facts is not kondo.adapters.Adapter.row_facts:
        refuse(
            f"{SECTION}.gate",
            "a gate that reads values only",
            "this one reads the tokens of the batch, which verl's controller does not have.",
        )
