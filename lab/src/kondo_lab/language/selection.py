"""Rules that choose units by their worth, for P members at once: no contender, no reward.

    top             the highest
    most_variance   those whose values vary most
    buy             what is worth most for a budget of tokens

Nothing is read back from the device, so that a step can be captured in a CUDA graph.
"""

import math

import torch
from torch import Tensor

from kondo.core.rules import lottery

# Halvings of the bracket of a budget's price: float64 has nothing more to say after these.
_HALVINGS = 50
# Each round of filling in buys something or nothing is left to buy; see kondo.lm.budget.
_FILLS = 8
# Relative distance at which two variances are the same number.
_SAME = 1e-9
_TINY = 1e-300


def top(priority: Tensor, counts: Tensor, rate: float, *, position: Tensor | None = None) -> Tensor:
    """Keep the round(rate * units that count) of highest priority; see `kondo.Gate(rate=...)`.

    Fewer where those with a priority other than 0 run out. Unlike `population.choice.top`, the
    number of units that count may differ between members.

    Args:
        priority: [P, M] float.
        counts: [P, M] bool.
        rate: share of the units that count.
        position: [M] int64, what ties are drawn by; by default 0 .. M-1.

    Returns:
        [P, M] bool.
    """
    num_units = priority.shape[1]
    place = torch.arange(num_units, device=priority.device)
    worthy = counts & (priority != 0)
    wanted = (rate * counts.sum(dim=1, keepdim=True).double()).round().long().clamp(min=1)
    taken = torch.minimum(wanted, worthy.sum(dim=1, keepdim=True))
    worth = torch.where(worthy, priority, -math.inf)
    descending = worth.sort(dim=1, descending=True).values
    price = descending.gather(1, (taken - 1).clamp(min=0))
    by_lot = lottery(place if position is None else position, salt=price).argsort(dim=1)
    order = by_lot.gather(1, worth.gather(1, by_lot).argsort(dim=1, descending=True, stable=True))
    return torch.zeros_like(worthy).scatter(1, order, place < taken)


def most_variance(values: Tensor, count: int, ties: Tensor) -> Tensor:
    """Choose the `count` values of the last dimension whose variance is largest.

    They are the k highest and the count - k lowest for some k: all k are tried. Of several k that
    do equally well, that nearest count / 2, the larger of two.

    Args:
        values: [..., M] float.
        count: 1 <= count <= M.
        ties: like values; of equal values those with a high one go with the highest.

    Returns:
        bool like values, exactly `count` True in each row.

    Example:
        >>> import torch
        >>> from kondo_lab.language.selection import most_variance
        >>> rewards = torch.tensor([0.0, 1.0, 0.0, 0.0])
        >>> most_variance(rewards, 2, torch.tensor([0.1, 0.2, 0.9, 0.5])).int().tolist()
        [1, 1, 0, 0]

    Reference: https://arxiv.org/abs/2504.13818
    """
    by_tie = ties.argsort(dim=-1)
    order = by_tie.gather(-1, values.gather(-1, by_tie).argsort(dim=-1, stable=True))
    rising = values.gather(-1, order).double()
    rising = rising - rising.mean(dim=-1, keepdim=True)
    high = torch.arange(count + 1, device=values.device)
    first, second = (
        _sums_from_below(power, count).flip(-1) + _sums_from_below(power.flip(-1), count)
        for power in (rising, rising.square())
    )
    variance = second / count - (first / count).square()
    best = variance.amax(dim=-1, keepdim=True)
    # Twice the distance from the middle, plus one for the smaller of two at the same distance.
    distance = 2 * (2 * high - count).abs() + (2 * high < count)
    num_high = torch.where(variance >= best - _SAME * best.abs(), distance, math.inf).argmin(
        dim=-1, keepdim=True
    )
    place = torch.arange(values.shape[-1], device=values.device)
    chosen = (place < count - num_high) | (place >= values.shape[-1] - num_high)
    return torch.zeros_like(chosen).scatter(-1, order, chosen)


def _sums_from_below(values: Tensor, count: int) -> Tensor:
    """Return the sums of the first 0, 1, ..., count values, [..., count + 1]."""
    return torch.nn.functional.pad(values[..., :count].cumsum(dim=-1), (1, 0))


