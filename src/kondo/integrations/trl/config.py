"""Options of `KondoGRPOTrainer`: TRL's own, and what the gate needs."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trl.trainer.grpo_config import GRPOConfig

import kondo
from kondo.core.contract import Signal
from kondo.integrations.trl.correction import check_options

_SIGNALS: dict[str, Signal] = {
    "gradient_norm": kondo.signals.gradient_norm,
    "delight": kondo.signals.abs_delight,
    "advantage": kondo.signals.unit_advantage,
}

_ALLOWED = {
    "kondo_by": ("unbiased", "variance", "delight"),
    "kondo_unit": ("sequence", "token"),
    "kondo_screen": ("auto", "rollout", "exact"),
    "kondo_signal": tuple(_SIGNALS),
    "kondo_correction": ("none", "sequence"),
}

# Option -> its default, the values of kondo_by that take another, and why the rest do not.
_BELONGS_TO: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "kondo_price": (None, ("delight",), "a price is an amount of delight; give kondo_rate"),
    "kondo_noise": (None, ("unbiased",), "only an unbiased draw has a noise; give kondo_rate"),
    "kondo_signal": ("gradient_norm", ("unbiased",), "the signal is fixed"),
    "kondo_unit": ("sequence", ("unbiased", "delight"), "tokens of one completion have one reward"),
    "kondo_screen": ("auto", ("unbiased", "delight"), "there is no screen"),
    "kondo_temperature": (0.0, ("delight",), "it softens a price of delight"),
    "kondo_reserve": (0.0, ("delight",), "it is drawn from what a price of delight skips"),
    "kondo_negative_quota": (0.0, ("delight",), "negative advantages are kept anyway"),
    "kondo_window": (0, ("delight",), "past batches set a price of delight only"),
    "delight_eta": (None, ("delight",), "what is kept is not weighted by delight"),
}


def _option(default: Any, text: str) -> Any:
    """Return a dataclass field with the help text TRL's command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass
class KondoGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and the gate's options.

    Give exactly one of kondo_rate, kondo_noise and kondo_price. `kondo_rate=1.0` without
    `delight_eta` and `kondo_correction` is TRL's trainer, bit for bit.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl import KondoGRPOConfig
        >>> args = KondoGRPOConfig("out", kondo_rate=0.1, use_cpu=True, bf16=False)
        >>> args.make_gate()
        UnbiasedGate(rate=0.1)
    """

    kondo_rate: float | None = _option(
        None, "Fraction of the units of a generation batch that are trained, in (0, 1]."
    )
    kondo_noise: float | None = _option(
        None,
        "Instead of kondo_rate: train the fewest units whose gradient has at most this many times "
        "the second moment of the full one, at least 1. With kondo_by='unbiased'.",
    )
    kondo_price: float | None = _option(
        None,
        "Delight a unit must exceed to be trained. Instead of kondo_rate, with kondo_by='delight'.",
    )
    kondo_by: Literal["unbiased", "variance", "delight"] = _option(
        "unbiased",
        "What is kept. 'unbiased': a random draw by the size of the gradient, weighted so that the "
        "mean gradient is the full one. 'variance': the completions whose centred rewards vary "
        "most, the best and the worst together. 'delight': the highest delight; it trains on few "
        "failures, and is unsafe where one reward is shared by a whole completion.",
    )
    kondo_signal: Literal["gradient_norm", "delight", "advantage"] = _option(
        "gradient_norm",
        "With kondo_by='unbiased', what the chance to be kept is in proportion to. "
        "'gradient_norm': a proxy of the norm of the gradient. 'delight': its absolute value. "
        "'advantage': its absolute value; needs no log-probs, and no screen.",
    )
    kondo_unit: Literal["sequence", "token"] = _option(
        "sequence", "What is gated: whole completions or single tokens."
    )
    kondo_screen: Literal["auto", "rollout", "exact"] = _option(
        "auto",
        "Where the log-probs of the screen come from. 'rollout': the sampler's, free, with vLLM or "
        "a rollout_func. 'exact': the current policy's; the trainer's old log-probs where it has "
        "them, otherwise a forward without a graph. 'auto': the old log-probs where the trainer "
        "has them, then the sampler's, then a forward.",
    )
    kondo_temperature: float = _option(
        0.0, "Temperature of the gate; above 0 units are drawn instead of ranked."
    )
    kondo_reserve: float = _option(
        0.0, "Fraction of the kept units drawn at random from those the price would skip."
    )
    kondo_negative_quota: float = _option(
        0.0,
        "Fraction of the kept units taken from those with a negative advantage: at a low rate the "
        "gate otherwise trains on successes only.",
    )
    kondo_window: int = _option(
        0, "Take the price for kondo_rate from this many past generation batches; 0: this one."
    )
    delight_eta: float | None = _option(
        None,
        "Weight the advantage of what is trained by sigmoid(delight / delight_eta), as DG does; "
        "with kondo_rate=1.0, of everything.",
    )
    kondo_correction: Literal["none", "sequence"] = _option(
        "none",
        "'sequence': weight each completion by the ratio of its probabilities under the policy and "
        "under the policy that sampled it, capped, in the place of the clipped ratios of tokens "
        "and of vLLM's correction. For completions that are stale or of a mismatched sampler.",
    )
    kondo_correction_cap: float = _option(
        2.0, "Cap of the weight of a completion, with kondo_correction='sequence'."
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        self._check_by()
        check_options(self)
        given = [self.kondo_rate, self.kondo_noise, self.kondo_price]
        if sum(value is not None for value in given) != 1:
            raise ValueError(
                f"give exactly one of kondo_rate, kondo_noise and kondo_price, got {given}; "
                f"kondo_rate=0.1 trains a tenth, kondo_rate=1.0 everything."
            )
        if self.kondo_rate is not None and not 0.0 < self.kondo_rate <= 1.0:
            raise ValueError(f"kondo_rate must lie in (0, 1], got {self.kondo_rate}.")
        eta = self.delight_eta
        if eta is not None and not (eta > 0 and math.isfinite(eta)):
            raise ValueError(
                f"delight_eta must be finite and > 0, got {eta}; None leaves survivors unweighted."
            )
        self.make_gate()  # it refuses what contradicts the rest

    def _check_by(self) -> None:
        """Refuse what has no meaning, or no effect, for what kondo_by names."""
        for name, (default, takers, why) in _BELONGS_TO.items():
            if getattr(self, name) != default and self.kondo_by not in takers:
                others = " or ".join(f"kondo_by={taker!r}" for taker in takers)
                raise ValueError(
                    f"{name} must be {default!r} with kondo_by={self.kondo_by!r}, got "
                    f"{getattr(self, name)!r}: {why}. Leave it out, or set {others}."
                )
        if self.kondo_signal != "advantage":
            return
        if self.kondo_screen != "auto":
            raise ValueError(
                f"kondo_screen must be 'auto' with kondo_signal='advantage', got "
                f"{self.kondo_screen!r}: advantages need no log-probs, so there is no screen."
            )
        if self.beta != 0.0:
            raise ValueError(
                f"beta must be 0.0 with kondo_signal='advantage', got {self.beta}: a completion "
                f"without an advantage has a KL, and would never be kept. Leave kondo_signal out."
            )

    def make_gate(self) -> kondo.BaseGate | None:
        """Return a new gate with these options; None, which keeps everything, at a rate of 1."""
        if self.kondo_rate == 1.0:
            return None
        if self.kondo_by == "unbiased":
            signal = _SIGNALS[self.kondo_signal]
            return kondo.UnbiasedGate(rate=self.kondo_rate, noise=self.kondo_noise, signal=signal)
        if self.kondo_by == "variance":
            assert self.kondo_rate is not None  # checked: there is no price
            return kondo.VarianceGate(rate=self.kondo_rate)
        return kondo.Gate(
            rate=self.kondo_rate,
            price=self.kondo_price,
            temperature=self.kondo_temperature,
            reserve=self.kondo_reserve,
            negative_quota=self.kondo_negative_quota,
            window=self.kondo_window,
        )
