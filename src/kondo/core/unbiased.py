"""The unbiased gate: draw units in proportion to their value, and weight them by 1 / probability.

    values s -> price t -> probabilities p = s / t, at most 1 -> a draw of fixed size -> weights 1/p

In: values and a mask, [..., M]. Out: keep, weight, price, rate and probability. The price is what a
unit must be worth to be kept for certain. Nothing is differentiated, and nothing is read back.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import check_optional, check_whole, require
from kondo.core import sampling
from kondo.core.base_gate import BaseGate, Choice, Randomness, Signal
from kondo.core.delight import gradient_norm
from kondo.core.fingerprint import name_of
from kondo.core.rolling_price import RollingPrice, past_of

# The largest value, and a price that nothing reaches. Squares of both are finite.
_LARGEST, _HIGHEST = 1e140, 1e150

# Share of a unit by which a number of units may exceed an integer through rounding.
_ROUNDING = 1e-9

# A systematic draw starts this far from either end of [0, 1], where a rounded sum would count.
_EDGE = 1e-9


class UnbiasedGate(BaseGate):
    """Keep a random set of units, whose weighted gradient has the dense gradient as its mean.

    p_i = min(1, s_i / t),   weight_i = 1 / p_i,   sum_i p_i = K

    s_i >= 0 is the absolute value of the signal, and K the number of kept units. Units of high
    value are kept more often, and count for less when they are. So the expected gradient is that of
    all units, whatever the signal: the signal decides only how noisy the estimate is. A gate that
    keeps the highest values is not like that. Give exactly one of `rate` and `noise`:

    | argument     | K                                                                            |
    |--------------|------------------------------------------------------------------------------|
    | `rate=0.1`   | round(rate * units that count), at least 1                                   |
    | `noise=1.5`  | the smallest K with  sum_i s_i^2 / p_i <= noise * sum_i s_i^2                |

    If values are in proportion to the norms of gradients, the noise is the expected sum of squared
    gradients of units over that of all units. It is the second moment of the estimate over the
    dense one's where gradients of units are orthogonal; where they cancel, as in a batch whose mean
    gradient is small, the estimate is noisier than that against its mean. With a noise budget there
    is no rate to tune: where most units have values near 0, few are kept.

    The draw is systematic over a random order: exactly K units, each with exactly its probability.
    The same generator gives the same draw, on one process and on many ranks. A unit of value 0 is
    never kept. That is a bias if its gradient is not 0: with a KL penalty in the loss, say, units
    without an advantage have one. `max_weight` does not help there.

    Keep the full denominator (`kondo.Options`): with that of the kept units the mean is another.

    Args:
        rate: fraction of the units that count to keep, in (0, 1].
        noise: expected sum of squared gradients, as a multiple of that of all units; at least 1.
        signal: what a unit is worth. By default a proxy of the norm of its gradient, which needs
            log-probs; `kondo.signals.abs_delight` is |U| l, and `kondo.signals.advantage`,
            |U|, needs none.
        max_weight: the largest weight, >= 1. Probabilities are at least 1 / max_weight: p_i =
            min(1, max(1 / max_weight, s_i / t)). Weights are not clipped, so there is no bias; the
            noise is higher, or more units are kept. With `rate` it must be at least 1 / rate; a
            number of units that was rounded down is then rounded up where it must be.
        window: for calls with fewer units than a rate can be had of, such as the micro-batches of a
            queue: the price is that of the values of this many calls, the present one included, and
            every unit is drawn by itself. It depends on no draw, so that the mean gradient is still
            the dense one; the number of kept units varies, and may be 0. 0: each call by itself.

    Example:
        >>> import torch, kondo
        >>> gate = kondo.UnbiasedGate(rate=0.5)
        >>> out = gate(torch.tensor([8.0, 1.0, 1.0, 0.0]))
        >>> out.probability, float(out.price)
        (tensor([1.0000, 0.5000, 0.5000, 0.0000]), 2.0)
        >>> int(out.keep.sum()), float(out.weight.sum())
        (2, 3.0)

    Reference: Hansen and Hurwitz 1943, Madow 1949 (systematic sampling with unequal probabilities);
    https://arxiv.org/abs/1803.00942 (probabilities by a bound of the gradient's norm)
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        noise: float | None = None,
        signal: Signal = gradient_norm,
        max_weight: float | None = None,
        window: int = 0,
    ):
        rate, noise = check_optional("rate", rate), check_optional("noise", noise)
        max_weight = check_optional("max_weight", max_weight)
        require(
            (rate is None) != (noise is None),
            f"give exactly one of rate and noise, got rate={rate}, noise={noise}; rate=0.1 keeps "
            f"10%, noise=1.5 keeps what bounds the noise.",
        )
        require(
            rate is None or 0.0 < rate <= 1.0,
            f"rate must lie in (0, 1], got {rate}; 0.1 keeps 10%.",
        )
        require(
            noise is None or 1.0 <= noise < math.inf,
            f"noise must be finite and at least 1, got {noise}; 1 keeps everything, 1.5 allows "
            f"half more than dense.",
        )
        least = 1.0 if rate is None else 1.0 / rate
        require(
            max_weight is None or least <= max_weight < math.inf,
            f"max_weight must be finite and at least {least:g}, got {max_weight}: the mean weight "
            f"of a rate is 1 / rate.",
        )
        self.window = check_whole("window", window)
        require(self.window >= 0, f"window must be 0 or a number of calls, got {window}.")
        self.rate, self.noise, self.signal, self.max_weight = rate, noise, signal, max_weight
        self._past = RollingPrice(self.window)

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units: exactly as many as the rate or the noise says, without a window."""
        if self.window:
            self._past.push(values, mask & (values != 0), mask.sum(-1, keepdim=True))
            pool, weight = self._past.pooled()
            price = self.price_for(pool.nan_to_num(nan=0.0), weight, self._past.budget(1.0))
            return self.choose_at(values, mask, price, sampling.uniform(values, generator))
        worth, floor = _worth(values, mask), self._floor()
        sums, num_valid = _Sums(worth), mask.sum(-1, keepdim=True)
        if self.rate is not None:
            count = sampling.count_for(self.rate, num_valid).double()
        else:
            assert self.noise is not None
            price = sums.price_of_noise(self.noise, floor)
            count = (probability(worth, price, floor).sum(-1, keepdim=True) - _ROUNDING).ceil()
        if floor:  # a rate that was rounded down may be too low for it
            count = torch.maximum(count, (floor * sums.total - _ROUNDING).ceil())
        count = torch.minimum(count, sums.total)
        price = sums.price_of(count, floor)
        chance = probability(worth, price, floor)
        keep = systematic(chance, count, *_order_and_start(values, generator))
        return _weighted(keep, chance, num_valid, price, values.dtype)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> Tensor:
        """Return the price of the units that some values stand for, [..., 1] float64.

        Args:
            values: [..., V] float.
            weight: [..., V] float, how many units each stands for.
            num_valid: [..., 1], units that count, those of value 0 included.
        """
        sums = _Sums(_worth(values, weight > 0), weight.double())
        if self.noise is not None:
            return sums.price_of_noise(self.noise, self._floor())
        assert self.rate is not None
        count = torch.maximum(self.rate * num_valid.double(), self._floor() * sums.total)
        return sums.price_of(torch.minimum(count, sums.total), self._floor())

    def choose_at(self, values: Tensor, mask: Tensor, price: Tensor, draws: Tensor) -> Choice:
        """Choose by a price that is given: every unit by itself, so that their number varies.

        Args:
            values: [..., M] float.
            mask: [..., M] bool.
            price: [..., 1] float, what a unit must be worth to be kept for certain.
            draws: [..., M] uniform on [0, 1).
        """
        chance = probability(_worth(values, mask), price.double(), self._floor())
        num_valid = mask.sum(-1, keepdim=True)
        return _weighted(draws < chance, chance, num_valid, price.double(), values.dtype)

    def _floor(self) -> float:
        """Return the least probability of a unit that can be kept at all."""
        return 0.0 if self.max_weight is None else 1.0 / self.max_weight

    def state_dict(self) -> dict[str, Any]:
        """Return the window of past calls; empty without one."""
        return {"drawn_past": self._past.state_dict()} if self.window else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.window:
            self._past.load_state_dict(past_of(state, "drawn_past"))
        else:
            super().load_state_dict(state)

    def __repr__(self) -> str:
        given = f"rate={self.rate!r}" if self.noise is None else f"noise={self.noise!r}"
        if self.max_weight is not None:
            given += f", max_weight={self.max_weight!r}"
        if self.window:
            given += f", window={self.window}"
        if self.signal is not gradient_norm:
            given += f", signal={name_of(self.signal)}"
        return f"UnbiasedGate({given})"


def probability(worth: Tensor, price: Tensor, floor: float = 0.0) -> Tensor:
    """Return p = min(1, max(floor, s / t)), and 0 where s is 0.

    Args:
        worth: [..., M] float64, s >= 0.
        price: [..., 1] float64, t > 0.
        floor: in [0, 1].
    """
    bounded = torch.minimum(worth, price) / price
    if floor > 0:
        bounded = torch.where(worth > 0, bounded.clamp(min=floor), 0.0)
    return bounded


def systematic(chance: Tensor, count: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """Draw exactly `count` units, each with exactly its probability.

    Units are laid end to end in a random order, each as long as its probability. Those that hold
    one of the points 1 - u, 2 - u, 3 - u, ... are drawn.

    Args:
        chance: [..., M] float64 in [0, 1], which add up to count.
        count: [..., 1] float64, an integer.
        order: [..., M] int64, a permutation.
        start: [..., 1] float64, u, uniform on [0, 1); to nine digits.

    Example:
        >>> import torch
        >>> from kondo.core.unbiased import systematic
        >>> chance, order = torch.tensor([1.0, 0.25, 0.75]).double(), torch.tensor([1, 2, 0])
        >>> systematic(chance, torch.tensor([2.0]), order, torch.tensor([0.5])).tolist()
        [True, False, True]
    """
    ends = sampling.running_sum(chance.gather(-1, order))
    # The last end is exactly the number of points, so that rounding adds and loses no unit.
    ends = ends * (count / ends[..., -1:])
    passed = (ends + (_EDGE + (1 - 2 * _EDGE) * start)).floor()
    drawn = passed > torch.nn.functional.pad(passed[..., :-1], (1, 0))
    return torch.zeros_like(drawn).scatter(-1, order, drawn) | (chance >= 1)


def _order_and_start(like: Tensor, generator: Randomness) -> tuple[Tensor, Tensor]:
    """Return a random order [..., M] and a start [..., 1].

    From draws that were made already, the order is by their ranks, and the start is their sum less
    its integer part: ranks of independent draws say nothing about their sum.
    """
    if isinstance(generator, Tensor) or like.ndim > 1:
        draws = sampling.uniform(like, generator)
        start = draws.sum(-1, keepdim=True, dtype=torch.float64).frac()
        return draws.argsort(dim=-1, stable=True), start
    device = like.device if generator is None else generator.device
    order = torch.randperm(like.shape[-1], generator=generator, device=device)
    return order.to(like.device), sampling.uniform(like[:1].double(), generator)


class _Running(NamedTuple):
    """Values in order, and sums over the lowest of them."""

    rising: Tensor
    """[..., V] float64, values in ascending order; 0 where there is none."""
    number: Tensor
    """[..., V + 1], units that the first 0, 1, ..., V values stand for."""
    first: Tensor
    """[..., V + 1], the sum of their values."""
    second: Tensor
    """[..., V + 1], the sum of their squares."""

    def neighbours(self, floor: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return prices [..., C]; from which place on units are certain; below which at the floor.

        Places are None for 0, 1, ..., V and for no floor. Ties do not matter: a unit that is
        exactly at a limit is on both sides of it.
        """
        rising = self.rising
        tried = torch.nn.functional.pad(rising, (0, 1), value=_HIGHEST)
        if not floor:
            return tried, None, None
        place = torch.arange(rising.shape[-1] + 1, device=rising.device).expand(tried.shape)
        floored = rising / floor
        below = torch.searchsorted(rising, (rising * floor).contiguous())
        above = torch.searchsorted(rising, floored.contiguous())
        return (
            torch.cat([tried, floored], -1),
            torch.cat([place, above], -1),
            torch.cat([below, place[..., -1:], place[..., :-1]], -1),
        )


