"""Which units are highest, vary most, or lie above a price: each rule is written once, here.

    highest          that many of the highest values, ties by lot
    solve_price      the price at which a gate with a temperature keeps that many in expectation
    most_variance    that many whose values vary most
    quantile_price   the price above which a number of weighted units lie
    above_price      what is above a price, and a share of the ties at it

Units stand in the last dimension, [..., M]; leading dimensions are separate choices. Nothing is
read back from the device and no shape depends on data, so that one batch, a population of many
members and a CUDA graph call the same functions. `able` says which units can be chosen at all.
"""

import math

import torch
from torch import Tensor

from kondo.core.sampling import lottery, reads_are_free, running_sum, uniform_of

_LAST_LOT = torch.iinfo(torch.int64).max

# Above this many units in CPU memory an order statistic is searched for instead of sorted for. The
# search needs its place as a number, which costs nothing to read there.
_MANY_UNITS = 65_536

# Halvings of a price's bracket: float64 resolves nothing beyond these.
_HALVINGS = 60

# Relative distance at which two variances are the same number.
_SAME = 1e-9


def highest(
    values: Tensor, able: Tensor, count: Tensor | int, position: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keep exactly `count` units of highest value, fewer where those that are able run out.

    Ties at the price are broken by a fixed hash of each unit's position and of the tied value:
    the same input always gives the same choice, no random generator is touched, and every
    position has the same standing, the first no better than the last.

    Args:
        values: [..., M] float, no NaN where able.
        able: [..., M] bool.
        count: how many to keep, >= 0; one number, or [..., 1] int64.
        position: [..., M] int64, what the hash is taken of; by default 0 .. M-1.

    Returns:
        keep [..., M] bool, and the price [..., 1]: the lowest value kept, infinite if none is.

    Example:
        >>> import torch
        >>> from kondo.core.quantiles import highest
        >>> values = torch.tensor([0.1, 3.0, -1.0, 2.0])
        >>> highest(values, torch.ones(4, dtype=torch.bool), 2)
        (tensor([False,  True, False,  True]), tensor([2.]))
    """
    num_units = values.shape[-1]
    if num_units == 0:
        return able, values.new_full((*values.shape[:-1], 1), math.inf)
    worth = torch.where(able, values, -math.inf)
    place = _as_count(count, worth)
    edge = -_kth_smallest(-worth, place.clamp(1, num_units))
    above = worth > edge
    tied = able & (worth == edge) & (place > 0)
    missing = place - above.sum(-1, keepdim=True)
    if reads_are_free() and bool((tied.sum(-1, keepdim=True) <= missing).all()):
        keep = (above & (place > 0)) | tied  # no tie to break
        return keep, torch.where(keep, values, math.inf).amin(-1, keepdim=True)
    if position is None:
        position = torch.arange(num_units, device=values.device)
    # No two positions draw the same lot, so the `missing` lowest are exactly that many.
    lots = torch.where(tied, lottery(position, salt=edge), _LAST_LOT)
    last = _kth_smallest(lots, missing.clamp(1, num_units))
    keep = (above & (place > 0)) | (tied & (lots <= last))
    return keep, torch.where(keep, values, math.inf).amin(-1, keepdim=True)


def _as_count(count: Tensor | int, like: Tensor) -> Tensor:
    if isinstance(count, Tensor):
        return count
    return torch.full((*like.shape[:-1], 1), count, dtype=torch.int64, device=like.device)


def _kth_smallest(values: Tensor, k: Tensor) -> Tensor:
    """Return the k-th smallest, 1 <= k <= M, [..., 1]."""
    if values.device.type == "cpu" and values.ndim == 1 and values.numel() > _MANY_UNITS:
        return values.kthvalue(int(k), keepdim=True).values
    # On CUDA kthvalue searches a row with one block: 220 ms for 30 million, sort 1.4 ms.
    return values.sort(-1).values.gather(-1, k - 1)


def solve_price(
    values: Tensor,
    able: Tensor,
    count: Tensor | float,
    temperature: Tensor | float,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the price at which a gate keeps `count` units in expectation.

    Solves  sum_i weight_i * sigmoid((chi_i - lambda) / eta) = count  for lambda. The plain
    (1 - rate)-quantile does not: asked for 3% with eta = 1 and std(chi) = 0.1 it keeps 45%.

    The sum falls as lambda rises: a bracket that surely holds the root is halved in float64.

    Args:
        values: [..., M] float, no NaN where able; infinities are kept or skipped at any price.
        able: [..., M] bool.
        count: expected number to keep; one number, or [..., 1].
        temperature: eta > 0; one number, or [..., 1].
        weight: [..., M] float, how many units each value stands for; 1 by default.

    Returns:
        lambda, [..., 1] float64. Minus infinity where all that is able does not exceed count: keep
        everything. Infinite where infinite values alone make up the count.

    Example:
        >>> import torch
        >>> from kondo.core.quantiles import solve_price
        >>> price = solve_price(torch.zeros(10), torch.ones(10, dtype=torch.bool), 5.0, 1.0)
        >>> abs(float(price)) < 1e-9  # sigmoid(-price) = 5/10
        True
    """
    chi = values.double()
    each = able.double() if weight is None else torch.where(able, weight.double(), 0.0)
    finite = able & chi.isfinite()
    certain = torch.where(chi == math.inf, each, 0.0).sum(-1, keepdim=True)
    each = torch.where(finite, each, 0.0)
    total, count = each.sum(-1, keepdim=True), count - certain
    eta = temperature.double() if isinstance(temperature, Tensor) else temperature
    if chi.shape[-1] == 0:
        return torch.where(total <= count, -math.inf, math.inf)
    # At chi_max - eta * logit(count / total) every gate is at most count / total.
    offset = eta * torch.logit((count / total).clamp(1e-300, 1 - 1e-12))
    low = torch.where(finite, chi, math.inf).amin(-1, keepdim=True) - offset
    high = torch.where(finite, chi, -math.inf).amax(-1, keepdim=True) - offset
    chi = torch.where(finite, chi, 0.0)
    low, high = _narrowed(low, high, chi, each, eta, count)
    price = torch.where(count <= 0, math.inf, (low + high) / 2)
    return torch.where(total <= count, -math.inf, price)


def _narrowed(
    low: Tensor, high: Tensor, chi: Tensor, each: Tensor, eta: Tensor | float, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bracket of a price, both [..., 1], narrowed as far as float64 resolves it."""
    if not chi.is_cuda:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            expected = (each * torch.sigmoid((chi - middle) / eta)).sum(-1, keepdim=True)
            over = expected > count
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        return low, high
    # A GPU tries 15 prices in the time of one: each round leaves a sixteenth of the bracket.
    share = torch.arange(17, dtype=chi.dtype, device=chi.device) / 16
    chi, each = chi.unsqueeze(-2), each.unsqueeze(-2)
    eta = eta.unsqueeze(-1) if isinstance(eta, Tensor) else eta
    for _ in range(_HALVINGS // 4):
        tried = low * (1 - share) + high * share
        gates = torch.sigmoid((chi - tried[..., 1:-1, None]) / eta)
        place = ((each * gates).sum(-1) > count).sum(-1, keepdim=True)
        low, high = tried.gather(-1, place), tried.gather(-1, place + 1)
    return low, high


def quantile_price(pool: Tensor, weight: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """Return the price that buys `budget` units, and the share of units exactly at it to keep.

    Keeping every unit above the price and that share of those at it makes exactly the budget;
    without the share, discrete rewards would overshoot or starve.

    Args:
        pool: [..., V] values, ascending; NaN, at the end, where there is none.
        weight: [..., V] float64, units that each value stands for; 0 where there is none.
        budget: [..., 1] float64, units to buy.

    Returns:
        Both [..., 1]; minus infinity and 1 where the pool holds no more than the budget.

    Example:
        >>> import torch
        >>> from kondo.core.quantiles import quantile_price
        >>> pool, weight = torch.tensor([1.0, 2.0, 3.0, 3.0]), torch.ones(4).double()
        >>> quantile_price(pool, weight, torch.ones(1).double())
        (tensor([3.]), tensor([0.5000], dtype=torch.float64))
    """
    above = running_sum(weight.flip(-1)).flip(-1) - weight  # of later order statistics
    place = (above >= budget).sum(-1, keepdim=True).clamp(max=max(pool.shape[-1] - 1, 0))
    price = pool.gather(-1, place) if pool.shape[-1] else torch.full_like(budget, math.nan)
    over = torch.where(pool > price, weight, 0.0).sum(-1, keepdim=True)
    tied = torch.where(pool == price, weight, 0.0).sum(-1, keepdim=True)
    share = ((budget - over) / tied).clamp(max=1.0)
    everything = weight.sum(-1, keepdim=True) <= budget
    return torch.where(everything, -math.inf, price), torch.where(everything, 1.0, share)


def above_price(values: Tensor, able: Tensor, price: Tensor, share: Tensor, lots: Tensor) -> Tensor:
    """Keep the able units above a price, and by lot a share of those exactly at it.

    Args:
        values: [..., M] float.
        able: [..., M] bool.
        price: broadcasts to values.
        share: broadcasts to values, in [0, 1].
        lots: like values, int64 by `lottery`.
    """
    lucky = uniform_of(lots) < share
    return able & ((values > price) | ((values == price) & lucky))


def most_variance(values: Tensor, able: Tensor, count: Tensor | int, lots: Tensor) -> Tensor:
    """Choose the `count` able units whose values have the largest variance.

    They are the k highest and the count - k lowest for some k: all k are tried. Of several k that
    do equally well, the one nearest count / 2 is taken, the larger of two.

    Args:
        values: [..., M] float, no NaN where able.
        able: [..., M] bool.
        count: how many to keep, at most as many as are able; one number, or [..., 1] int64.
        lots: like values; of equal values those with a high lot go with the highest.

    Returns:
        [..., M] bool, exactly `count` True in each row.

    Example:
        >>> import torch
        >>> from kondo.core.quantiles import most_variance
        >>> rewards, lots = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.1, 0.2, 0.9, 0.5])
        >>> most_variance(rewards, torch.ones(4, dtype=torch.bool), 2, lots).int().tolist()
        [1, 1, 0, 0]

    Reference: https://arxiv.org/abs/2504.13818
    """
    num_units = values.shape[-1]
    if num_units == 0:
        return able
    by_lot = lots.argsort(-1)
    # NaN sorts last, behind infinity: what is not able is out of the way.
    worth = torch.where(able, values, math.nan)
    order = by_lot.gather(-1, worth.gather(-1, by_lot).argsort(dim=-1, stable=True))
    wanted, number = _as_count(count, values), able.sum(-1, keepdim=True)
    num_high = _num_high(worth.gather(-1, order), wanted, number)
    place = torch.arange(num_units, device=values.device)
    chosen = (place < wanted - num_high) | ((place >= number - num_high) & (place < number))
    return torch.zeros_like(chosen).scatter(-1, order, chosen)


def _num_high(rising: Tensor, count: Tensor, number: Tensor) -> Tensor:
    """Return k, [..., 1]: the k highest and the count - k lowest of ascending values vary most.

    Var = E[x^2] - E[x]^2 for every k, from sums over the lowest 0 .. count and the highest.

    Args:
        rising: [..., M] float, of which the first `number` are values, ascending.
        count: [..., 1] int64.
        number: [..., 1] int64.
    """
    place = torch.arange(rising.shape[-1], device=rising.device)
    inside = place < number
    most = torch.finfo(torch.float64).max
    rising = torch.where(inside, rising.double().clamp(-most, most), 0.0)
    # Squares that neither overflow nor vanish; equal values are exactly 1, and vary exactly 0.
    largest = rising.abs().amax(-1, keepdim=True)
    rising = rising / torch.where(largest > 0, largest, 1.0)
    mean = rising.sum(-1, keepdim=True) / number.clamp(min=1)
    rising = torch.where(inside, rising - mean, 0.0)  # an offset would leave few digits
    falling = torch.where(inside, rising.gather(-1, (number - 1 - place).clamp(min=0)), 0.0)
    sums = torch.stack([rising, falling, rising.square(), falling.square()])
    low, high, low_square, high_square = torch.nn.functional.pad(running_sum(sums), (1, 0)).unbind()
    num_high = torch.arange(rising.shape[-1] + 1, device=rising.device)
    num_low = (count - num_high).clamp(min=0)
    size = count.clamp(min=1)
    mean = (low.gather(-1, num_low) + high) / size
    variance = (low_square.gather(-1, num_low) + high_square) / size - mean.square()
    possible = num_high <= count
    variance = torch.where(possible, variance, -math.inf)
    as_good = possible & (variance >= (1 - _SAME) * variance.amax(-1, keepdim=True))
    # Twice the distance from the middle, plus one for the smaller of two at the same distance.
    distance = 2 * (2 * num_high - count).abs() + (2 * num_high < count)
    return torch.where(as_good, distance, _LAST_LOT).argmin(-1, keepdim=True)
