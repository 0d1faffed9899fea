"""What a method makes of a batch: the coefficient of each sample's score, and what it pays for.

All rules see [P, n] samples of P members at once, each member with a choice of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

import kondo
from kondo import BaseGate, Gate, UnbiasedGate, signals
from kondo_lab.training.gates import Everything


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to learn from a batch."""

    name: str
    gate: BaseGate
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

    @property
    def draws(self) -> bool:
        """Whether its gate draws at random."""
        return kondo.adapters.adapter_of(self.gate).draws

    @property
    def looks_back(self) -> bool:
        """Whether it needs the history of rewards."""
        return not {self.signal, self.gate_signal} <= {sampled, clipped, None}

    def coefficients(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return [P, n] each: what multiplies the sample's score, and whether it is paid for."""
        trained = self.signal(samples)
        gated = trained if self.gate_signal is None else self.gate_signal(samples)
        log_probs = samples.log_probs.clamp_min(-self.surprisal_cap)
        # A reserve takes the lowest draws; published results have taken the highest.
        draws = 1 - samples.uniform if self.draws else None
        kept = kondo.select(log_probs, gated, gate=self.gate, unit="sample", generator=draws)
        return kept.weight * trained, kept.weight > 0


PG = Rule(name="PG", gate=Everything())
DG = Rule(name="DG", gate=Everything(1.0))


def priced(price: float) -> Rule:
    """Return DG-K at a fixed price."""
    return Rule(name=f"DG-K price {price:g}", gate=Gate(price=price))


def rated(rate: float) -> Rule:
    """Return DG-K at a fixed rate."""
    return Rule(name=f"DG-K {100 * rate:g}%", gate=Gate(rate=rate))


def mitigations() -> list[Rule]:
    """Return what was tried against gambling; each costs the same number of rewards drawn."""
    free, tenth = Gate(price=0.0), Gate(rate=0.1)
    price, rate = "price 0", "10%"
    tried = [
        Rule(name=f"{price}, mean of 4 draws", gate=free, repeats=4),
        Rule(name=f"{price}, mean of 10 draws", gate=free, repeats=10),
        Rule(name=f"{price}, mean of 25 draws", gate=free, repeats=25),
        Rule(name=f"{rate}, mean of 10 draws", gate=tenth, repeats=10),
        Rule(name="DG, mean of 10 draws", gate=Everything(1.0), repeats=10),
        Rule(name=f"{price}, critic gates", gate=free, gate_signal=by_critic),
        Rule(name=f"{rate}, critic gates", gate=tenth, gate_signal=by_critic),
        Rule(name="DG, critic gates", gate=Everything(1.0), gate_signal=by_critic),
        Rule(name=f"{price}, critic gates and trains", gate=free, signal=by_critic),
        Rule(name=f"{rate}, critic gates and trains", gate=tenth, signal=by_critic),
        Rule(name=f"{price}, U - s", gate=free, signal=lower_confidence),
        Rule(name=f"{rate}, U - s", gate=tenth, signal=lower_confidence),
        Rule(name=f"{price}, U - s in the gate only", gate=free, gate_signal=lower_confidence),
        Rule(name=f"{price}, U / (1 + s)", gate=free, signal=scaled_by_noise),
        Rule(name=f"{price}, U cut at 1", gate=free, signal=clipped),
        Rule(name=f"{rate}, surprisal capped at 0.5", gate=tenth, surprisal_cap=0.5),
        Rule(name="DG, surprisal capped at 0.5", gate=Everything(1.0), surprisal_cap=0.5),
        Rule(name="DG, eta 10", gate=Everything(10.0)),
        Rule(name=f"{rate}, reserve 50%", gate=Gate(rate=0.1, reserve=0.5)),
        Rule(
            name=f"{rate}, reserve 50%, 1/probability",
            gate=Gate(rate=0.1, reserve=0.5, inverse_propensity=True),
        ),
        Rule(name=f"{rate}, negative quota 50%", gate=Gate(rate=0.1, negative_quota=0.5)),
        Rule(name=f"{rate}, by |delight|", gate=Gate(rate=0.1, signal=signals.abs_delight)),
        Rule(name=f"unbiased {rate}", gate=UnbiasedGate(rate=0.1, signal=kondo.delight)),
        Rule(name="unbiased, noise 1.5", gate=UnbiasedGate(noise=1.5, signal=kondo.delight)),
        Rule(name=f"{price}, batches of 1000", gate=free, batches=10),
        Rule(name=f"{rate}, batches of 1000", gate=tenth, batches=10),
    ]
    return [PG, DG, priced(0.0), rated(0.1), *tried]