class _Sums:
    """Sums over the units of lowest value, from which a price is found exactly.

    As a function of the price t, the expected number of kept units and the second moment,

        sum_i p_i  and  sum_i s_i^2 / p_i,    p_i = min(1, max(f, s_i / t)),

    have one formula between two neighbours among all s_i and s_i / f. There, the units below one
    place are at the floor f, and those from another place on are certain.

    Args:
        worth: [..., V] float64, s >= 0.
        weight: [..., V] float64, how many units each stands for; 1 by default.
    """

    def __init__(self, worth: Tensor, weight: Tensor | None = None):
        self._worth = worth
        each = (worth > 0).double()
        self._each = each if weight is None else each * weight
        self.total = self._each.sum(-1, keepdim=True)
        """[..., 1], units of a value other than 0."""

    @functools.cached_property
    def _first(self) -> Tensor:
        """The sum of all values, [..., 1]."""
        return (self._each * self._worth).sum(-1, keepdim=True)

    @functools.cached_property
    def _running(self) -> _Running:
        """Sums over the lowest 0, 1, ..., V values."""
        rising, order = self._worth.sort(-1)
        each = self._each.gather(-1, order)
        parts = torch.stack([each, each * rising, each * rising.square()])
        sums = torch.nn.functional.pad(sampling.running_sum(parts), (1, 0))
        return _Running(rising, *sums.unbind())

    def _none_is_certain(self, price: Tensor) -> bool:
        """Whether no value exceeds a price, as far as that can be known for free."""
        if not (sampling.reads_are_free() and self._worth.shape[-1]):
            return False
        return bool((self._worth.amax(-1, keepdim=True) <= price).all())

    def price_of(self, count: Tensor, floor: float) -> Tensor:
        """Return the price at which `count` units are expected, [..., 1].

        Args:
            count: [..., 1] float64, between floor * total and total.
            floor: least probability.
        """
        even = self._first / count
        if not floor and self._none_is_certain(even):
            return even
        running = self._running
        tried, certain, low = running.neighbours(floor)
        fixed, middle = self.total - _at(running.number, certain), _at(running.first, certain)
        if low is not None:
            fixed = fixed + floor * _at(running.number, low)
            middle = middle - _at(running.first, low)
        enough = fixed + middle / tried <= count * (1 + _ROUNDING)
        bound, fixed, middle = _lowest(enough, tried, fixed, middle)
        # Rounding may leave nothing to share out: the bound is then the price.
        shared = (middle > 0) & (count > fixed)
        return torch.where(shared, torch.minimum(middle / (count - fixed), bound), bound)

    def price_of_noise(self, noise: float, floor: float) -> Tensor:
        """Return the highest price at which the second moment is at most `noise` times dense's."""
        dense = (self._each * self._worth.square()).sum(-1, keepdim=True)
        even = noise * dense / self._first
        if not floor and self._none_is_certain(even):
            return even
        running = self._running
        tried, certain, low = running.neighbours(floor)
        fixed, middle = dense - _at(running.second, certain), _at(running.first, certain)
        if low is not None:
            fixed = fixed + _at(running.second, low) / floor
            middle = middle - _at(running.first, low)
        enough = fixed + tried * middle >= noise * (1 - _ROUNDING) * dense
        bound, fixed, middle = _lowest(enough & (tried > 0), tried, fixed, middle)
        missing = noise * dense - fixed
        shared = (middle > 0) & (missing > 0)
        price = torch.where(shared, torch.minimum(missing / middle, bound), bound)
        return torch.where(enough.any(-1, keepdim=True), price, _HIGHEST)


