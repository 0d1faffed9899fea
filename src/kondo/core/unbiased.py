"""The unbiased gate: draw units in proportion to their value, and weight them by 1 / probability.

    values s -> price t -> probabilities p = s / t, at most 1 -> a draw of fixed size -> weights 1/p

In: values and a mask, [..., M]. Out: keep, weight, price, rate and probability. The price is what a
unit must be worth to be kept for certain. Nothing is differentiated, and nothing is read back.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kondo.core import rules, signals
from kondo.core.contract import BaseGate, Choice, Randomness, Signal, name_of

# An infinite value counts as this many times the largest finite one: it is all but certain.
_INFINITE = 1e9

# Share of a unit by which a number of units may exceed an integer through rounding.
_ROUNDING = 1e-9

# A price that nothing reaches, in multiples of the largest value.
_HIGHEST = 1e150


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

    The noise is the estimate's second moment over the dense one's, if values are in proportion to
    the norms of gradients. With a noise budget there is no rate to tune: where most units have
    values near 0, few are kept.

    The draw is systematic over a random order: exactly K units, each with exactly its probability.
    The same generator gives the same draw, on one process and on many ranks. A unit of value 0 is
    never kept. That is a bias if its gradient is not 0: with a KL penalty in the loss, say, units
    without an advantage have one. `max_weight` does not help there.

    Keep the full denominator (`kondo.Options`): with that of the kept units the mean is another.

    Args:
        rate: fraction of the units that count to keep, in (0, 1].
        noise: second moment of the estimate, as a multiple of the dense one's; at least 1.
        signal: what a unit is worth. By default a proxy of the norm of its gradient, which needs
            log-probs; `kondo.signals.abs_delight` is |U| l, and `kondo.signals.unit_advantage`,
            |U|, needs none.
        max_weight: the largest weight, >= 1. Probabilities are at least 1 / max_weight: p_i =
            min(1, max(1 / max_weight, s_i / t)). Weights are not clipped, so there is no bias; the
            noise is higher, or more units are kept. With `rate` it must be at least 1 / rate.

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

    draws = True
    one_price = True

    def __init__(
        self,
        *,
        rate: float | None = None,
        noise: float | None = None,
        signal: Signal = signals.gradient_norm,
        max_weight: float | None = None,
    ):
        if (rate is None) == (noise is None):
            raise ValueError(
                f"give exactly one of rate and noise, got rate={rate}, noise={noise}; rate=0.1 "
                f"keeps 10%, noise=1.5 keeps what bounds the noise."
            )
        if rate is not None and not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {rate}; 0.1 keeps 10%.")
        if noise is not None and not 1.0 <= noise < math.inf:
            raise ValueError(
                f"noise must be finite and at least 1, got {noise}; 1 keeps everything, 1.5 allows "
                f"half more than dense."
            )
        least = 1.0 if rate is None else 1.0 / rate
        if max_weight is not None and not least <= max_weight < math.inf:
            raise ValueError(
                f"max_weight must be finite and at least {least:g}, got {max_weight}: the mean "
                f"weight of a rate is 1 / rate."
            )
        self.rate, self.noise, self.signal, self.max_weight = rate, noise, signal, max_weight

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units: exactly as many as the rate or the noise says."""
        able, worth, scale = _worth(values, mask)
        parts, floor = _Sums.of(worth, able.double()), self._floor()
        if self.rate is not None:
            count = rules.count_for(self.rate, mask.sum(-1, keepdim=True)).double()
        else:
            assert self.noise is not None
            price = parts.price_of_noise(self.noise, floor)
            size = probability(worth, price, floor).sum(-1, keepdim=True)
            count = (size - _ROUNDING).ceil()
        count = torch.minimum(count, parts.total)
        price, least = parts.price_of(count, floor)
        chance = probability(worth, price, least)
        keep = systematic(chance, count, rules.uniform(values, generator))
        return _weighted(keep, chance, mask, price * scale, values.dtype)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> Tensor:
        """Return the price of the units that some values stand for, [..., 1] float64.

        Args:
            values: [..., V] float.
            weight: [..., V] float, how many units each stands for.
            num_valid: [..., 1], units that count, those of value 0 included.
        """
        able, worth, scale = _worth(values, weight > 0)
        parts = _Sums.of(worth, torch.where(able, weight.double(), 0.0))
        if self.noise is not None:
            return parts.price_of_noise(self.noise, self._floor()) * scale
        assert self.rate is not None
        count = torch.minimum(self.rate * num_valid.double(), parts.total)
        return parts.price_of(count, self._floor())[0] * scale

    def choose_at(self, values: Tensor, mask: Tensor, price: Tensor, draws: Tensor) -> Choice:
        """Choose by a price that is given: every unit by itself, so that their number varies.

        Args:
            values: [..., M] float.
            mask: [..., M] bool.
            price: [..., 1] float, what a unit must be worth to be kept for certain.
            draws: [..., M] uniform on [0, 1).
        """
        worth = torch.where(mask & (values != 0), values.double().abs(), 0.0)
        chance = probability(worth, price.double(), self._floor())
        return _weighted(draws < chance, chance, mask, price.double(), values.dtype)

    def _floor(self) -> float:
        """Return the least probability of a unit that can be kept at all."""
        return 0.0 if self.max_weight is None else 1.0 / self.max_weight

    def __repr__(self) -> str:
        given = f"rate={self.rate!r}" if self.noise is None else f"noise={self.noise!r}"
        if self.max_weight is not None:
            given += f", max_weight={self.max_weight!r}"
        if self.signal is not signals.gradient_norm:
            given += f", signal={name_of(self.signal)}"
        return f"UnbiasedGate({given})"