def buy(delight: Tensor, mask: Tensor, budget: float, prompt_length: int) -> Tensor:
    """Keep what buys the most delight for a budget of differentiated tokens, without asking.

    `kondo.lm.budget` for P members at once, whose module says what is solved. Two starts are filled
    in greedily, and the better is taken: the cuts at a price per token of prefix, found by halving,
    and the one row that is worth most. The product has a third start, and may buy a little more.

    Args:
        delight: [P, N, T], tokens are bought with their prefixes; or [P, N], whole rows.
        mask: [P, N, T] bool.
        budget: share of all tokens, prompts included.
        prompt_length: what a row costs before its first token.

    Returns:
        Kept tokens, [P, N, T] bool.
    """
    lengths = mask.sum(dim=2)
    affordable = (budget * (lengths + prompt_length).sum(dim=1) * (1 + 1e-9)).floor()
    left = affordable.double().view(-1, 1)
    whole_rows = delight.dim() == 2
    worth = torch.where(delight > 0, delight, 0.0).double()
    cost = (lengths if whole_rows else mask.cumsum(dim=2)).double() + prompt_length
    if whole_rows:
        worth, cost = worth.unsqueeze(2), cost.unsqueeze(2)
    cost = torch.nn.functional.pad(cost, (1, 0))
    value = torch.nn.functional.pad(worth.cumsum(dim=2), (1, 0))
    # A cut that the whole budget cannot pay for is no choice.
    value = torch.where(cost <= left.unsqueeze(2), value, -math.inf)
    priced, alone = (
        _fill_in(cost, value, left, start)
        for start in (_cut_at_price(cost, value, left), _single_row(value))
    )
    better = _at(value, alone).sum(dim=1) > _at(value, priced).sum(dim=1)
    cut = torch.where(better.unsqueeze(1), alone, priced)
    inside = torch.arange(worth.shape[2], device=mask.device) < cut.unsqueeze(2)
    return inside & (worth > 0) & mask


def _at(curve: Tensor, cut: Tensor) -> Tensor:
    """Return [P, N]: the curve [P, N, cuts] of every row at its cut."""
    return curve.gather(2, cut.unsqueeze(2)).squeeze(2)


def _cut_at_price(cost: Tensor, value: Tensor, budget: Tensor) -> Tensor:
    """Return the cuts [P, N] that maximise value - mu * cost at the lowest price mu affordable."""
    density = (value / cost.clamp_min(_TINY)).flatten(1)
    low = torch.zeros_like(budget)
    # At twice the highest value per cost every row is best skipped.
    high = 2 * density.amax(dim=1, keepdim=True)

    def cuts(mu: Tensor) -> Tensor:
        return (value - mu.unsqueeze(2) * cost).argmax(dim=2)

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _at(cost, cuts(middle)).sum(dim=1, keepdim=True) <= budget
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    free = cuts(torch.zeros_like(budget))
    all_fits = _at(cost, free).sum(dim=1, keepdim=True) <= budget
    return torch.where(all_fits, free, cuts(high))


def _single_row(value: Tensor) -> Tensor:
    """Return the one cut of the one row that is worth most, [P, N], every other row skipped."""
    values, cuts = value.max(dim=2)
    row = values.argmax(dim=1, keepdim=True)
    return torch.zeros_like(cuts).scatter(1, row, cuts.gather(1, row))


def _fill_in(cost: Tensor, value: Tensor, budget: Tensor, cut: Tensor) -> Tensor:
    """Spend what is left: each row's best affordable step up, the most delight per cost first."""
    for _ in range(_FILLS):
        left = budget - _at(cost, cut).sum(dim=1, keepdim=True)
        extra = cost - _at(cost, cut).unsqueeze(2)
        gain = value - _at(value, cut).unsqueeze(2)
        usable = (gain > 0) & (extra <= left.unsqueeze(2))
        per_cost = torch.where(usable, gain / extra.clamp_min(_TINY), 0.0)
        best, step_up = per_cost.max(dim=2)
        best, order = best.sort(dim=1, descending=True)
        spent = _at(extra, step_up).clamp_min(0).gather(1, order).cumsum(dim=1)
        fits = torch.zeros_like(order, dtype=torch.bool)
        fits = fits.scatter(1, order, (best > 0) & (spent <= left))
        cut = torch.where(fits, step_up, cut)
    return cut
