"""What the step, ranks and actors know of a gate beside its contract.

`Adapter` has the general answers, which hold for every gate: ranks then gather all values, and
actors send all samples. The gates of `kondo` have adapters that know more. One of your own needs
none; `register` gives it one, if it is to be cheaper.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kondo.core import signals
from kondo.core.base_gate import BaseGate, Choice, Randomness
from kondo.core.delight import delight
from kondo.core.gates import Gate
from kondo.core.given_gates import CallableGate, GivenChoice
from kondo.core.quantiles import above_price, quantile_price
from kondo.core.sampling import count_for, uniform_of
from kondo.core.unbiased import UnbiasedGate
from kondo.core.variance import VarianceGate

_AdapterType = TypeVar("_AdapterType", bound="type[Adapter]")


class Adapter:
    """The answers for a gate of which nothing is known but that it chooses."""

    draws: bool = True
    """Whether `choose` may read its generator. Ranks then share that of rank 0."""
    on_host: bool = False
    """Whether `choose` may be shown few values of a CUDA batch on the CPU, where that is faster."""
    one_price: bool = False
    """Whether one price decides every unit by itself. Ranks with too many units to gather then
    agree on a price from a sketch of all values; actors get it from the learner."""
    eta: float = 0.0
    """Temperature in the signal's units, at which diagnostics judge the gate; 0 for a hard one."""

    def __init__(self, gate: BaseGate):
        self.gate: Any = gate

    @property
    def remembers(self) -> bool:
        """Whether `choose` changes a running state. The step then checks its inputs first."""
        return type(self.gate).state_dict is not BaseGate.state_dict

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Let the gate choose once among all units of checked values, [N] or [N, T]."""
        draws = generator.reshape(-1) if isinstance(generator, Tensor) else generator
        choice: Choice = self.gate.choose(values.reshape(-1), mask.reshape(-1), draws)
        return choice.reshape(values.shape)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the price of units that some values stand for, and the share of ties to keep.

        For gates with `one_price`; both [..., 1] float64.

        Args:
            values: [..., V] float; none of them 0.
            weight: [..., V] float64, how many units each stands for.
            num_valid: [..., 1], units that count, those of value 0 included.
        """
        raise NotImplementedError(f"{self.gate!r} has no price that decides every unit by itself.")

    def choose_at(
        self, values: Tensor, mask: Tensor, price: Tensor, share: Tensor, lots: Tensor
    ) -> Choice:
        """Choose by a price from elsewhere, every unit by itself, as `price_for` returned it.

        Args:
            values: [..., M] float.
            mask: [..., M] bool.
            price: [..., 1] float64.
            share: [..., 1] float64.
            lots: [..., M] int64 by `kondo.sampling.lottery`, for draws and ties.
        """
        raise NotImplementedError(f"{self.gate!r} has no price that decides every unit by itself.")

    def row_facts(self, batch: Any) -> Tensor | None:
        """Return what `choose` must know of the batch's rows, [N, K]; None where nothing.

        Ranks gather it along the rows. It must be a tensor of integers, 0 meaning "nothing here".
        """
        return None

    def bind(self, facts: Tensor) -> BaseGate:
        """Return the gate for the rows that `facts`, by `row_facts`, describe."""
        gate: BaseGate = self.gate
        return gate

    def take(self, rows: Tensor) -> BaseGate:
        """Return the gate for some, int64 [R], of the rows that it is bound to."""
        gate: BaseGate = self.gate
        return gate

    def positives_needed(self, num_valid: int) -> int | None:
        """Return how many units of positive value settle the choice; None if all units matter.

        For signals with the sign of the advantage. With that many positive units in the batch,
        nothing with an advantage <= 0 can be kept: a screen may leave those rows out.

        Args:
            num_valid: units that count.
        """
        return None


_ADAPTERS: dict[type[BaseGate], type[Adapter]] = {}


def register(*gates: type[BaseGate]) -> Callable[[_AdapterType], _AdapterType]:
    """Return a decorator that makes a class the adapter of these gates, without their subclasses.

    Example:
        >>> import kondo
        >>> class First(kondo.BaseGate):
        ...     def choose(self, values, mask, generator=None):
        ...         return kondo.Choice.of(mask & (mask.cumsum(-1) == 1), mask)
        >>> @kondo.adapters.register(First)
        ... class DrawsNothing(kondo.adapters.Adapter):
        ...     draws = False
        >>> kondo.adapters.adapter_of(First()).draws
        False
    """

    def note(adapter: _AdapterType) -> _AdapterType:
        _ADAPTERS.update(dict.fromkeys(gates, adapter))
        return adapter

    return note


def adapter_of(gate: BaseGate) -> Adapter:
    """Return what is known of a gate; of one that nobody registered, the general answers."""
    return _ADAPTERS.get(type(gate), Adapter)(gate)


@register(Gate)
class _GateAdapter(Adapter):
    """The Kondo gate: a rate or a price alone decides every unit by itself."""

    on_host = True

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return bool(self.gate.temperature > 0 or self.gate.reserve > 0)

    @property
    def one_price(self) -> bool:  # type: ignore[override]
        split = self.gate.reserve > 0 or self.gate.negative_quota > 0
        return not (self.gate.temperature > 0 or split or self.gate.window > 0)

    @property
    def remembers(self) -> bool:
        return bool(self.gate.window > 0)

    @property
    def eta(self) -> float:  # type: ignore[override]
        return float(self.gate.temperature)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        if self.gate.rate is None:
            fixed = torch.full_like(num_valid, self.gate.price, dtype=torch.float64)
            return fixed, torch.zeros_like(fixed)
        pool = values.sort(-1)
        weight = weight.gather(-1, pool.indices)
        return quantile_price(pool.values, weight, self.gate.rate * num_valid.double())

    def choose_at(
        self, values: Tensor, mask: Tensor, price: Tensor, share: Tensor, lots: Tensor
    ) -> Choice:
        keep = above_price(values, mask & (values != 0), price, share, lots)
        return Choice.of(keep, mask, price.squeeze(-1), values.dtype)

    def positives_needed(self, num_valid: int) -> int | None:
        if self.gate.signal not in (delight, signals.advantage):
            return None  # the sign may not be the advantage's
        if not self.one_price or (self.gate.price is not None and self.gate.price < 0):
            return None
        return 0 if self.gate.rate is None else count_for(self.gate.rate, num_valid)


@register(UnbiasedGate)
class _UnbiasedAdapter(Adapter):
    """The unbiased gate: a price alone decides every unit, unless it is that of a window."""

    on_host = True

    @property
    def one_price(self) -> bool:  # type: ignore[override]
        return not self.gate.window

    @property
    def remembers(self) -> bool:
        return bool(self.gate.window)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        price: Tensor = self.gate.price_for(values, weight, num_valid)
        return price, torch.ones_like(price)

    def choose_at(
        self, values: Tensor, mask: Tensor, price: Tensor, share: Tensor, lots: Tensor
    ) -> Choice:
        choice: Choice = self.gate.choose_at(values, mask, price, uniform_of(lots))
        return choice


@register(VarianceGate, GivenChoice)
class DrawsNothing(Adapter):
    """A gate whose choice follows from the values."""

    draws, on_host = False, True


@register(CallableGate)
class _CallableAdapter(Adapter):
    """A plain function: it remembers if it has a state of its own."""

    @property
    def remembers(self) -> bool:
        return hasattr(self.gate.function, "state_dict")
