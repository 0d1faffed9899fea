"""Priorities and gates over [P, N] units: P members decide at once, and the host is not asked.

`kondo.Gate` decides one batch and reads numbers back on the way. Here every member has a row of its
own, and nothing is read back, so that a step can be captured in a CUDA graph. The decisions are the
same (tested member by member against `kondo.Gate`).
"""

import math

import torch
from torch import Tensor

from kondo.core.rules import count_for, lottery

TIE_TOLERANCE = 1e-6
"""Priorities this close to the quantile count as ties, as in the author's code."""


def delight(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return chi = U * l, like log_probs; 0 where U = 0 even if l is infinite."""
    surprisal = (-log_probs).clamp_min(0)
    surprisal = torch.where((advantages == 0) & surprisal.isinf(), 0.0, surprisal)
    return advantages * surprisal


def quantile(priority: Tensor, rate: float) -> Tensor:
    """Keep priority >= the batch's (1 - rate)-quantile: ties are kept, zeros take their places.

    The papers' gate. Units of zero priority count when the quantile is taken, and are then not
    paid for: their gradient is zero. With few distinct rewards it keeps more than the rate.

    Args:
        priority: [P, N].
        rate: share of N.

    Returns:
        [P, N] bool.
    """
    count = count_for(rate, priority.shape[1])
    price = priority.topk(count, dim=1).values[:, -1:]
    return (priority >= price - TIE_TOLERANCE) & (priority != 0)


def top(priority: Tensor, rate: float) -> Tensor:
    """Keep exactly round(rate * N) units of highest priority, fewer where the non-zero run out.

    Ties are broken by `kondo.core.pricing.lottery`, as in `kondo.Gate`.

    Returns:
        [P, N] bool.
    """
    num_units = priority.shape[1]
    count = count_for(rate, num_units)
    worth = torch.where(priority == 0, -math.inf, priority)
    available = (priority != 0).sum(dim=1, keepdim=True).clamp(1, count)
    price = worth.topk(count, dim=1).values.gather(1, available - 1)
    lots = lottery(torch.arange(num_units, device=priority.device), salt=price)
    by_lot = lots.argsort(dim=1)
    order = by_lot.gather(1, worth.gather(1, by_lot).argsort(dim=1, descending=True, stable=True))
    keep = torch.zeros_like(priority, dtype=torch.bool)
    keep.scatter_(1, order[:, :count], torch.ones_like(keep[:, :count]))
    return keep & (priority != 0)


def draw(priority: Tensor, rate: float, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Keep unit i with probability sigmoid((chi_i - price) / eta), price solved for the rate.

    Args:
        priority: [P, N].
        rate: expected share of N.
        temperature: [P, 1].
        uniform: [P, N] in (0, 1).

    Returns:
        [P, N] bool.
    """
    price = solve_price(priority, rate * priority.shape[1], temperature)
    gate = torch.sigmoid((priority - price) / temperature)
    return (uniform < gate) & (priority != 0)


def solve_price(priority: Tensor, count: float, temperature: Tensor) -> Tensor:
    """Return the price [P, 1] at which the non-zero units keep `count` in expectation.

    Bisection in float64; minus infinity where a member has no more than `count` such units.
    """
    chi, eta = priority.double(), temperature.double()
    bought = (chi != 0).double()
    total = bought.sum(dim=1, keepdim=True)
    share = (count / total).clamp(max=1 - 1e-12)
    # At chi_max - eta * logit(share) every gate is at most the share, at chi_min at least.
    offset = eta * torch.logit(share)
    low = chi.min(dim=1, keepdim=True).values - offset
    high = chi.max(dim=1, keepdim=True).values - offset
    for _ in range(60):
        middle = (low + high) / 2
        expected = (bought * torch.sigmoid((chi - middle) / eta)).sum(dim=1, keepdim=True)
        low, high = (
            torch.where(expected > count, middle, low),
            torch.where(expected > count, high, middle),
        )
    return torch.where(total <= count, -math.inf, (low + high) / 2).to(priority.dtype)


class Rolling:
    """A price for `rate` from the last `window` steps of each member.

    Until a quarter of the window is filled, and while it holds less non-zero priority than the
    rate buys, the current step sets its own price, as in `kondo.Gate(window=...)`.
    """

    def __init__(self, members: int, num_units: int, rate: float, window: int, like: Tensor):
        self.rate, self.window, self.num_units = rate, window, num_units
        self.past = like.new_zeros(members, window, num_units)
        self.steps = torch.zeros((), dtype=torch.int64, device=like.device)

    def __call__(self, priority: Tensor) -> Tensor:
        """Return which units to keep, [P, N] bool, and remember their priority."""
        filled = self.steps.clamp(max=self.window)
        values = torch.where(self.past == 0, -math.inf, self.past).flatten(1)
        ordered = values.sort(dim=1, descending=True).values
        # In this order, as in `kondo.Gate`: the rounding decides which value is the price.
        budget = self.rate * (self.num_units * filled).double()
        held = (values > -math.inf).sum(dim=1, keepdim=True)
        # The price is the first value, from the top, at which the budget is used up.
        place = (budget.ceil().long() - 1).clamp(min=0).expand(values.shape[0], 1)
        price = ordered.gather(1, place)
        ready = (filled >= max(1, self.window // 4)) & (held > budget)
        keep = torch.where(ready, priority > price, top(priority, self.rate))
        slot = (
            (self.steps % self.window).view(1, 1, 1).expand(self.past.shape[0], 1, self.num_units)
        )
        self.past.scatter_(1, slot, priority.unsqueeze(1))
        self.steps.add_(1)
        return keep & (priority != 0)


def kept_first(keep: Tensor) -> Tensor:
    """Return the units' places [P, N], the kept ones first, otherwise in their order."""
    return keep.byte().argsort(dim=1, descending=True, stable=True)
