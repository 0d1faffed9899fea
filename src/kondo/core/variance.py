"""The variance gate: keep the units whose values vary most, the best and the worst together.

In: one value per unit (its centred advantage) and a mask. Out: keep, weight and rate. Nothing is
differentiated, and nothing is drawn. Log-probs have no say, so that no screen is needed.
"""

import math

import torch
from torch import Tensor

from kondo.core._checks import first_unit
from kondo.core.gates import GateOutput, flat_units, to_device
from kondo.core.pricing import count_for, lottery

# Relative distance at which two variances are the same number.
_SAME = 1e-9


class VarianceGate:
    """Keep the units whose values have the largest variance.

    S = argmax over sets of K units of  Var(chi_i : i in S),   K = round(rate * units that count)

    S is made of the k highest and the K - k lowest values for some k. All k are tried; of several
    that do equally well the one nearest K / 2 is taken, the larger of two. A single unit has no
    variance: K = 1 keeps the highest.

    A unit whose value is exactly 0, as in a group whose rewards are all equal, has no gradient and
    is never kept: zeros are left out first, and the variance is that among the others. So exactly K
    are kept as long as there are so many others. Over values that sum to 0, as centred advantages
    of whole groups do, this is the largest variance with zeros too: a zero is nearer to the mean
    than the unit that it would displace. Elsewhere, e.g. where the mask tears groups apart, a set
    chosen among all units may hold zeros, and be smaller than K without them.

    Ties between equal values fall by lot: a fixed hash of a unit's position and value, the hash of
    `kondo.Gate`, though not the same units win. The same input gives the same choice, and no
    position is favoured.

    Published for the answers to one prompt; here it is over all units of a call, so that a group
    may keep many answers or none. Rewards that are not centred within their groups would compare
    prompts by how easy they are. No log-probs are needed, and no screening forward is made:

        kondo.lm.backward(
            lm, rows, kondo.advantage.group_mean(rewards, 8),
            gate=kondo.VarianceGate(rate=0.1),
            priority=kondo.priorities.sequence_advantage,
            denominator="kept",
        )

    Args:
        rate: fraction of the units that count to keep, in (0, 1]; at least one is kept where any
            value is not zero.

    Example:
        >>> import torch, kondo
        >>> gate = kondo.VarianceGate(rate=0.5)
        >>> out = gate(torch.tensor([0.25, -0.75, 0.0, 0.5, 0.25, 0.1]))
        >>> out.keep
        tensor([ True,  True, False,  True, False, False])
        >>> float(out.rate), float(out.price)
        (0.5, -inf)

    Reference: https://arxiv.org/abs/2504.13818, "max-variance" down-sampling
    """

    of_advantages = True
    """Told to the engine, which refuses delight, and sums over tokens, as values."""

    def __init__(self, *, rate: float):
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {rate}; 0.1 keeps 10%.")
        self.rate = rate

    @torch.no_grad()
    def __call__(
        self,
        delight: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GateOutput:
        """Gate one batch. There is no price to compare a unit with: it is minus infinity.

        Args:
            delight: [...] float, the values: `kondo.priorities.sequence_advantage` or `advantage`.
            mask: like delight, bool, True means "counts".
            generator: not used; nothing is drawn.

        Raises:
            ValueError: NaN or an infinite value in a unit that counts.
        """
        values, valid = flat_units(delight, mask)
        _check_finite(values, valid, delight.shape)
        index = (valid & (values != 0)).nonzero().squeeze(1)
        num_valid = int(valid.sum())
        count = min(count_for(self.rate, num_valid), index.numel())
        weight = torch.zeros_like(values)
        weight[index[_most_variance(values[index], index, count)]] = 1
        weight = to_device(weight, delight.device).view(delight.shape)
        return GateOutput(
            keep=weight != 0,
            weight=weight,
            price=torch.tensor(-math.inf, dtype=torch.float64),
            rate=torch.tensor(count / num_valid if num_valid else 0.0, dtype=torch.float64),
            probability=weight.clone(),
        )

    def __repr__(self) -> str:
        return f"VarianceGate(rate={self.rate!r})"


def _check_finite(values: Tensor, valid: Tensor, shape: torch.Size) -> None:
    """Refuse an infinite value, beside which no other has a say in the variance."""
    infinite = values.isinf() & valid
    if bool(infinite.any()):
        raise ValueError(
            f"delight must be finite where the mask is True, got an infinite value in "
            f"{first_unit(infinite.view(shape))} ({int(infinite.sum())} in all): a variance with "
            f"it is not a number. Gate by an advantage, or mask the unit."
        )


def _most_variance(values: Tensor, position: Tensor, count: int) -> Tensor:
    """Return which `count` of the values vary most, [count] int64.

    Args:
        values: [M] float, finite and not 0.
        position: [M] int64, what ties are drawn by.
        count: 0 <= count <= M.
    """
    if count == 0:
        return position[:0]
    by_lot = lottery(position, salt=values).argsort()
    order = by_lot[values[by_lot].argsort(stable=True)]
    num_high = _num_high(values[order], count)
    return torch.cat([order[: count - num_high], order[values.numel() - num_high :]])


def _num_high(rising: Tensor, count: int) -> int:
    """Return k: the k highest and the count - k lowest of these ascending values vary most.

    Var = E[x^2] - E[x]^2 for every k, from sums over the lowest 0 .. count and the highest.
    """
    rising = rising.double()
    # Squares that neither overflow nor vanish; equal values are exactly 1, and vary exactly 0.
    rising = rising / rising.abs().amax()
    rising = rising - rising.mean()  # an offset would leave the variance few digits
    # On the CPU: cumulated sums of floats have no deterministic kernel on CUDA.
    lowest, highest = rising[:count].cpu(), rising.flip(0)[:count].cpu()
    mean, mean_square = (
        (_sums(low).flip(0) + _sums(high)) / count
        for low, high in ((lowest, highest), (lowest.square(), highest.square()))
    )
    variance = mean_square - mean.square()
    num_high = torch.arange(count + 1)
    # Twice the distance from the middle, plus one for the smaller of two at the same distance.
    distance = 2 * (2 * num_high - count).abs() + (2 * num_high < count)
    as_good = variance >= (1 - _SAME) * variance.amax()
    return int(torch.where(as_good, distance, distance.amax() + 1).argmin())


def _sums(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ..., M values, [M + 1]."""
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))