def _at(sums: Tensor, place: Tensor | None) -> Tensor:
    return sums if place is None else sums.gather(-1, place)


def _lowest(enough: Tensor, tried: Tensor, fixed: Tensor, middle: Tensor) -> list[Tensor]:
    """Return price and sums, [..., 1], at the lowest price that is enough."""
    place = torch.where(enough, tried, math.inf).argmin(-1, keepdim=True)
    return [part.gather(-1, place) for part in (tried, fixed, middle)]


def _worth(values: Tensor, mask: Tensor) -> Tensor:
    """Return s, float64: the size of a value, and 0 where a unit cannot be kept.

    Bounded, so that squares do not overflow. An infinite value is all but certain.
    """
    return torch.where(mask, values.double().abs(), 0.0).clamp(max=_LARGEST)


def _weighted(
    keep: Tensor, chance: Tensor, num_valid: Tensor, price: Tensor, dtype: torch.dtype
) -> Choice:
    """Return the choice with weights 1 / p."""
    rate = keep.sum(-1, keepdim=True, dtype=torch.float64) / num_valid.clamp(min=1)
    return Choice(
        keep=keep,
        weight=torch.where(keep, 1.0 / chance, 0.0).to(dtype),
        price=torch.where(price < _HIGHEST, price, math.inf).squeeze(-1),
        rate=rate.squeeze(-1),
        probability=chance.to(dtype),
    )
