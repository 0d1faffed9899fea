"""Gates that are compared with those of `kondo`, under the same contract."""

import math

import torch
from torch import Tensor

from kondo import BaseGate, Choice, Gate, adapters, delight, quantiles, sampling, signals

Randomness = torch.Generator | Tensor | None
"""Where draws come from: a generator, the default one, or draws that were made already."""
TIE_TOLERANCE = 1e-6
"""Values this close to the quantile count as ties, as in the author's code."""


class QuantileGate(BaseGate):
    """Keep values >= the batch's (1 - rate)-quantile: ties are kept, zeros take their places.

    The papers' gate. Units of value zero count when the quantile is taken, and are then not paid
    for: their gradient is zero. With few distinct rewards it keeps more than the rate.

    Args:
        rate: share of the units that count, in (0, 1].
        signal: what a unit is worth.

    Example:
        >>> import torch
        >>> from kondo_lab.training.gates import QuantileGate
        >>> QuantileGate(rate=0.5)(torch.tensor([2.0, 1.0, 1.0, -1.0])).keep
        tensor([ True,  True,  True, False])
    """

    def __init__(self, *, rate: float, signal: signals.Signal = delight):
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {rate}; 0.03 keeps 3%.")
        self.rate, self.signal = rate, signal

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units; nothing is drawn."""
        place = sampling.count_for(self.rate, mask.sum(-1, keepdim=True)) - 1
        worth = torch.where(mask, values, -math.inf)
        price = worth.sort(-1, descending=True).values.gather(-1, place)
        keep = mask & (values >= price - TIE_TOLERANCE) & (values != 0)
        return Choice.of(keep, mask, price.squeeze(-1), values.dtype)

    def __repr__(self) -> str:
        other = "" if self.signal is delight else f", signal={signals.name_of(self.signal)}"
        return f"QuantileGate(rate={self.rate!r}{other})"


class Everything(BaseGate):
    """Keep all units that count: dense, or DG with a temperature.

    Unlike `kondo.Gate(rate=1)` it also keeps units of value zero: an ordinary training loop pays
    for them, and so must the dense baseline.

    Args:
        eta: weigh units by sigmoid(delight / eta); None weighs all by 1.
    """

    def __init__(self, eta: float | None = None):
        if eta is not None and not eta > 0:
            raise ValueError(f"eta must be > 0, got {eta}; None weighs all units alike.")
        self.temperature = eta
        self.eta = eta or 0.0

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Keep whatever the mask says; nothing is drawn."""
        weight = mask.to(values.dtype)
        rate = mask.any(dim=-1).double()  # all that counts, if anything does
        choice = Choice(mask, weight, torch.full_like(rate, -math.inf), rate, weight)
        if self.temperature is None:
            return choice
        sharp = values if self.temperature == 1 else values / self.temperature
        return choice._replace(weight=torch.sigmoid(sharp) * mask)

    def __repr__(self) -> str:
        return f"Everything({'' if self.temperature is None else f'eta={self.temperature!r}'})"


class WeightedGate(Gate):
    """Keep the units of highest value, and weight them by sigmoid(value / eta): DG within DG-K.

    Args:
        rate: share of the units that count, in (0, 1].
        eta: temperature of the weights, > 0.

    Example:
        >>> import torch
        >>> from kondo_lab.training.gates import WeightedGate
        >>> WeightedGate(rate=0.5, eta=1.0)(torch.tensor([0.0, -1.0, 2.0, 3.0])).weight
        tensor([0.0000, 0.0000, 0.8808, 0.9526])
    """

    def __init__(self, *, rate: float, eta: float):
        if not eta > 0:
            raise ValueError(f"eta must be > 0, got {eta}; kondo.Gate weights all units alike.")
        super().__init__(rate=rate)
        self._weights_eta = eta

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units; nothing is drawn."""
        choice = super().choose(values, mask, generator)
        return choice._replace(weight=torch.sigmoid(values / self._weights_eta) * choice.keep)

    def __repr__(self) -> str:
        return f"WeightedGate(rate={self.rate!r}, eta={self._weights_eta!r})"


class DrawnVarianceGate(BaseGate):
    """`kondo.VarianceGate` whose ties between equal rewards fall by draw, anew at every step.

    Args:
        rate: share of the units that count, in (0, 1].
        group: None chooses among all units. A number is PODS as published: of each prompt's `group`
            answers, side by side, the round(rate * group) whose rewards vary most, at least two.
    """

    signal = staticmethod(signals.advantage)

    def __init__(self, *, rate: float, group: int | None = None):
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {rate}; 0.03 keeps 3%.")
        self.rate, self.group = rate, group
        if group is not None and round(rate * group) < 2:
            raise ValueError(
                f"rate must buy at least two answers of every group of {group}, got {rate}; one "
                f"answer has no variance: give group=None."
            )

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units."""
        size = values.shape[-1] if self.group is None else self.group
        each, counted, lots = (
            part.reshape(*values.shape[:-1], -1, size)
            for part in (values, mask, sampling.uniform(values, generator))
        )
        able = counted & (each != 0)
        count = sampling.count_for(self.rate, counted.sum(-1, keepdim=True))
        count = torch.minimum(count, able.sum(-1, keepdim=True))
        keep = quantiles.most_variance(each, able, count, lots).reshape(mask.shape)
        return Choice.of(keep, mask, dtype=values.dtype)

    def __repr__(self) -> str:
        within = "" if self.group is None else f", group={self.group}"
        return f"DrawnVarianceGate(rate={self.rate!r}{within})"


adapters.register(QuantileGate, WeightedGate)(adapters.DrawsNothing)


@adapters.register(Everything)
class EverythingAdapter(adapters.DrawsNothing):
    """What is known of a dense update: the temperature of its weights, 0 without one."""

    @property
    def eta(self) -> float:  # type: ignore[override]
        """Temperature of the weights."""
        return float(self.gate.eta)


class WithDraws(BaseGate):
    """A gate that draws, with draws that were made already: those of one member at one step.

    Args:
        gate: that chooses; its signal is kept.
        draws: uniform on [0, 1), in the shape of the values it will be shown.

    Example:
        >>> import kondo, torch
        >>> from kondo_lab.training.gates import WithDraws
        >>> gate = WithDraws(kondo.UnbiasedGate(rate=0.5), torch.tensor([0.1, 0.9]))
        >>> gate(torch.tensor([1.0, 1.0])).keep
        tensor([ True, False])
    """

    def __init__(self, gate: BaseGate, draws: Tensor):
        self.gate, self.given, self.signal = gate, draws, gate.signal

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Let the gate choose; the step may show it the values on another device."""
        return self.gate.choose(values, mask, self.given.to(values.device))


adapters.register(WithDraws)(adapters.DrawsNothing)


def unchecked(signal: signals.Signal) -> signals.Signal:
    """Return a signal that reads nothing from the device: log-probs here are at most 0."""
    return signals.known_of(signal).unchecked or signal


def kept_first(keep: Tensor) -> Tensor:
    """Return the units' places [P, N], the kept ones first, otherwise in their order."""
    return keep.byte().argsort(dim=1, descending=True, stable=True)
