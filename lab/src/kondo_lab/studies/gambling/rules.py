"""What a method makes of a batch: the coefficient of each sample's score, and what it pays for.

All rules see [P, n] samples of P members at once. `kondo.Gate` decides one batch at a time; where
a rate must be kept per member, `keep_rate` does for all rows what the gate does for one.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import kondo
from kondo.core.rules import count_for


class Samples(NamedTuple):
    """A batch of every member."""

    log_probs: Tensor
    """[P, n], of the taken actions."""
    advantages: Tensor
    """[P, n], R - V."""
    uniform: Tensor
    """[P, n] in (0, 1), for a rule that draws; else empty."""
    critic: Tensor
    """[P, n], the advantage by the running mean of each arm's rewards, so without this draw's luck.
    Empty, like `deviation`, for a rule that looks at no history."""
    deviation: Tensor
    """[P, n], running standard deviation of the taken arm's rewards."""


Signal = Callable[[Samples], Tensor]
Weigh = Callable[[Tensor, Tensor], Tensor]
"""(delight [P, n], uniform [P, n]) -> weight [P, n]; 0 where no backward pass is paid."""


def sampled(samples: Samples) -> Tensor:
    """U = R - V."""
    return samples.advantages


def by_critic(samples: Samples) -> Tensor:
    """U = Q(a) - sum_b pi(b) Q(b), Q the running mean of each arm's rewards."""
    return samples.critic


def lower_confidence(samples: Samples) -> Tensor:
    """U - s(a): one standard deviation of the arm's rewards is taken off."""
    return samples.advantages - samples.deviation


def scaled_by_noise(samples: Samples) -> Tensor:
    """U / (1 + s(a)); the 1 is the sure arm's reward, the only scale there is."""
    return samples.advantages / (1 + samples.deviation)


def clipped(samples: Samples) -> Tensor:
    """U cut at -1 and 1."""
    return samples.advantages.clamp(-1, 1)


def everything(delight: Tensor, uniform: Tensor) -> Tensor:
    """Weigh all samples alike: PG."""
    return torch.ones_like(delight)


def sigmoid(eta: float) -> Weigh:
    """Weigh by sigmoid(chi / eta): DG."""
    return lambda delight, uniform: torch.sigmoid(delight / eta)


def at_price(price: float) -> Weigh:
    """Keep chi > price: a price looks at no batch, so one gate decides for all members."""
    return lambda delight, uniform: kondo.Gate(price=price)(delight).weight


def at_rate(
    rate: float,
    *,
    reserve: float = 0.0,
    negative_quota: float = 0.0,
    inverse_propensity: bool = False,
) -> Weigh:
    """Keep a rate of each member's samples, as `kondo.Gate` with these options does."""
    return lambda delight, uniform: keep_rate(
        delight, uniform, rate, reserve, negative_quota, inverse_propensity
    )


def keep_rate(
    delight: Tensor,
    uniform: Tensor,
    rate: float,
    reserve: float = 0.0,
    negative_quota: float = 0.0,
    inverse_propensity: bool = False,
) -> Tensor:
    """Return the weights [P, n] of `kondo.Gate(rate=..., reserve=..., ...)`, row by row.

    Ties fall to the earlier sample, which is as random as the gate's lottery: samples come in no
    order.
    """
    able = delight != 0
    count = able.sum(dim=1, keepdim=True).clamp_max(count_for(rate, delight.shape[1]))
    num_reserve = torch.zeros_like(count)
    if reserve > 0:
        num_reserve = (reserve * count).round().long().clamp_min(1) * (count > 1)
    num_negative = (negative_quota * count).round().long()
    num_negative = torch.minimum(num_negative, (delight < 0).sum(dim=1, keepdim=True))
    num_negative = torch.minimum(num_negative, count - num_reserve)
    keep = torch.zeros_like(able)
    if negative_quota > 0:
        keep = _top(delight, delight < 0, num_negative)
    keep = keep | _top(delight, able & ~keep, count - num_reserve - num_negative)
    if reserve == 0:
        return keep.to(delight.dtype)
    rest = able & ~keep
    drawn = _top(uniform, rest, num_reserve)
    weight = (keep | drawn).to(delight.dtype)
    if inverse_propensity:
        odds = rest.sum(dim=1, keepdim=True) / num_reserve.clamp_min(1)
        weight = torch.where(drawn, odds.to(weight.dtype), weight)
    return weight


