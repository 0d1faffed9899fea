"""Every other way to say a gate: a choice that was made elsewhere, or a plain function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kondo.core.base_gate import BaseGate, Choice, Randomness
from kondo.core.delight import delight
from kondo.core.fingerprint import name_of


class GivenChoice(BaseGate):
    """Keep what was chosen elsewhere, whatever the values; what does not count is left out."""

    def __init__(self, choice: Choice):
        shape = choice.keep.shape
        if choice.keep.dtype != torch.bool:
            raise ValueError(
                f"gate must be a kondo.Choice with keep of dtype torch.bool, got "
                f"{choice.keep.dtype}; put factors into weight."
            )
        for name in ("weight", "probability"):
            if getattr(choice, name).shape != shape:
                raise ValueError(
                    f"gate must be a kondo.Choice with {name} like keep, {list(shape)}, got "
                    f"{list(getattr(choice, name).shape)}; kondo.Choice.of(keep) makes one."
                )
        self.choice = choice

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Keep the units that were chosen; nothing is drawn."""
        if self.choice.keep.numel() != values.numel():
            raise ValueError(
                f"gate must be a kondo.Choice among as many units as there are, {values.numel()}, "
                f"got keep of shape {list(self.choice.keep.shape)}; choose among these units."
            )
        keep, weight, probability = (
            part.to(values.device).reshape(values.shape)
            for part in (self.choice.keep, self.choice.weight, self.choice.probability)
        )
        keep = keep & mask
        price, lead = self.choice.price.to(values.device), values.ndim - 1
        if price.ndim > lead:  # one per row, of units [N, T] that are one choice
            price = price.flatten(lead).amin(-1)
        chosen = Choice.of(keep, mask, price, values.dtype)
        return chosen._replace(weight=weight * keep, probability=probability * mask)


class CallableGate(BaseGate):
    """A plain function (values, mask, generator) -> Choice, with delight as its signal.

    A function may carry `signal`, and `state_dict` with `load_state_dict`.
    """

    def __init__(self, function: Callable[..., Choice]):
        self.function = function
        self.signal = getattr(function, "signal", delight)

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Call the function."""
        return self.function(values, mask, generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a callable object that has one."""
        own = getattr(self.function, "state_dict", super().state_dict)
        state: dict[str, Any] = own()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        getattr(self.function, "load_state_dict", super().load_state_dict)(state)

    def __repr__(self) -> str:
        return name_of(self.function)


def as_gate(gate: Any) -> BaseGate:
    """Return `gate` if it is one; a `Choice`, or a plain callable, as one.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(gate, BaseGate):
        return gate
    if isinstance(gate, Choice):
        return GivenChoice(gate)
    if callable(gate) and not isinstance(gate, type):
        return CallableGate(gate)
    raise ValueError(
        f"gate must be a kondo.BaseGate, a callable (values, mask, generator) -> kondo.Choice, or "
        f"None for dense, got {gate!r}. {_instead_of(gate)}"
    )


def _instead_of(gate: Any) -> str:
    """Return what to write instead of something that is no gate."""
    if isinstance(gate, str):
        return f"Write gate=kondo.parse_gate({gate!r})."
    if isinstance(gate, type) and issubclass(gate, BaseGate):
        return f"This is a class: write gate=kondo.{gate.__name__}(...) with its options."
    if isinstance(gate, int | float) and not isinstance(gate, bool) and 0 < gate <= 1:
        return (
            f"To keep that share of the units write gate=kondo.UnbiasedGate(rate={gate}), or "
            f"gate=kondo.Gate(rate={gate}) for the highest delight."
        )
    return "Write for example gate=kondo.UnbiasedGate(rate=0.1)."