def probability(worth: Tensor, price: Tensor, floor: Tensor | float = 0.0) -> Tensor:
    """Return p = min(1, max(floor, s / t)), and 0 where s is 0.

    Args:
        worth: [..., M] float64, s >= 0.
        price: [..., 1] float64, t > 0.
        floor: in [0, 1]; one number, or [..., 1].
    """
    bounded = torch.minimum(worth, price) / price
    if isinstance(floor, Tensor) or floor > 0:
        bounded = torch.where(worth > 0, bounded.clamp(min=floor), 0.0)
    return bounded


def systematic(chance: Tensor, count: Tensor, draws: Tensor) -> Tensor:
    """Draw exactly `count` units, each with exactly its probability.

    Units that are not certain are laid end to end in a random order, each as long as its
    probability. Those that hold one of the points u, u + 1, u + 2, ... are drawn.

    The draws decide the order by their ranks, and u by their sum less its integer part. Both are
    independent: the ranks of independent draws say nothing about their sum.

    Args:
        chance: [..., M] float64 in [0, 1], which add up to count.
        count: [..., 1] float64, an integer.
        draws: [..., M], independent and uniform on [0, 1).

    Example:
        >>> import torch
        >>> from kondo.core.unbiased import systematic
        >>> chance = torch.tensor([1.0, 0.25, 0.75]).double()
        >>> systematic(chance, torch.tensor([2.0]), torch.tensor([0.5, 0.1, 0.9])).tolist()
        [True, False, True]
    """
    num_units = chance.shape[-1]
    if num_units == 0:
        return chance > 0
    certain = chance >= 1
    points = count - certain.sum(-1, keepdim=True)
    random = (chance > 0) & ~certain
    order = torch.where(random, draws.double(), -1.0).argsort(dim=-1, stable=True)
    length = torch.where(random, chance, 0.0).gather(-1, order)
    start = draws.double().sum(-1, keepdim=True).frac()
    # How many points lie before the end of each unit. All of them before the end of the last one,
    # and never more, whatever the rounding of a sum.
    passed = torch.minimum((rules.running_sum(length) + start).floor(), points)
    is_last = torch.arange(num_units, device=chance.device) == num_units - 1
    passed = torch.where(is_last, points, passed)
    drawn = passed > torch.nn.functional.pad(passed[..., :-1], (1, 0))
    return certain | torch.zeros_like(certain).scatter(-1, order, drawn)


