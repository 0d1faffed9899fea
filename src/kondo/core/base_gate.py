"""What every gate is: a signal (what a unit is worth) and a choice (which units that buys).

    signal(log_probs, advantages, mask=) -> values      one per element, summed over a sequence
    gate.choose(values, mask, generator) -> Choice      keep, weight, price, rate, probability

Whoever writes a gate subclasses `BaseGate`, sets `signal` and defines `choose`, and the two methods
for its state if it remembers past calls. What the step, ranks and actors know of the gates that
come with `kondo` stands in `kondo.adapters`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, check_mask, first_unit
from kondo.core.delight import delight

Signal = Callable[..., Tensor]
"""(log_probs, advantages, *, mask=None) -> values like log_probs, detached; see `kondo.signals`.

One that reads nothing of log_probs but their shape has the attribute `needs_log_probs = False`.
"""

Unit = Literal["sample", "token", "sequence"]
"""What is gated: [..., N] log-probs one by one, [..., N, T] one by one, or their rows."""

Randomness = torch.Generator | Tensor | None
"""Where draws come from: a generator, the default one, or uniform draws that were made already."""


class Choice(NamedTuple):
    """What a gate chose. Units stand in the last dimension; leading ones are separate choices."""

    keep: Tensor
    """bool [..., M]: the unit is worth a backward pass."""
    weight: Tensor
    """float [..., M]: factor of the unit's loss; 0 where not kept."""
    price: Tensor
    """float64 [...], in the signal's units: below it a unit is skipped, or not kept for certain.
    Infinite if nothing is worth keeping; minus infinity where a gate has no price."""
    rate: Tensor
    """float64 [...]: kept units / units that count. 0 if nothing counts."""
    probability: Tensor
    """float [..., M]: chance that the unit was kept; 0 or 1 where nothing was drawn."""

    @classmethod
    def of(
        cls,
        keep: Tensor,
        mask: Tensor | None = None,
        price: Tensor | float = -math.inf,
        dtype: torch.dtype | None = None,
    ) -> "Choice":
        """Return the choice that keeps these units, each with weight 1 and nothing drawn.

        Args:
            keep: [..., M] bool.
            mask: [..., M] bool, the units that count; by default those that are kept.
            price: [...] float, or one number for all.
            dtype: of the weights; the default one if None.
        """
        weight = keep.to(dtype or torch.get_default_dtype())
        number = (keep if mask is None else mask).sum(-1)
        rate = keep.sum(-1, dtype=torch.float64) / number.clamp(min=1)
        if not isinstance(price, Tensor):
            price = torch.full_like(rate, price)
        return cls(keep, weight, price.double(), rate, weight)

    def reshape(self, shape: torch.Size) -> "Choice":
        """Return the same choice with its units in another shape.

        Raises:
            ValueError: it is of another number of units, as a gate of one's own may return it.
        """
        for name in ("keep", "weight", "probability"):
            if getattr(self, name).numel() != shape.numel():
                raise ValueError(
                    f"gate must return {name} with one value per unit, {list(shape)}, got "
                    f"{list(getattr(self, name).shape)}."
                )
        parts = (part.reshape(shape) for part in (self.keep, self.weight, self.probability))
        keep, weight, probability = parts
        return Choice(keep, weight, self.price, self.rate, probability)


class BaseGate(ABC):
    """What every gate is. Subclasses define `choose`, and their state if they have one.

    Example:
        >>> import torch, kondo
        >>> class AboveMean(kondo.BaseGate):
        ...     def choose(self, values, mask, generator=None):
        ...         mean = (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        ...         return kondo.Choice.of((values > mean) & mask, mask)
        >>> AboveMean()(torch.tensor([0.3, -1.0, 2.0, 0.1])).keep
        tensor([False, False,  True, False])
    """

    signal: Signal = staticmethod(delight)
    """What a unit is worth."""

    @abstractmethod
    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units, for each of the leading dimensions on its own.

        Reads nothing back from the device, so that many members choose at once and a CUDA graph can
        hold the call.

        Args:
            values: [..., M] float32 or float64, detached, no NaN where the mask is True.
            mask: [..., M] bool, True means "counts".
            generator: for draws; the default generator if None. Or the draws themselves, uniform on
                [0, 1), like values.
        """

    @torch.no_grad()
    def __call__(
        self,
        values: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Check the values, then choose once among all of them, whatever their shape.

        Raises:
            ValueError: NaN in a unit that counts.
        """
        units = at_least_float32(check_float("values", values).detach())
        counts = check_mask(mask, values.shape)
        if counts is None:
            counts = torch.ones_like(units, dtype=torch.bool)
        broken = units.isnan() & counts
        if bool(broken.any()):
            raise ValueError(
                f"values must not be NaN where the mask is True, got NaN in {first_unit(broken)} "
                f"({int(broken.sum())} in all); find the NaN log-prob or advantage, or mask the "
                f"unit."
            )
        choice = self.choose(units.reshape(-1), counts.reshape(-1), generator)
        return choice.reshape(values.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the running state, plain tensors and numbers; empty where there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(
                f"state must be empty for {type(self).__name__}, which has none, got the keys "
                f"{sorted(state)}; give what its state_dict() returned."
            )


AnyGate = BaseGate | Callable[..., Choice] | Choice | None
"""What can be given as a gate; see `as_gate`. None keeps everything."""
