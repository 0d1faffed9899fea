"""Options of `KondoGRPOTrainer`: TRL's own, and what the gate needs."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from trl.trainer.grpo_config import GRPOConfig

import kondo
from kondo.integrations.trl.gate_options import check_options, gate_of


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with the help text TRL's command line shows."""
    return field(default=default, metadata={"help": text})


CHECK: Any = option(
    True,
    "Run kondo.check on a few rows of the first batch of a run, before the first optimizer step: "
    "it raises an error for a model that completions cannot be dropped from. False trains without.",
)


@dataclass
class KondoGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and the gate's options.

    Give `kondo_gate`, a short text for any gate (`kondo.parse_gate`), or exactly one of kondo_rate,
    kondo_noise and kondo_price. `kondo_gate="dense"` (`kondo_rate=1.0`) without `delight_eta` and
    `kondo_correction` is TRL's trainer, bit for bit.

    A function that `kondo_gate` names by its import path is called more than once: the config calls
    it to check the options, and the trainer, like every `make_gate()`, for a gate of its own. It
    must return a new gate each time.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl import KondoGRPOConfig
        >>> args = KondoGRPOConfig("out", kondo_gate="unbiased:0.1", use_cpu=True, bf16=False)
        >>> args.make_gate()
        UnbiasedGate(rate=0.1)
    """

    kondo_gate: str | None = option(
        None,
        "The gate as a short text: 'unbiased:0.1', 'noise:1.5', 'variance:0.1', 'delight:0.03', "
        "'price:0', 'dense', or 'package.module:name' for a gate of your own or a function that "
        "returns one, which is called more than once. Instead of kondo_rate, kondo_noise, "
        "kondo_price, kondo_by and what belongs to them.",
    )
    kondo_rate: float | None = option(
        None, "Fraction of the units of a generation batch that are trained, in (0, 1]."
    )
    kondo_noise: float | None = option(
        None,
        "Instead of kondo_rate: train the fewest units whose gradient has at most this many times "
        "the second moment of the full one, at least 1. With kondo_by='unbiased'.",
    )
    kondo_price: float | None = option(
        None,
        "Delight a unit must exceed to be trained. Instead of kondo_rate, with kondo_by='delight'.",
    )
    kondo_by: Literal["unbiased", "variance", "delight"] = option(
        "unbiased",
        "What is kept. 'unbiased': a random draw by the size of the gradient, weighted so that the "
        "mean gradient is the full one. 'variance': the completions whose centred rewards vary "
        "most, the best and the worst together. 'delight': the highest delight; it trains on few "
        "failures, and is unsafe where one reward is shared by a whole completion.",
    )
    kondo_signal: Literal["gradient_norm", "delight", "advantage"] = option(
        "gradient_norm",
        "With kondo_by='unbiased', what the chance to be kept is in proportion to. "
        "'gradient_norm': a proxy of the norm of the gradient. 'delight': its absolute value. "
        "'advantage': its absolute value; needs no log-probs, and no screen.",
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
    kondo_temperature: float = option(
        0.0, "Temperature of the gate; above 0 units are drawn instead of ranked."
    )
    kondo_reserve: float = option(
        0.0, "Fraction of the kept units drawn at random from those the price would skip."
    )
    kondo_negative_quota: float = option(
        0.0,
        "Fraction of the kept units taken from those with a negative advantage: at a low rate the "
        "gate otherwise trains on successes only.",
    )
    kondo_window: int = option(
        0, "Take the price for kondo_rate from this many past generation batches; 0: this one."
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

    def make_gate(self) -> kondo.BaseGate | None:
        """Return a new gate with these options; None, which keeps everything, for dense."""
        return gate_of(self)


OPTIONS: dict[str, Any] = {
    option.name: option.default
    for option in dataclasses.fields(KondoGRPOConfig)
    if option.name not in {known.name for known in dataclasses.fields(GRPOConfig)}
}
"""Our options and their defaults."""