class _Sums(NamedTuple):
    """Sums over the units of lowest value, from which a price is found exactly.

    As a function of the price t, the expected number of kept units and the second moment,

        sum_i p_i  and  sum_i s_i^2 / p_i,    p_i = min(1, max(f, s_i / t)),

    have one formula between two neighbours among all s_i and s_i / f. There, the units below one
    place are at the floor f, and those from another place on are certain.
    """

    rising: Tensor
    """[..., V] float64, values in ascending order; 0 where there is none."""
    number: Tensor
    """[..., V + 1], units that the first 0, 1, ..., V values stand for."""
    first: Tensor
    """[..., V + 1], the sum of their values."""
    second: Tensor
    """[..., V + 1], the sum of their squares."""

    @classmethod
    def of(cls, worth: Tensor, weight: Tensor) -> "_Sums":
        """Return the sums of values [..., V], each of which stands for `weight` units."""
        rising, order = worth.sort(-1)
        each = weight.gather(-1, order)
        parts = torch.stack([each, each * rising, each * rising.square()])
        return cls(rising, *torch.nn.functional.pad(rules.running_sum(parts), (1, 0)).unbind())

    @property
    def total(self) -> Tensor:
        """[..., 1], units of a value other than 0."""
        return self.number[..., -1:]

    def price_of(self, count: Tensor, floor: float) -> tuple[Tensor, Tensor | float]:
        """Return the price at which `count` units are expected, and the floor that allows it.

        Args:
            count: [..., 1] float64, at most `total`.
            floor: least probability. Lower where so few units do not allow it.
        """
        least: Tensor | float = floor
        if floor:
            least = torch.minimum(torch.full_like(count, floor), count / self.total.clamp(min=1))
        tried, certain, low = self._neighbours(least)
        fixed = self.total - self.number.gather(-1, certain) + least * self.number.gather(-1, low)
        middle = self.first.gather(-1, certain) - self.first.gather(-1, low)
        enough = (tried > 0) & (fixed + middle / tried <= count * (1 + _ROUNDING))
        place = torch.where(enough, tried, math.inf).argmin(-1, keepdim=True)
        bound, fixed, middle = (part.gather(-1, place) for part in (tried, fixed, middle))
        price = torch.where(middle > 0, middle / (count - fixed), bound)
        # Rounding may leave nothing to share out, or less: the bound is then the price.
        price = torch.where(count > fixed, torch.minimum(price, bound), bound)
        return torch.where(price > 0, price, 1.0), least

    def price_of_noise(self, noise: float, floor: float) -> Tensor:
        """Return the highest price at which the second moment is at most `noise` times dense's."""
        tried, certain, low = self._neighbours(floor)
        all_squares = self.second[..., -1:]
        at_floor = self.second.gather(-1, low) / floor if floor else 0.0
        fixed = all_squares - self.second.gather(-1, certain) + at_floor
        middle = self.first.gather(-1, certain) - self.first.gather(-1, low)
        target = noise * all_squares
        enough = (tried > 0) & (fixed + tried * middle >= target * (1 - _ROUNDING))
        place = torch.where(enough, tried, math.inf).argmin(-1, keepdim=True)
        bound, fixed, middle = (part.gather(-1, place) for part in (tried, fixed, middle))
        price = torch.where(middle > 0, (target - fixed) / middle, bound).clamp(min=0)
        price = torch.where(price > 0, torch.minimum(price, bound), bound)
        return torch.where(enough.any(-1, keepdim=True), price, _HIGHEST)

    def _neighbours(self, floor: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Return prices [..., C]; from which place on units are certain; below which at the floor.

        Ties do not matter: a unit that is exactly at a limit is on both sides of it.
        """
        rising = self.rising
        num_values = rising.shape[-1]
        place = torch.arange(num_values + 1, device=rising.device).expand(self.number.shape)
        tried = torch.nn.functional.pad(rising, (0, 1), value=_HIGHEST)
        if not isinstance(floor, Tensor) and floor == 0:
            return tried, place, torch.zeros_like(place)
        floored = rising / floor
        below = torch.searchsorted(rising, (rising * floor).contiguous())
        above = torch.searchsorted(rising, floored.contiguous())
        each = place[..., :-1]
        return (
            torch.cat([tried, floored], -1),
            torch.cat([place, above], -1),
            torch.cat([below, place[..., -1:], each], -1),
        )


def _worth(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which units can be kept, s over its largest value, and that value, [..., 1].

    s is 0 where a unit cannot be kept. Squares of what is at most 1 do not overflow.
    """
    able = mask & (values != 0)
    size = torch.where(able, values.double().abs(), 0.0)
    finite = torch.where(size.isinf(), 0.0, size)
    largest = (
        finite.amax(-1, keepdim=True) if size.shape[-1] else size.new_zeros(*size.shape[:-1], 1)
    )
    scale = torch.where(largest > 0, largest, 1.0)
    return able, torch.where(size.isinf(), _INFINITE, finite / scale), scale


def _weighted(
    keep: Tensor, chance: Tensor, mask: Tensor, price: Tensor, dtype: torch.dtype
) -> Choice:
    """Return the choice with weights 1 / p."""
    choice = Choice.of(keep, mask, price.squeeze(-1), dtype)
    weight = torch.where(keep, 1.0 / chance, 0.0)
    return choice._replace(weight=weight.to(dtype), probability=chance.to(dtype))
