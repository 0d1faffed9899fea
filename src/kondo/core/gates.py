"""The Kondo gate: values -> which units are worth a backward pass.

In: values (delight, or another signal) and a mask, [..., M]. Out: keep, weight, price and rate.
Nothing is differentiated. A unit that does not count, or whose value is exactly zero, is never
kept: it has no advantage, or the policy was already certain of it.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from kondo.arguments import check_flag, check_number, check_optional, check_whole
from kondo.core import quantiles, sampling, signals
from kondo.core.base_gate import BaseGate, Choice, Randomness, Signal
from kondo.core.delight import delight
from kondo.core.fingerprint import name_of
from kondo.core.rolling_price import RollingPrice, check_past
from kondo.core.saved_state import check_state, check_state_count, check_state_tensor

# Spreads the lots of successive calls apart: ties at a rolling price fall anew each time.
_CALL_STRIDE = 0x9E3779B1


class Gate(BaseGate):
    """Decide which units are worth a backward pass. Give exactly one of `rate` and `price`.

    | arguments                       | keeps                                                     |
    |---------------------------------|-----------------------------------------------------------|
    | `rate=0.03`                     | exactly round(rate * units that count) of highest value   |
    | `price=0.0`                     | value > price                                             |
    | `rate=0.03, temperature=0.1`    | Bernoulli(sigmoid((chi - price) / eta)), price solved so  |
    |                                 | that the expected rate is the one asked for               |
    | `price=0.0, temperature=0.1`    | the same draw at that price                               |
    | `..., temperature=1, soft=True` | everything, weighted by that sigmoid (price 0: DG)        |

    The value of a unit is its delight, or that of another `signal`. A hard rate keeps at least one
    unit where any value is not zero. No unit of value zero is ever kept, so fewer than the rate are
    kept where the others run out. Ties: see `kondo.core.quantiles.highest`.

    Args:
        rate: fraction of the units that count to keep, in (0, 1].
        price: value a unit must exceed.
        temperature: eta >= 0, softness of the gate; 0 is hard and draws nothing.
        soft: weight every unit by its sigmoid instead of drawing. Saves no backward pass.
        reserve: fraction of the kept units drawn uniformly from those the price would skip, so
            that no unit is invisible for ever; at least one where two or more are kept. With
            `rate` and temperature 0.
        negative_quota: fraction of the kept units taken from those of negative value (negative
            advantage), highest value first: at a low rate a gate otherwise trains on successes
            only. With `rate` and temperature 0.
        inverse_propensity: weight kept units by 1 / probability: unbiased for the dense gradient,
            at the price of variance. Needs a draw: temperature > 0 or reserve > 0.
        normalise: read `price` and `temperature` as multiples of the values' running scale;
            "temperature" reads the temperature alone so. The scale is the root mean square of
            values that are not zero; it is never centred, since that would move the sign, which
            carries the meaning.
        scale_decay: decay of the running scale per call; 0 uses the current call alone.
        window: take the price for `rate` from this many past calls instead of from the current
            one, for batches too small to hold a rate. Then the count varies and may be zero.
        warmup: past calls needed before the window sets the price; until then, and where the
            window holds fewer values other than zero than the rate buys, the current call does. By
            default a quarter of the window.
        signal: what a unit is worth; see `kondo.signals`.

    Example:
        >>> import torch, kondo
        >>> gate = kondo.Gate(rate=0.5)
        >>> out = gate(torch.tensor([0.3, -1.0, 2.0, 0.0]))
        >>> out.keep, float(out.price), float(out.rate)
        (tensor([ True, False,  True, False]), 0.30000001192092896, 0.5)

    Reference: https://arxiv.org/abs/2603.20526, Algorithm 1
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        price: float | None = None,
        temperature: float = 0.0,
        soft: bool = False,
        reserve: float = 0.0,
        negative_quota: float = 0.0,
        inverse_propensity: bool = False,
        normalise: bool | Literal["temperature"] = False,
        scale_decay: float = 0.99,
        window: int = 0,
        warmup: int | None = None,
        signal: Signal = delight,
    ):
        self.rate, self.price = check_optional("rate", rate), check_optional("price", price)
        self.temperature = check_number("temperature", temperature)
        self.soft = check_flag("soft", soft)
        self.reserve = check_number("reserve", reserve)
        self.negative_quota = check_number("negative_quota", negative_quota)
        self.inverse_propensity = check_flag("inverse_propensity", inverse_propensity)
        self.normalise, self.signal = normalise, signal
        self.scale_decay = check_number("scale_decay", scale_decay)
        self.window = check_whole("window", window)
        default = max(1, self.window // 4)
        self.warmup = default if warmup is None else check_whole("warmup", warmup)
        self._check_options()
        if warmup is not None and not 1 <= self.warmup <= self.window:
            raise ValueError(
                f"warmup must lie between 1 and window ({window}), got {warmup}; it counts past "
                f"calls of the window."
            )
        self._past = RollingPrice(self.window)
        self._scale = _RunningScale(self.scale_decay)
        self._calls = 0

    def _check_options(self) -> None:
        """Reject options that contradict each other or would have no effect."""
        if (self.rate is None) == (self.price is None):
            raise ValueError(
                f"give exactly one of rate and price, got rate={self.rate}, price={self.price}; "
                f"a rate is turned into a price."
            )
        if self.rate is not None and not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {self.rate}; 0.03 keeps 3%.")
        if self.price is not None and math.isnan(self.price):
            raise ValueError("price must be a number, got nan; 0.0 keeps positive values.")
        if not (self.temperature >= 0.0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature must be finite and >= 0, got {self.temperature}; 0 is the hard gate."
            )
        for name in ("reserve", "negative_quota"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if not isinstance(self.normalise, bool) and self.normalise != "temperature":
            raise ValueError(
                f'normalise must be True, False or "temperature", got {self.normalise!r}.'
            )
        if not 0.0 <= self.scale_decay < 1.0:
            raise ValueError(f"scale_decay must lie in [0, 1), got {self.scale_decay}.")
        if self.window < 0:
            raise ValueError(f"window must be >= 0 calls, got {self.window}; 0 turns it off.")
        for broken, why in self._contradictions():
            if broken:
                raise ValueError(why)

    def _contradictions(self) -> list[tuple[bool, str]]:
        split = self.reserve > 0 or self.negative_quota > 0
        return [
            (
                self.soft and self.temperature == 0,
                "soft needs a temperature > 0, got 0; a hard gate has no soft weights.",
            ),
            (
                split and (self.rate is None or self.temperature > 0 or self.window > 0),
                "reserve and negative_quota divide an exact count: give rate, and leave "
                "temperature and window at 0.",
            ),
            (
                self.inverse_propensity and not self.draws,
                "inverse_propensity needs a draw: give temperature > 0 without soft, or "
                "reserve > 0; a deterministic choice has no probability to divide by.",
            ),
            (
                self.normalise == "temperature" and self.temperature == 0,
                'normalise="temperature" needs a temperature > 0, got 0.',
            ),
            (
                self.normalise is True and self.rate is not None and self.temperature == 0,
                "normalise has no effect on a hard rate, which depends on the order of values "
                "alone; drop it, or give price or temperature.",
            ),
            (
                self.window > 0 and self.rate is None,
                "window turns past values into a price for rate; with a fixed price drop it.",
            ),
        ]

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether units are drawn: by their sigmoid, or for the reserve."""
        return (self.temperature > 0 and not self.soft) or self.reserve > 0

    @property
    def one_price(self) -> bool:  # type: ignore[override]
        """Whether a rate or a price alone decides every unit by itself."""
        split = self.reserve > 0 or self.negative_quota > 0
        return not (self.temperature > 0 or split or self.normalise or self.window > 0)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """Whether a choice changes the running scale or the window."""
        return bool(self.normalise) or self.window > 0

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units. Updates the running scale and window, which `state_dict` saves.

        Args:
            values: [..., M] float32 or float64, no NaN where the mask is True.
            mask: [..., M] bool, True means "counts".
            generator: for Bernoulli draws and the reserve; the default generator if None. Or the
                draws themselves, [..., M] in [0, 1).
        """
        able, num_valid = mask & (values != 0), mask.sum(-1, keepdim=True)
        if self.normalise:
            self._scale.observe(values, able)
        if self.window:
            self._past.prepare(values)
        if self.temperature > 0:
            keep, probability, price = self._sigmoid_choice(values, able, num_valid, generator)
        elif self.rate is None:
            price = self._fixed_price(values)
            keep = able & (values > price.to(values.dtype))
            probability = keep.to(values.dtype)
        else:
            keep, probability, price = self._counted_choice(values, able, num_valid, generator)
        if self.rate is not None:
            price = torch.where(able.any(-1, keepdim=True), price, math.inf)
        if self.window:
            self._past.push(values, able, num_valid)
        self._calls += 1
        if self.window:  # a call in which nothing counts is not remembered
            self._past.count_call(num_valid.any())

        weight = keep.to(values.dtype)
        if self.soft:
            weight, probability = probability, weight  # nothing was drawn
        elif self.inverse_propensity:
            weight = torch.where(keep, 1 / probability, 0.0)
        rate = keep.sum(-1, dtype=torch.float64) / num_valid.squeeze(-1).clamp(min=1)
        return Choice(keep, weight, price.squeeze(-1).double(), rate, probability)

    def _fixed_price(self, values: Tensor) -> Tensor:
        """Return `price` in the signal's units, [..., 1] float64."""
        shape = (*values.shape[:-1], 1)
        price = torch.full(shape, self.price or 0.0, dtype=torch.float64, device=values.device)
        return price * self._scale.latest() if self.normalise is True else price

    def _sigmoid_choice(
        self, values: Tensor, able: Tensor, num_valid: Tensor, generator: Randomness
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keep, probability and price of a gate with a temperature."""
        scaled = bool(self.normalise)
        eta = self.temperature * self._scale.latest() if scaled else self.temperature
        if self.rate is None:
            price = self._fixed_price(values)
        else:
            price = quantiles.solve_price(values, able, self.rate * num_valid.double(), eta)
            if self.window:
                pool, weight = self._past.pooled()
                past = quantiles.solve_price(
                    pool, weight > 0, self._past.budget(self.rate), eta, weight=weight
                )
                price = torch.where(self._past.is_ready(self.rate, self.warmup), past, price)
        if isinstance(eta, Tensor):
            eta = eta.to(values.dtype)
        gate = torch.sigmoid((values - price.to(values.dtype)) / eta)
        # An infinite value is worth, or not worth, any price; inf - inf would be NaN.
        gate = torch.where(values.isinf(), (values > 0).to(values.dtype), gate)
        gate = torch.where(able, gate, 0.0)
        keep = gate > 0 if self.soft else sampling.uniform(gate, generator) < gate
        return keep, gate, price

    def _counted_choice(
        self, values: Tensor, able: Tensor, num_valid: Tensor, generator: Randomness
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keep, probability and price of a hard rate."""
        assert self.rate is not None
        count = sampling.count_for(self.rate, num_valid)
        if self.reserve > 0 or self.negative_quota > 0:
            return self._split_count(values, able, count, generator)
        keep, price = quantiles.highest(values, able, count)
        if self.window:
            past, share = self._past.quantile_price(self.rate)
            assert self._past.calls is not None
            position = torch.arange(values.shape[-1], device=values.device)
            lots = sampling.lottery(position + self._past.calls * _CALL_STRIDE, salt=past)
            rolled = quantiles.above_price(values, able, past, share, lots)
            ready = self._past.is_ready(self.rate, self.warmup)
            keep, price = torch.where(ready, rolled, keep), torch.where(ready, past, price)
        return keep, keep.to(values.dtype), price

    def _split_count(
        self, values: Tensor, able: Tensor, count: Tensor, generator: Randomness
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep exactly `count`: the negatives' quota, then the top, then the random reserve."""
        count = torch.minimum(count, able.sum(-1, keepdim=True))
        num_reserve = _share(self.reserve, count)
        if self.reserve > 0:
            # Rounded to none, a reserve would leave units invisible, and 1 / probability biased.
            least = count > (0 if self.inverse_propensity else 1)
            num_reserve = torch.maximum(num_reserve, least.long())
        negative = able & (values < 0)
        num_negative = torch.minimum(
            _share(self.negative_quota, count), negative.sum(-1, keepdim=True)
        )
        num_negative = torch.minimum(num_negative, count - num_reserve)
        quota, _ = quantiles.highest(values, negative, num_negative)
        top, price = quantiles.highest(values, able & ~quota, count - num_reserve - num_negative)
        keep = quota | top
        probability = keep.to(values.dtype)
        if self.reserve > 0:
            rest = able & ~keep
            draws = sampling.uniform(values, generator)
            drawn, _ = quantiles.highest(-draws, rest, num_reserve)
            chance = num_reserve.double() / rest.sum(-1, keepdim=True).clamp(min=1)
            probability = torch.where(rest, chance.to(values.dtype), probability)
            keep = keep | drawn
        return keep, probability, price

    def positives_needed(self, num_valid: int) -> int | None:
        """Return how many units of positive value settle the choice; None if all units matter.

        Example:
            >>> import kondo
            >>> kondo.Gate(rate=0.03).positives_needed(100)
            3
            >>> kondo.Gate(price=0.0).positives_needed(100)
            0
            >>> kondo.Gate(rate=0.03, reserve=0.1).positives_needed(100) is None
            True
        """
        if self.signal not in (delight, signals.advantage, signals.unit_advantage):
            return None  # the sign may not be the advantage's
        if not self.one_price or (self.price is not None and self.price < 0):
            return None
        return 0 if self.rate is None else sampling.count_for(self.rate, num_valid)

    @property
    def eta(self) -> float:
        """The temperature in the signal's units: with a running scale, at its present value."""
        scale = self.scale if self.normalise else 1.0
        return self.temperature * (1.0 if math.isnan(scale) else scale)

    @property
    def scale(self) -> float:
        """Running root mean square of values other than zero; NaN before any was seen."""
        return self._scale.number()

    def count_call(self) -> None:
        """Note a choice that was made elsewhere for this gate, as by a sketch over ranks."""
        self._calls += 1
        if self.window:
            self._past.count_call()

    def fingerprint(self) -> str:
        """Return options and where the running state is: its counters, not every past value."""
        scale = f"scale {self.scale:.17g} of {self._scale.calls_made()}"
        return f"{self!r} after {self._num_calls()} calls ({scale}, window {self._past.valid()})"

    def _num_calls(self) -> int:
        """Return how many choices were made; a CUDA graph counts only those of the window."""
        return self._calls if self._past.calls is None else int(self._past.calls)

    def state_dict(self) -> dict[str, Any]:
        """Return the running scale and the window: plain tensors and numbers."""
        return {
            "past": self._past.state_dict(),
            "scale": self._scale.state_dict(),
            "calls": self._num_calls(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is not what `state_dict` returns: another structure, tensors that do not
                fit together, NaN, or numbers that are too small. The gate is then as it was.
        """
        check_state("state", state, {"past", "scale", "calls"})
        calls = check_state_count("state['calls']", state["calls"])
        check_past(state["past"])
        _check_scale(state["scale"])
        self._calls = calls
        self._past.load_state_dict(state["past"], self._calls)
        self._scale.load_state_dict(state["scale"])

    def __repr__(self) -> str:
        defaults = Gate(rate=1.0).__dict__
        shown = {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_") and (value != defaults[name] or name == "rate")
        }
        if not self.window:
            shown.pop("warmup", None)
        signal = shown.pop("signal", None)
        inside = [f"{name}={value!r}" for name, value in shown.items() if value is not None]
        inside += [f"signal={name_of(signal)}"] if signal is not None else []
        return f"Gate({', '.join(inside)})"


class _RunningScale:
    """Running root mean square of values that are able, of every leading dimension.

    Before any finite value there is no scale, and no need of one: an infinite value is worth any
    price, or none. `latest` is then 1.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self._mean_square: Tensor | None = None  # [..., 1] float64
        self._calls: Tensor  # [..., 1] int64: calls with a finite value

    def observe(self, values: Tensor, able: Tensor) -> None:
        """Add the values of one call."""
        able = able & values.isfinite()
        number = able.sum(-1, keepdim=True)
        squares = torch.where(able, values, 0.0).double().square().sum(-1, keepdim=True)
        if self._mean_square is None:
            self._mean_square = torch.zeros_like(squares)
            self._calls = torch.zeros_like(number)
        old = self._mean_square = self._mean_square.to(values.device)
        self._calls = self._calls.to(values.device)
        new = self.decay * old + (1 - self.decay) * (squares / number.clamp(min=1))
        old.copy_(torch.where(number > 0, new, old))
        self._calls.add_(number > 0)

    def latest(self) -> Tensor:
        """Return the scale, [..., 1] float64; 1 where nothing was seen."""
        assert self._mean_square is not None
        seen = self._calls > 0
        unbiased = self._mean_square / (1 - self.decay ** self._calls.clamp(min=1).double())
        return torch.where(seen, unbiased.sqrt(), 1.0)

    def number(self) -> float:
        """Return the scale as a number, NaN where nothing was seen."""
        return float(self.latest()) if self.calls_made() else math.nan

    def calls_made(self) -> int:
        """Return how many calls are in the scale."""
        return 0 if self._mean_square is None else int(self._calls.max())

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors; empty before the first call."""
        if self._mean_square is None:
            return {}
        return {"mean_square": self._mean_square.clone(), "calls": self._calls.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._mean_square = state["mean_square"].clone() if state else None
        if state:
            self._calls = state["calls"].clone()


def _check_scale(state: dict[str, Any]) -> None:
    """Raise a ValueError unless it is what `_RunningScale.state_dict` returns, {} included."""
    if state == {}:
        return
    check_state("state['scale']", state, {"mean_square", "calls"})
    parts = (
        check_state_tensor("state['scale']['mean_square']", state["mean_square"], torch.float64),
        check_state_tensor("state['scale']['calls']", state["calls"], torch.int64),
    )
    shapes = [list(part.shape) for part in parts]
    if shapes[0] != shapes[1] or shapes[0][-1] != 1:
        raise ValueError(
            f"state['scale'] must have mean_square and calls of shape [..., 1], got {shapes}; give "
            f"what Gate.state_dict() returned."
        )


def _share(share: float, count: Tensor) -> Tensor:
    return (share * count.double()).round().long()
