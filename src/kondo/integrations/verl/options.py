"""Options under `trainer.v1.kondo`, and options of verl that do not fit a gate. Imports no verl.

`config` is verl's, an OmegaConf config or any nest of mappings.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import kondo

SECTION = "trainer.v1.kondo"

# Policy losses that sum over tokens or sequences, and divide by what `agg_loss` of verl is told.
# Not among them: clip_cov and kl_cov compare the tokens of a micro-batch with each other, and
# geo_mean divides by the rows of a micro-batch.
LOSS_MODES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode"),
)
STRATEGIES = ("fsdp", "fsdp2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the trainer was asked for."""

    gate: kondo.BaseGate | None
    """None: dense, verl's own update."""
    seed: int
    """Of the gate's draws."""
    check: bool
    """Whether `kondo.check` tries the model on the first batch."""


def look_up(config: Any, path: str, default: Any = None) -> Any:
    """Return the option at a dotted path, or the default where a part is missing or None.

    Example:
        >>> look_up({"actor": {"lr": 1.0}}, "actor.lr"), look_up({}, "actor.lr", 0.5)
        (1.0, 0.5)
    """
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
    spec = section.get("gate") if hasattr(section, "get") else None
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
        check_fit(config, gate)
    return Options(gate=gate, seed=int(section.get("seed") or 0), check=check and gate is not None)


def check_fit(config: Any, gate: kondo.BaseGate) -> None:
    """Raise ValueError for the first option of verl that does not fit a gate."""
    for name, (wanted, why, broken) in {**_refused(config), **_refused_by(config, gate)}.items():
        if broken:
            raise ValueError(
                f"{name} must be {wanted} with {SECTION}.gate, got "
                f"{look_up(config, name.split(' ')[0])!r}: {why} {SECTION}.gate=dense leaves "
                f"verl's update as it is."
            )


def kl_in_loss(config: Any) -> tuple[float, str]:
    """Return the coefficient of the KL term in the loss, 0 if there is none, and its type."""
    actor = look_up(config, "actor_rollout_ref.actor", {})
    coefficient = float(actor.get("kl_loss_coef") or 0.0) if actor.get("use_kl_loss") else 0.0
    return coefficient, str(actor.get("kl_loss_type") or "low_var_kl")


_Refusals = Mapping[str, tuple[str, str, bool]]


def _refused(config: Any) -> _Refusals:
    """Return option -> what it must be, why, whether it is not."""
    actor = "actor_rollout_ref.actor"
    loss_mode = look_up(config, f"{actor}.policy_loss.loss_mode", "vanilla")
    aggregation = look_up(config, f"{actor}.loss_agg_mode", "token-mean")
    correction = f"{actor}.policy_loss.rollout_correction"
    return {
        "distillation.enabled": (
            "False",
            "distillation replaces the loss, and needs the teacher's log-probs of every row.",
            bool(look_up(config, "distillation.enabled", False)),
        ),
        f"{actor}.strategy": (
            "fsdp or fsdp2",
            "updates of the other engines have not been tested with rows left out.",
            look_up(config, f"{actor}.strategy") not in STRATEGIES,
        ),
        f"{actor}.policy_loss.loss_mode": (
            f"one of {', '.join(LOSS_MODES)}",
            "clip_cov, kl_cov and geo_mean compare or count the rows of a micro-batch, and of "
            "other losses it is not known whether they do.",
            loss_mode not in LOSS_MODES,
        ),
        f"{actor}.loss_scale_factor": (
            "set for loss_agg_mode=seq-mean-token-sum-norm",
            "without it verl divides by the longest response of a micro-batch, and a micro-batch "
            "of kept rows has another one.",
            aggregation == "seq-mean-token-sum-norm"
            and look_up(config, f"{actor}.loss_scale_factor") is None,
        ),
        f"{actor}.use_prefix_grouper": (
            "False",
            "it needs all responses to a prompt in one micro-batch.",
            bool(look_up(config, f"{actor}.use_prefix_grouper", False)),
        ),
        "actor_rollout_ref.model.mtp.enable": (
            "False",
            "its loss is a mean over the tokens of a micro-batch.",
            bool(look_up(config, "actor_rollout_ref.model.mtp.enable", False)),
        ),
        f"{correction}.rollout_is_batch_normalize": (
            "False",
            "the loss then normalises weights over the rows of a micro-batch.",
            bool(look_up(config, f"{correction}.rollout_is_batch_normalize", False)),
        ),
    }


def _refused_by(config: Any, gate: kondo.BaseGate) -> _Refusals:
    """Return the same for options that do not fit this gate."""
    actor = "actor_rollout_ref.actor"
    unbiased = isinstance(gate, kondo.UnbiasedGate)
    never = "rows without an advantage are never drawn by an unbiased gate, so that their"
    coefficient, _ = kl_in_loss(config)
    return {
        f"{actor}.entropy_coeff": (
            "0",
            f"{never} entropy would be missing from the mean gradient.",
            unbiased and bool(look_up(config, f"{actor}.entropy_coeff", 0.0)),
        ),
        f"{actor}.policy_loss.loss_mode (unbiased gate)": (
            "another than dro",
            f"{never} quadratic penalty would be missing from the mean gradient.",
            unbiased and look_up(config, f"{actor}.policy_loss.loss_mode") == "dro",
        ),
        f"{actor}.use_kl_loss": (
            "False for a signal without log-probs",
            f"{never} KL would be missing from the mean gradient. The default signal, "
            f"gradient_norm, includes it.",
            unbiased and coefficient != 0.0 and not kondo.signals.needs_log_probs(gate.signal),
        ),
        f"{SECTION}.gate": (
            "a gate that reads values only",
            "this one reads the tokens of the batch, which verl's controller does not have.",
            type(gate).row_facts is not kondo.BaseGate.row_facts,
        ),
    }
