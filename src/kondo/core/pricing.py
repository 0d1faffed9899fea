"""Rate -> price: which units a rate buys, and the price that buys it.

In: flat delight of the units that can be bought (they count, and their delight is not zero).
Out: exact top-count choices, solved Bernoulli prices, and a rolling price over past steps.
`torch.quantile` refuses more than 16 million values; nothing here has such a limit.
"""

from typing import Any

import torch
from torch import Tensor

# Odd multipliers of the splitmix64 finaliser, as signed 64-bit integers.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)

# A step stores at most this many values in the rolling window; beyond it, evenly spaced order
# statistics stand for the rest, each with the weight of the values it replaces.
MAX_VALUES_PER_STEP = 1024


def count_for(rate: float, num_units: int) -> int:
    """Return the number of units a rate buys: round(rate * num_units), at least 1."""
    return max(1, round(rate * num_units))


def top(delight: Tensor, count: int, *, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keep exactly `count` units of highest delight.

    Ties at the price are broken by a fixed hash of each unit's position and of the tied value:
    the same input always gives the same choice, no random generator is touched, and every
    position has the same standing, the first no better than the last.

    Args:
        delight: [M] float, no NaN.
        count: how many to keep, 1 <= count <= M.
        position: [M] int64, what the hash is taken of; by default 0 .. M-1.

    Returns:
        keep [M] bool with exactly `count` True, and the price: the lowest delight kept, 0-d.

    Example:
        >>> import torch
        >>> from kondo.core.pricing import top
        >>> top(torch.tensor([0.1, 3.0, -1.0, 2.0]), 2)
        (tensor([False,  True, False,  True]), tensor(2.))
    """
    price = _kth_largest(delight, count)
    keep = delight > price
    tied = (delight == price).nonzero().squeeze(1)
    missing = count - int(keep.sum())
    if missing < tied.numel():
        if position is None:
            position = torch.arange(delight.numel(), device=delight.device)
        # No two positions draw the same lot, so the `missing` lowest are exactly that many.
        lot = ~lottery(position[tied], salt=price)
        tied = tied[lot >= _kth_largest(lot, missing)]
    keep[tied] = True
    return keep, price


def _kth_largest(values: Tensor, k: int) -> Tensor:
    if values.is_cuda:
        # kthvalue searches one row with one block there: 220 ms for 30 million, sort 1.4 ms.
        return values.sort(descending=True).values[k - 1]
    return values.kthvalue(values.numel() - k + 1).values


def lottery(position: Tensor, *, salt: Tensor) -> Tensor:
    """Return a fixed pseudo-random int64 per position: splitmix64 of position and salt.

    The salt is a float, or one per position; its bits enter the hash, so different tied values draw
    different lots.
    """
    bits = salt.double().view(torch.int64)
    return mix_bits((position + bits) * GOLDEN)


def mix_bits(bits: Tensor) -> Tensor:
    """Return splitmix64's finaliser of int64 bits: each bit of the result depends on all of them.

    Multiples of GOLDEN, one per place, become independent-looking numbers.
    """
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    # int64 >> repeats the sign bit: the last step above would then clear it, and no lot would ever
    # fall in the lower half.
    return (bits >> places) & ((1 << (64 - places)) - 1)


def solve_price(
    delight: Tensor, count: float, temperature: float, *, weight: Tensor | None = None
) -> Tensor:
    """Return the price at which the gate keeps `count` units in expectation.

    Solves  sum_i weight_i * sigmoid((chi_i - lambda) / eta) = count  for lambda. The plain
    (1 - rate)-quantile does not: asked for 3% with eta = 1 and std(chi) = 0.1 it keeps 45%.

    The sum falls as lambda rises, so bisection on a bracket that surely holds the root converges;
    Newton's step is taken where it stays inside the bracket.

    Args:
        delight: [M] float, no NaN; infinities are kept or skipped at any price.
        count: expected number to keep, below the sum of weights.
        temperature: eta > 0.
        weight: [M] float, how many units each value stands for; 1 by default.

    Returns:
        lambda, 0-d float64. Minus infinity where count is not below the total: keep everything.

    Example:
        >>> import torch
        >>> from kondo.core.pricing import solve_price
        >>> price = solve_price(torch.zeros(10), 5.0, 1.0)  # sigmoid(-price) = 5/10
        >>> abs(float(price)) < 1e-9
        True
    """
    values = delight.double()
    weights = torch.ones_like(values) if weight is None else weight.double()
    certain = float(weights[values == torch.inf].sum())
    weights, values = weights[values.isfinite()], values[values.isfinite()]
    total, count = float(weights.sum()), count - certain
    if count >= total:
        return values.new_tensor(-torch.inf)
    if count <= 0:
        return values.new_tensor(torch.inf)
    # At lambda = chi_max - eta * logit(count / total) every gate is at most count / total.
    offset = temperature * float(torch.logit(torch.tensor(count / total, dtype=torch.float64)))
    low, high = float(values.min()) - offset, float(values.max()) - offset
    price = (low + high) / 2
    for _ in range(200):
        gate = torch.sigmoid((values - price) / temperature)
        error = float((weights * gate).sum()) - count
        if abs(error) <= 1e-9 * count or not low < high:
            break
        low, high = (price, high) if error > 0 else (low, price)
        slope = float((weights * gate * (1 - gate)).sum()) / temperature
        newton = price + error / slope if slope > 0 else low
        middle = (low + high) / 2
        if middle in (low, high):
            break
        price = newton if low < newton < high else middle
    return values.new_tensor(price)


class RollingWindow:
    """Delight of past steps, from which a price is taken when one batch is too small for a rate.

    Holds at most `size` steps. A step with more than MAX_VALUES_PER_STEP units is summarised by
    that many evenly spaced order statistics, so memory is bounded whatever the batch.
    """

    def __init__(self, size: int):
        self.size = size
        self.values: list[Tensor] = []  # per step: [m] on the CPU, non-zero delight, sorted
        self.bought: list[float] = []  # per step: units each of those values stands for
        self.valid: list[int] = []  # per step: units that counted, zero delight included

    def __len__(self) -> int:
        return len(self.values)

    def push(self, delight: Tensor, num_valid: int) -> None:
        """Add one step: its non-zero delights, and how many units counted."""
        values = delight.sort().values
        stands_for = 1.0
        if values.numel() > MAX_VALUES_PER_STEP:
            stands_for = values.numel() / MAX_VALUES_PER_STEP
            spots = torch.arange(MAX_VALUES_PER_STEP, device=values.device) + 0.5
            values = values[(spots * stands_for).long()]
        self.values = [*self.values, values.cpu()][-self.size :]
        self.bought = [*self.bought, stands_for][-self.size :]
        self.valid = [*self.valid, num_valid][-self.size :]

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Return all values, ascending, and how many units each stands for; both [M]."""
        pool = torch.cat(self.values)
        # float64: float32 sums of many millions of units miss the total by whole units.
        weight = torch.cat(
            [
                torch.full_like(v, w, dtype=torch.float64)
                for v, w in zip(self.values, self.bought, strict=True)
            ]
        )
        order = pool.argsort()
        return pool[order], weight[order]

    def holds(self, rate: float) -> bool:
        """Return whether the window has more non-zero delight than the rate buys."""
        pairs = zip(self.values, self.bought, strict=True)
        return sum(w * v.numel() for v, w in pairs) > rate * sum(self.valid)

    def quantile_price(self, rate: float) -> tuple[float, float]:
        """Return the price for `rate`, and the share of units exactly at the price to keep.

        Keeping every unit above the price and that share of those at it is, over the window,
        rate * valid units; without the share, discrete rewards would overshoot or starve.
        """
        budget = rate * sum(self.valid)
        pool, weight = self.pooled()
        if pool.numel() == 0 or budget >= float(weight.sum()):
            return -torch.inf, 1.0
        above = weight.flip(0).cumsum(0).flip(0) - weight  # of later order statistics; last: 0
        at = int((above < budget).nonzero()[0])
        price = pool[at]
        over = float(weight[pool > price].sum())
        tied = float(weight[pool == price].sum())
        return float(price), min(1.0, (budget - over) / tied)

    def state_dict(self) -> dict[str, list[Any]]:
        """Return plain tensors and numbers, loadable with weights_only=True."""
        return {
            "values": list(self.values),
            "bought": list(self.bought),
            "valid": list(self.valid),
        }

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Restore what `state_dict` saved, keeping the newest `size` steps."""
        # A window of size 0 holds nothing; [-0:] would hold everything.
        values, self.bought, self.valid = (
            list(state[name])[-self.size :] if self.size else []
            for name in ("values", "bought", "valid")
        )
        self.values = [step.cpu() for step in values]  # a checkpoint may be mapped to a GPU