def _top(values: Tensor, able: Tensor, count: Tensor) -> Tensor:
    """Return bool [P, n]: the `count` [P, 1] largest values of each row among those able."""
    order = torch.where(able, values, -torch.inf).argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(values.shape[1], device=values.device).expand_as(order))
    return (place < count) & able


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to learn from a batch."""

    name: str
    weigh: Weigh
    signal: Signal = sampled
    """The advantage that is trained on."""
    gate_signal: Signal | None = None
    """The advantage in the gate's delight; the same if None."""
    repeats: int = 1
    """Rewards drawn and averaged per action; the actions are so many times fewer."""
    batches: int = 1
    """Batches joined into one step; steps are so many times fewer, the learning rate as many
    times higher."""
    surprisal_cap: float = float("inf")
    draws: bool = False
    """Whether its gate draws at random."""
    symmetric: bool = False
    """Gate on |chi|: a bad surprise is worth as much as a good one."""

    @property
    def looks_back(self) -> bool:
        """Whether it needs the history of rewards."""
        return not {self.signal, self.gate_signal} <= {sampled, clipped, None}

    def coefficients(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return [P, n] each: what multiplies the sample's score, and whether it is paid for."""
        trained = self.signal(samples)
        gated = trained if self.gate_signal is None else self.gate_signal(samples)
        chi = kondo.delight(samples.log_probs.clamp_min(-self.surprisal_cap), gated)
        weight = self.weigh(chi.abs() if self.symmetric else chi, samples.uniform)
        return weight * trained, weight > 0


PG = Rule(name="PG", weigh=everything)
DG = Rule(name="DG", weigh=sigmoid(1.0))


def priced(price: float) -> Rule:
    """Return DG-K at a fixed price."""
    return Rule(name=f"DG-K price {price:g}", weigh=at_price(price))


def rated(rate: float) -> Rule:
    """Return DG-K at a fixed rate."""
    return Rule(name=f"DG-K {100 * rate:g}%", weigh=at_rate(rate))


def mitigations() -> list[Rule]:
    """Return what was tried against gambling; each costs the same number of rewards drawn."""
    free, tenth = at_price(0.0), at_rate(0.1)
    price, rate = "price 0", "10%"
    tried = [
        Rule(name=f"{price}, mean of 4 draws", weigh=free, repeats=4),
        Rule(name=f"{price}, mean of 10 draws", weigh=free, repeats=10),
        Rule(name=f"{price}, mean of 25 draws", weigh=free, repeats=25),
        Rule(name=f"{rate}, mean of 10 draws", weigh=tenth, repeats=10),
        Rule(name="DG, mean of 10 draws", weigh=sigmoid(1.0), repeats=10),
        Rule(name=f"{price}, critic gates", weigh=free, gate_signal=by_critic),
        Rule(name=f"{rate}, critic gates", weigh=tenth, gate_signal=by_critic),
        Rule(name="DG, critic gates", weigh=sigmoid(1.0), gate_signal=by_critic),
        Rule(name=f"{price}, critic gates and trains", weigh=free, signal=by_critic),
        Rule(name=f"{rate}, critic gates and trains", weigh=tenth, signal=by_critic),
        Rule(name=f"{price}, U - s", weigh=free, signal=lower_confidence),
        Rule(name=f"{rate}, U - s", weigh=tenth, signal=lower_confidence),
        Rule(name=f"{price}, U - s in the gate only", weigh=free, gate_signal=lower_confidence),
        Rule(name=f"{price}, U / (1 + s)", weigh=free, signal=scaled_by_noise),
        Rule(name=f"{price}, U cut at 1", weigh=free, signal=clipped),
        Rule(name=f"{rate}, surprisal capped at 0.5", weigh=tenth, surprisal_cap=0.5),
        Rule(name="DG, surprisal capped at 0.5", weigh=sigmoid(1.0), surprisal_cap=0.5),
        Rule(name="DG, eta 10", weigh=sigmoid(10.0)),
        Rule(name=f"{rate}, reserve 50%", weigh=at_rate(0.1, reserve=0.5), draws=True),
        Rule(
            name=f"{rate}, reserve 50%, 1/probability",
            weigh=at_rate(0.1, reserve=0.5, inverse_propensity=True),
            draws=True,
        ),
        Rule(name=f"{rate}, negative quota 50%", weigh=at_rate(0.1, negative_quota=0.5)),
        Rule(name=f"{rate}, by |delight|", weigh=tenth, symmetric=True),
        Rule(name=f"{price}, batches of 1000", weigh=free, batches=10),
        Rule(name=f"{rate}, batches of 1000", weigh=tenth, batches=10),
    ]
    return [PG, DG, priced(0.0), rated(0.1), *tried]
