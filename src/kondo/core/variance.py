"""The variance gate: keep the units whose values vary most, the best and the worst together.

In: one value per unit (its centred advantage) and a mask. Out: keep, weight and rate. Nothing is
differentiated, and nothing is drawn. Log-probs have no say, so that no screen is needed.
"""

import torch
from torch import Tensor

from kondo.arguments import check_number
from kondo.core import quantiles, sampling, signals
from kondo.core.base_gate import BaseGate, Choice, Randomness, Signal
from kondo.core.fingerprint import name_of


class VarianceGate(BaseGate):
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

        kondo.backward(
            lm, rows, kondo.advantage.group_mean(rewards, 8), gate=kondo.VarianceGate(rate=0.1)
        )

    Args:
        rate: fraction of the units that count to keep, in (0, 1]; at least one is kept where any
            value is not zero.
        signal: what a unit is worth; by default its advantage.

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

    def __init__(self, *, rate: float, signal: Signal = signals.advantage):
        rate = check_number("rate", rate)
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {rate}; 0.1 keeps 10%.")
        self.rate, self.signal = rate, signal

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units. There is no price to compare a unit with: it is minus infinity."""
        able = mask & (values != 0)
        count = sampling.count_for(self.rate, mask.sum(-1, keepdim=True))
        count = torch.minimum(count, able.sum(-1, keepdim=True))
        position = torch.arange(values.shape[-1], device=values.device)
        lots = sampling.lottery(position, salt=values)
        keep = quantiles.most_variance(values, able, count, lots)
        return Choice.of(keep, mask, dtype=values.dtype)

    def __repr__(self) -> str:
        other = self.signal is not signals.advantage
        return f"VarianceGate(rate={self.rate!r}{f', signal={name_of(self.signal)}' * other})"
