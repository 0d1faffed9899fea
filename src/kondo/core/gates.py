"""The Kondo gate: delight -> which units are worth a backward pass.

In: delight of any shape and a mask. Out: keep, weight, price and rate. Nothing is differentiated.
A unit that does not count, or whose delight is exactly zero, is never kept: it has no advantage, or
the policy was already certain of it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, check_mask, first_unit
from kondo.core.pricing import RollingWindow, count_for, lottery, solve_price, top

# Up to this many units a CUDA batch is decided on the CPU: a gate's dozen small operations cost
# microseconds there, on a GPU a launch each and often a wait.
_FEW_UNITS = 65_536


class GateOutput(NamedTuple):
    """What a gate decided. Tensors have delight's shape; price and rate are 0-d."""

    keep: Tensor
    """bool: the unit is worth a backward pass."""
    weight: Tensor
    """float: factor of the unit's loss; 0 where not kept."""
    price: Tensor
    """0-d float64, in units of delight: below it a unit is skipped. Infinite if a rate finds
    nothing worth keeping; minus infinity where a gate has no price."""
    rate: Tensor
    """0-d float64: kept units / units that count. 0 if nothing counts."""
    probability: Tensor
    """float: chance that the unit was kept; 0 or 1 where nothing was drawn."""


class _Choice(NamedTuple):
    """A decision over the M units that can be bought."""

    keep: Tensor
    probability: Tensor
    price: float


