"""The Kondo gate: values -> which units are worth a backward pass.

In: values (delight, or another signal) and a mask, [..., M]. Out: keep, weight, price and rate.
Nothing is differentiated. A unit that does not count, or whose value is exactly zero, is never
kept: it has no advantage, or the policy was already certain of it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kondo.arguments import check_flag, check_number, check_optional, check_whole, require
from kondo.core import quantiles, sampling
from kondo.core.base_gate import BaseGate, Choice, Randomness, Signal
from kondo.core.delight import delight
from kondo.core.fingerprint import name_of
from kondo.core.rolling_price import RollingPrice, past_of

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

    The Delightful Policy Gradient, which weights all units by that sigmoid, is a loss:
    `kondo.losses.dg`.

    The value of a unit is its delight, or that of another `signal`. A hard rate keeps at least one
    unit where any value is not zero. No unit of value zero is ever kept, so fewer than the rate are
    kept where the others run out. Ties: see `kondo.core.quantiles.highest`.

    Args:
        rate: fraction of the units that count to keep, in (0, 1].
        price: value a unit must exceed.
        temperature: eta >= 0, softness of the gate; 0 is hard and draws nothing.
        reserve: fraction of the kept units drawn uniformly from those the price would skip, so
            that no unit is invisible for ever; at least one where two or more are kept. With
            `rate` and temperature 0.
        negative_quota: fraction of the kept units taken from those of negative value (negative
            advantage), highest value first: at a low rate a gate otherwise trains on successes
            only. With `rate` and temperature 0.
        inverse_propensity: weight kept units by 1 / probability: unbiased for the dense gradient,
            at the price of variance. Needs a draw: temperature > 0 or reserve > 0.
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
        reserve: float = 0.0,
        negative_quota: float = 0.0,
        inverse_propensity: bool = False,
        window: int = 0,
        warmup: int | None = None,
        signal: Signal = delight,
    ):
        self.rate, self.price = check_optional("rate", rate), check_optional("price", price)
        self.temperature = check_number("temperature", temperature)
        self.reserve = check_number("reserve", reserve)
        self.negative_quota = check_number("negative_quota", negative_quota)
        self.inverse_propensity = check_flag("inverse_propensity", inverse_propensity)
        self.window = check_whole("window", window)
        self.signal = signal
        default = max(1, self.window // 4)
        self.warmup = default if warmup is None else check_whole("warmup", warmup)
        self._check(warmup)
        self._past = RollingPrice(self.window)

    def _check(self, warmup: int | None) -> None:
        """Refuse options that are out of range, contradict each other or would have no effect."""
        rate, price, eta, window = self.rate, self.price, self.temperature, self.window
        require(
            (rate is None) != (price is None),
            f"give exactly one of rate and price, got rate={rate}, price={price}; a rate is turned "
            f"into a price.",
        )
        require(
            rate is None or 0.0 < rate <= 1.0,
            f"rate must lie in (0, 1], got {rate}; 0.03 keeps 3%.",
        )
        require(
            price is None or not math.isnan(price),
            "price must be a number, got nan; 0.0 keeps positive values.",
        )
        require(
            0.0 <= eta < math.inf,
            f"temperature must be finite and >= 0, got {eta}; 0 is the hard gate.",
        )
        for name in ("reserve", "negative_quota"):
            share = getattr(self, name)
            require(0.0 <= share <= 1.0, f"{name} must lie in [0, 1], got {share}.")
        require(window >= 0, f"window must be >= 0 calls, got {window}; 0 turns it off.")
        require(
            not (self.reserve > 0 or self.negative_quota > 0)
            or (rate is not None and eta == 0 and window == 0),
            "reserve and negative_quota divide an exact count: give rate, and leave temperature "
            "and window at 0.",
        )
        require(
            not self.inverse_propensity or eta > 0 or self.reserve > 0,
            "inverse_propensity needs a draw: give temperature > 0 or reserve > 0; a deterministic "
            "choice has no probability to divide by.",
        )
        require(
            window == 0 or rate is not None,
            "window turns past values into a price for rate; with a fixed price drop it.",
        )
        require(
            warmup is None or 1 <= warmup <= window,
            f"warmup must lie between 1 and window ({window}), got {warmup}; it counts past calls "
            f"of the window.",
        )

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units. Moves the window on, which `state_dict` saves.

        Args:
            values: [..., M] float32 or float64, no NaN where the mask is True.
            mask: [..., M] bool, True means "counts".
            generator: for Bernoulli draws and the reserve; the default generator if None. Or the
                draws themselves, [..., M] in [0, 1).
        """
        able, num_valid = mask & (values != 0), mask.sum(-1, keepdim=True)
        if self.window:
            self._past.prepare(values)
        if self.temperature > 0:
            keep, probability, price = self._drawn(values, able, num_valid, generator)
        elif self.rate is None:
            price = self._fixed_price(values)
            keep = able & (values > price.to(values.dtype))
            probability = keep.to(values.dtype)
        else:
            keep, probability, price = self._counted(values, able, num_valid, generator)
        if self.rate is not None:
            price = torch.where(able.any(-1, keepdim=True), price, math.inf)
        if self.window:
            self._past.push(values, able, num_valid)
        weight = keep.to(values.dtype)
        if self.inverse_propensity:
            weight = torch.where(keep, 1 / probability, 0.0)
        rate = keep.sum(-1, dtype=torch.float64) / num_valid.squeeze(-1).clamp(min=1)
        return Choice(keep, weight, price.squeeze(-1).double(), rate, probability)

    def _fixed_price(self, values: Tensor) -> Tensor:
        shape = (*values.shape[:-1], 1)
        return torch.full(shape, self.price or 0.0, dtype=torch.float64, device=values.device)

    def _drawn(
        self, values: Tensor, able: Tensor, num_valid: Tensor, generator: Randomness
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keep, probability and price of a gate with a temperature."""
        eta = self.temperature
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
        chance = torch.sigmoid((values - price.to(values.dtype)) / eta)
        # An infinite value is worth, or not worth, any price; inf - inf would be NaN.
        chance = torch.where(values.isinf(), (values > 0).to(values.dtype), chance)
        chance = torch.where(able, chance, 0.0)
        return sampling.uniform(chance, generator) < chance, chance, price

    def _counted(
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

    def state_dict(self) -> dict[str, Any]:
        """Return the window of past calls; empty without one."""
        return {"past": self._past.state_dict()} if self.window else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is not what `state_dict` returns: another structure, tensors that do not
                fit together, or numbers that are too small. The gate is then as it was.
        """
        if self.window:
            self._past.load_state_dict(past_of(state, "past"))
        else:
            super().load_state_dict(state)

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


def _share(share: float, count: Tensor) -> Tensor:
    return (share * count.double()).round().long()
