"""Options of `KondoGRPOTrainer`: TRL's own, and what the gate needs."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trl.trainer.grpo_config import GRPOConfig

import kondo


def _option(default: Any, text: str) -> Any:
    """Return a dataclass field with the help text TRL's command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass
class KondoGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and the gate's options. Give exactly one of kondo_rate and kondo_price.

    `kondo_rate=1.0` without `delight_eta` is TRL's trainer, bit for bit.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl import KondoGRPOConfig
        >>> args = KondoGRPOConfig("out", kondo_rate=0.1, use_cpu=True, bf16=False)
        >>> args.make_gate()
        Gate(rate=0.1)
    """

    kondo_rate: float | None = _option(
        None, "Fraction of the units of a generation batch that are trained, in (0, 1]."
    )
    kondo_price: float | None = _option(
        None, "Delight a unit must exceed to be trained. Instead of kondo_rate."
    )
    kondo_by: Literal["delight", "variance"] = _option(
        "delight",
        "What is kept. 'delight': the highest delight. 'variance': the completions whose centred "
        "rewards vary most, the best and the worst together; needs no log-probs, and no screen.",
    )
    kondo_unit: Literal["sequence", "token"] = _option(
        "sequence", "What is gated: whole completions, by their summed delight, or single tokens."
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

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        for name, allowed in (
            ("kondo_by", ("delight", "variance")),
            ("kondo_unit", ("sequence", "token")),
            ("kondo_screen", ("auto", "rollout", "exact")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if (self.kondo_rate is None) == (self.kondo_price is None):
            raise ValueError(
                f"give exactly one of kondo_rate and kondo_price, got {self.kondo_rate} and "
                f"{self.kondo_price}; kondo_rate=0.1 trains a tenth, kondo_rate=1.0 everything."
            )
        if self.kondo_rate is not None and not 0.0 < self.kondo_rate <= 1.0:
            raise ValueError(f"kondo_rate must lie in (0, 1], got {self.kondo_rate}.")
        eta = self.delight_eta
        if eta is not None and not (eta > 0 and math.isfinite(eta)):
            raise ValueError(
                f"delight_eta must be finite and > 0, got {eta}; None leaves survivors unweighted."
            )
        if self.kondo_by == "variance":
            self._check_variance()
        self.make_gate()  # it refuses what contradicts the rest

    def _check_variance(self) -> None:
        """Refuse what has no meaning, or no effect, where variance chooses."""
        meaningless = {
            "kondo_price": (None, "there is no price: give kondo_rate"),
            "kondo_unit": ("sequence", "tokens of one completion have one reward"),
            "kondo_screen": ("auto", "there is no screen"),
            "kondo_temperature": (0.0, "nothing is drawn"),
            "kondo_reserve": (0.0, "nothing is drawn"),
            "kondo_negative_quota": (0.0, "both ends are kept anyway"),
            "kondo_window": (0, "there is no price to take from past batches"),
            "delight_eta": (None, "delight is not known without log-probs"),
        }
        for name, (default, why) in meaningless.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {default!r} with kondo_by='variance', got "
                    f"{getattr(self, name)!r}: {why}. Leave it out, or set kondo_by='delight'."
                )

    def make_gate(self) -> kondo.BaseGate | None:
        """Return a new gate with these options; None, which keeps everything, at a rate of 1."""
        if self.kondo_rate == 1.0:
            return None
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