class Gate:
    """Decide which units are worth a backward pass. Give exactly one of `rate` and `price`.

    | arguments                       | keeps                                                     |
    |---------------------------------|-----------------------------------------------------------|
    | `rate=0.03`                     | exactly round(rate * units that count) of highest delight |
    | `price=0.0`                     | delight > price                                           |
    | `rate=0.03, temperature=0.1`    | Bernoulli(sigmoid((chi - price) / eta)), price solved so  |
    |                                 | that the expected rate is the one asked for               |
    | `price=0.0, temperature=0.1`    | the same draw at that price                               |
    | `..., temperature=1, soft=True` | everything, weighted by that sigmoid (price 0: DG)        |

    A hard rate keeps at least one unit where any has non-zero delight. No gate keeps one with zero
    delight, so fewer than the rate are kept where the others run out. Ties: see
    `kondo.core.pricing.top`.

    Args:
        rate: fraction of the units that count to keep, in (0, 1].
        price: delight a unit must exceed.
        temperature: eta >= 0, softness of the gate; 0 is hard and draws nothing.
        soft: weight every unit by its sigmoid instead of drawing. Saves no backward pass.
        reserve: fraction of the kept units drawn uniformly from those the price would skip, so
            that no unit is invisible for ever; at least one where two or more are kept. With
            `rate` and temperature 0.
        negative_quota: fraction of the kept units taken from those with negative delight (negative
            advantage), highest delight first: at a low rate a gate otherwise trains on successes
            only. With `rate` and temperature 0.
        inverse_propensity: weight kept units by 1 / probability: unbiased for the dense gradient,
            at the price of variance. Needs a draw: temperature > 0 or reserve > 0.
        normalise: read `price` and `temperature` as multiples of delight's running scale. The
            scale is the root mean square of non-zero delight; it is never centred, since that
            would move the sign, which carries the meaning.
        relative_temperature: read `temperature` alone as a multiple of the running scale.
        scale_decay: decay of the running scale per call; 0 uses the current call alone.
        window: take the price for `rate` from this many past calls instead of from the current
            one, for batches too small to hold a rate. Then the count varies and may be zero.
        warmup: past calls needed before the window sets the price; until then, and where the
            window holds less non-zero delight than the rate buys, the current call does. By
            default a quarter of the window.

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
        normalise: bool = False,
        relative_temperature: bool = False,
        scale_decay: float = 0.99,
        window: int = 0,
        warmup: int | None = None,
    ):
        self.rate, self.price, self.temperature = rate, price, temperature
        self.soft, self.reserve, self.negative_quota = soft, reserve, negative_quota
        self.inverse_propensity = inverse_propensity
        self.normalise, self.relative_temperature = normalise, relative_temperature
        self.scale_decay, self.window = scale_decay, window
        self.warmup = max(1, window // 4) if warmup is None else warmup
        self._check_options()
        if warmup is not None and not 1 <= warmup <= window:
            raise ValueError(
                f"warmup must lie between 1 and window ({window}), got {warmup}; it counts past "
                f"calls of the window."
            )
        self._past = RollingWindow(window)
        self._mean_square = 0.0
        self._scale_calls = 0
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
            raise ValueError("price must be a number, got nan; 0.0 keeps positive delight.")
        if not (self.temperature >= 0.0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature must be finite and >= 0, got {self.temperature}; 0 is the hard gate."
            )
        for name in ("reserve", "negative_quota"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if not 0.0 <= self.scale_decay < 1.0:
            raise ValueError(f"scale_decay must lie in [0, 1), got {self.scale_decay}.")
        if self.window < 0:
            raise ValueError(f"window must be >= 0 calls, got {self.window}; 0 turns it off.")
        for broken, why in self._contradictions():
            if broken:
                raise ValueError(why)

    def _contradictions(self) -> list[tuple[bool, str]]:
        split = self.reserve > 0 or self.negative_quota > 0
        draws = (self.temperature > 0 and not self.soft) or self.reserve > 0
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
                self.inverse_propensity and not draws,
                "inverse_propensity needs a draw: give temperature > 0 without soft, or "
                "reserve > 0; a deterministic choice has no probability to divide by.",
            ),
            (
                self.relative_temperature and self.temperature == 0,
                "relative_temperature needs a temperature > 0, got 0.",
            ),
            (
                self.normalise and self.relative_temperature,
                "normalise already scales the temperature; give only one of normalise and "
                "relative_temperature.",
            ),
            (
                self.normalise and self.rate is not None and self.temperature == 0,
                "normalise has no effect on a hard rate, which depends on the order of delight "
                "alone; drop it, or give price or temperature.",
            ),
            (
                self.window > 0 and self.rate is None,
                "window turns past delight into a price for rate; with a fixed price drop it.",
            ),
        ]

    @torch.no_grad()
    def __call__(
        self,
        delight: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GateOutput:
        """Gate one batch. Updates the running scale and window, which `state_dict` saves.

        Args:
            delight: [...] float, from `kondo.delight` or a function of `kondo.priorities`.
            mask: like delight, bool, True means "counts".
            generator: for Bernoulli draws and the reserve; the default generator if None.

        Raises:
            ValueError: NaN in a unit that counts.
        """
        chi, valid = flat_units(delight, mask)
        index = (valid & (chi != 0)).nonzero().squeeze(1)
        chi = chi[index]
        num_valid = int(valid.sum())
        self._observe_scale(chi)
        choice = self._choose(chi, index, num_valid, generator)
        if self.window and num_valid:
            self._past.push(chi, num_valid)
        self._calls += 1

        weight, probability = choice.keep.to(chi.dtype), choice.probability
        if self.soft:
            weight, probability = probability, weight  # nothing was drawn
        elif self.inverse_propensity:
            weight = torch.where(choice.keep, 1 / probability, 0.0)
        rate = int(choice.keep.sum()) / num_valid if num_valid else 0.0

        found = torch.stack([weight, probability])
        flat = found.new_zeros(2, valid.numel()).index_copy_(1, index, found)
        weight, probability = to_device(flat, delight.device).view(2, *delight.shape)
        return GateOutput(
            keep=weight != 0,  # whatever is kept has a weight
            weight=weight,
            price=torch.tensor(choice.price, dtype=torch.float64),
            rate=torch.tensor(rate, dtype=torch.float64),
            probability=probability,
        )

    def positives_needed(self, num_valid: int) -> int | None:
        """Return how many units of positive delight settle the decision; None if all units matter.

        Delight has the sign of the advantage. With that many positive units in the batch, nothing
        with advantage <= 0 can be kept, and its log-probs need not be known: a screen may leave it
        out.

        Args:
            num_valid: units that count.

        Example:
            >>> import kondo
            >>> kondo.Gate(rate=0.03).positives_needed(100)
            3
            >>> kondo.Gate(price=0.0).positives_needed(100)
            0
            >>> kondo.Gate(rate=0.03, reserve=0.1).positives_needed(100) is None
            True
        """
        looks_at_all = (
            self.temperature > 0
            or self.reserve > 0
            or self.negative_quota > 0
            or self.window > 0
            or self.normalise
        )
        if looks_at_all or (self.price is not None and self.price < 0):
            return None
        return 0 if self.rate is None else count_for(self.rate, num_valid)

    @property
    def eta(self) -> float:
        """The temperature in units of delight: with a running scale, at its present value."""
        scaled = self.normalise or self.relative_temperature
        return self.temperature * (self.scale if scaled and self._scale_calls else 1.0)

    @property
    def scale(self) -> float:
        """Running root mean square of non-zero delight; NaN before any was seen."""
        if self._scale_calls == 0:
            return math.nan
        unbiased = self._mean_square / (1 - self.scale_decay**self._scale_calls)
        return math.sqrt(unbiased)

    def _observe_scale(self, chi: Tensor) -> None:
        if not (self.normalise or self.relative_temperature):
            return
        finite = chi[chi.isfinite()]
        if finite.numel() == 0:
            return
        decay, mean_square = self.scale_decay, float(finite.double().square().mean())
        self._mean_square = decay * self._mean_square + (1 - decay) * mean_square
        self._scale_calls += 1

    def _choose(
        self, chi: Tensor, index: Tensor, num_valid: int, generator: torch.Generator | None
    ) -> _Choice:
        # Before any finite delight there is no scale, and no need of one: infinite delight is
        # worth any price, or none.
        scale = self.scale if self._scale_calls else 1.0
        temperature = self.eta
        fixed = None if self.price is None else self.price * (scale if self.normalise else 1.0)
        if chi.numel() == 0:
            return _Choice(chi > 0, chi, math.inf if fixed is None else fixed)
        rolling = self.rate is not None and self._window_is_ready(self.rate)
        if temperature > 0:
            price = (
                self._solved_price(chi, num_valid, temperature, rolling) if fixed is None else fixed
            )
            return self._sigmoid_choice(chi, price, temperature, generator)
        if fixed is not None:
            return _certain(chi > fixed, chi, fixed)
        assert self.rate is not None
        if rolling:
            price, share = self._past.quantile_price(self.rate)
            lot = lottery(index + self._calls * 0x9E3779B1, salt=chi.new_tensor(price)).double()
            lucky = (lot / 2.0**64 + 0.5) < share
            return _certain((chi > price) | ((chi == price) & lucky), chi, price)
        count = min(count_for(self.rate, num_valid), chi.numel())
        return self._split_count(chi, index, count, generator)

    def _window_is_ready(self, rate: float) -> bool:
        """Past calls with next to no delight say nothing of a price: this call then sets its own,
        or the first batch after a dead stretch would be kept whole."""
        return self.window > 0 and len(self._past) >= self.warmup and self._past.holds(rate)

    def _solved_price(
        self, chi: Tensor, num_valid: int, temperature: float, rolling: bool
    ) -> float:
        assert self.rate is not None
        if rolling:
            pool, weight = self._past.pooled()
            return float(
                solve_price(pool, self.rate * sum(self._past.valid), temperature, weight=weight)
            )
        return float(solve_price(chi, self.rate * num_valid, temperature))

    def _sigmoid_choice(
        self, chi: Tensor, price: float, temperature: float, generator: torch.Generator | None
    ) -> _Choice:
        gate = torch.sigmoid((chi - price) / temperature)
        # An infinite delight is worth, or not worth, any price; inf - inf would be NaN.
        gate = torch.where(chi.isinf(), (chi > 0).to(chi.dtype), gate)
        if self.soft:
            return _Choice(gate > 0, gate, price)
        return _Choice(_uniform(gate, generator) < gate, gate, price)

    def _split_count(
        self, chi: Tensor, index: Tensor, count: int, generator: torch.Generator | None
    ) -> _Choice:
        """Keep exactly `count`: the negatives' quota, then the top, then the random reserve."""
        if self.reserve == self.negative_quota == 0:
            keep, lowest = top(chi, count, position=index)
            return _certain(keep, chi, float(lowest))
        num_reserve = round(self.reserve * count)
        if self.reserve > 0 and (count > 1 or self.inverse_propensity):
            # Rounded to none, a reserve would leave units invisible, and 1 / probability biased.
            num_reserve = max(1, num_reserve)
        keep = torch.zeros_like(chi, dtype=torch.bool)
        negative = (chi < 0).nonzero().squeeze(1)
        num_negative = min(round(self.negative_quota * count), negative.numel())
        num_negative = min(num_negative, count - num_reserve)
        price = math.inf
        if num_negative:
            quota, _ = top(chi[negative], num_negative, position=index[negative])
            keep[negative[quota]] = True
        if num_top := count - num_reserve - num_negative:
            rest = (~keep).nonzero().squeeze(1)
            best, lowest = top(chi[rest], num_top, position=index[rest])
            keep[rest[best]] = True
            price = float(lowest)
        choice = _certain(keep, chi, price)
        if num_reserve:
            rest = (~keep).nonzero().squeeze(1)
            drawn = _uniform(chi[rest], generator).argsort()[:num_reserve]
            keep[rest[drawn]] = True
            choice.probability[rest] = num_reserve / rest.numel()
        return choice

    def state_dict(self) -> dict[str, Any]:
        """Return the running scale and the window: plain tensors and numbers."""
        return {
            "past": self._past.state_dict(),
            "mean_square": self._mean_square,
            "scale_calls": self._scale_calls,
            "calls": self._calls,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(
                f"state must have the keys {sorted(expected)}, got {sorted(state)}; "
                f"give what Gate.state_dict() returned."
            )
        self._past.load_state_dict(state["past"])
        self._mean_square = float(state["mean_square"])
        self._scale_calls = int(state["scale_calls"])
        self._calls = int(state["calls"])

    def __repr__(self) -> str:
        defaults = Gate(rate=1.0).__dict__
        shown = {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_") and (value != defaults[name] or name == "rate")
        }
        if not self.window:
            shown.pop("warmup", None)
        inside = ", ".join(f"{k}={v!r}" for k, v in shown.items() if v is not None)
        return f"Gate({inside})"


def flat_units(delight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return flat delight and which units count, after checking that those hold no NaN."""
    chi = at_least_float32(check_float("delight", delight).detach())
    mask = check_mask(mask, delight.shape)
    valid = torch.ones_like(chi, dtype=torch.bool) if mask is None else mask
    if chi.is_cuda and chi.numel() <= _FEW_UNITS:
        chi, valid = chi.cpu(), valid.cpu()
    broken = chi.isnan() & valid
    if bool(broken.any()):
        raise ValueError(
            f"delight must not be NaN where the mask is True, got NaN in {first_unit(broken)} "
            f"({int(broken.sum())} in all); find the NaN log-prob or advantage, or mask the unit."
        )
    return chi.reshape(-1), valid.reshape(-1)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for it."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _certain(keep: Tensor, chi: Tensor, price: float) -> _Choice:
    return _Choice(keep, keep.to(chi.dtype), price)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw U[0, 1) in like's shape on its device, from a generator of any device."""
    device = like.device if generator is None else generator.device
    # float64: a float32 draw is exactly 0 once in 2^24, below any probability however small.
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device=device).to(
        like.device
    )
