"""A price from past calls, for batches too small to hold a rate: a ring of tensors.

Works over leading dimensions and reads nothing from the device, as gates do; the methods for
state and reports read.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kondo.core.quantiles import quantile_price

# A call stores at most this many values in the rolling window; beyond it, evenly spaced order
# statistics stand for the rest, each with the weight of the values it replaces.
MAX_VALUES_PER_STEP = 1024

_ADVICE = (
    "give what state_dict() of the gate returned; if it did return this, the state is damaged: "
    "load an older one, or start the gate anew."
)

# Of a float32, in which the number of units that a value stands for is computed.
_ROUNDING = 1e-6


class RollingPrice:
    """Values of past calls, from which a price is taken when one batch is too small for a rate.

    Holds the newest `size` calls in tensors that are updated in place. A call with more than
    MAX_VALUES_PER_STEP units is summarised by that many evenly spaced order statistics, so memory
    is bounded whatever the batch. Calls may differ in size; leading dimensions may not.
    """

    def __init__(self, size: int):
        self.size = size
        self.calls: Tensor
        """0-d int64: choices made, from which ties at the price draw their lots."""
        self._values: Tensor | None = None  # [..., size, W], NaN where nothing is; newest last
        self._stands_for: Tensor  # [..., size] float64: units that each value of a call stands for
        self._valid: Tensor  # [..., size] int64: units that counted, zeros included; 0: no call

    def prepare(self, values: Tensor) -> None:
        """Make room for a call like `values`, [..., M]: everything below then has its shape."""
        width = min(values.shape[-1], MAX_VALUES_PER_STEP)
        lead = values.shape[:-1]
        if self._values is None:
            self._values = values.new_full((*lead, self.size, width), math.nan)
            shape, device = (*lead, self.size), values.device
            self._stands_for = torch.ones(shape, dtype=torch.float64, device=device)
            self._valid = torch.zeros(shape, dtype=torch.int64, device=device)
            self.calls = torch.zeros((), dtype=torch.int64, device=device)
        if self._values.shape[:-2] != lead:
            raise ValueError(
                f"values must have the leading dimensions of earlier calls, "
                f"{list(self._values.shape[:-2])}, got {list(lead)}; a window belongs to them."
            )
        self._stands_for, self._valid, self.calls = (
            part.to(values.device) for part in (self._stands_for, self._valid, self.calls)
        )
        dtype = torch.promote_types(self._values.dtype, values.dtype)
        self._values = self._values.to(values.device, dtype)
        if (more := width - self._values.shape[-1]) > 0:
            self._values = torch.nn.functional.pad(self._values, (0, more), value=math.nan)

    def push(self, values: Tensor, able: Tensor, num_valid: Tensor) -> None:
        """Add one call, where any unit counted; one in which none does is not remembered.

        Args:
            values: [..., M] float.
            able: [..., M] bool, the units that can be chosen.
            num_valid: [..., 1] int64, how many units counted.
        """
        self.prepare(values)
        past = self._values
        assert past is not None
        new = torch.where(able, values, math.nan).to(past.dtype)
        stands_for = torch.ones_like(num_valid, dtype=torch.float64)
        if new.shape[-1] > MAX_VALUES_PER_STEP:
            number = able.sum(-1, keepdim=True)
            many = number > MAX_VALUES_PER_STEP
            stands_for = torch.where(many, number / MAX_VALUES_PER_STEP, 1.0).double()
            place = torch.arange(MAX_VALUES_PER_STEP, device=values.device)
            spots = ((place + 0.5) * stands_for.float()).long()
            new = new.sort(-1).values.gather(-1, torch.where(many, spots, place))
        new = torch.nn.functional.pad(new, (0, past.shape[-1] - new.shape[-1]), value=math.nan)
        counts = num_valid > 0
        past.copy_(_shifted(past, new.unsqueeze(-2), -2, counts.unsqueeze(-1)))
        self._stands_for.copy_(_shifted(self._stands_for, stands_for, -1, counts))
        self._valid.copy_(_shifted(self._valid, num_valid, -1, counts))
        self.calls.add_(counts.any())

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Return all values, ascending, and how many units each stands for; both [..., V].

        Where nothing is, the value is NaN and stands for 0 units.
        """
        assert self._values is not None
        pool = self._values.flatten(-2).sort(-1)
        weight = self._stands_for.unsqueeze(-1).expand(self._values.shape).flatten(-2)
        # float64: float32 sums of many millions of units miss the total by whole units.
        weight = weight.gather(-1, pool.indices)
        return pool.values, torch.where(pool.values.isnan(), 0.0, weight)

    def budget(self, rate: float) -> Tensor:
        """Return how many units the rate buys over the window, [..., 1] float64."""
        return rate * self._valid.sum(-1, keepdim=True).double()

    def is_ready(self, rate: float, warmup: int) -> Tensor:
        """Return where the window holds enough calls, and more values than the rate buys.

        Past calls with next to no values say nothing of a price: the first batch after them would
        be kept whole.

        Returns:
            [..., 1] bool.
        """
        assert self._values is not None
        held = (~self._values.isnan()).sum(-1) * self._stands_for
        filled = (self._valid > 0).sum(-1, keepdim=True)
        return (filled >= warmup) & (held.sum(-1, keepdim=True) > self.budget(rate))

    def quantile_price(self, rate: float) -> tuple[Tensor, Tensor]:
        """Return the price for `rate` over the window, and the share of ties to keep."""
        return quantile_price(*self.pooled(), self.budget(rate))

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors, loadable with weights_only=True; reads the device."""
        if self._values is None:
            return {}
        # From the oldest call that any member has made.
        held = int((self._valid > 0).sum(-1).max()) if self._valid.numel() else 0
        first = self.size - held
        return {
            "values": self._values[..., first:, :].clone(),
            "stands_for": self._stands_for[..., first:].clone(),
            "valid": self._valid[..., first:].clone(),
            "calls": self.calls.clone(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` saved, keeping the newest `size` calls.

        Raises:
            ValueError: it is not what `state_dict` returns. The window is then as it was.
        """
        _check_state(state)
        self._values = None
        if not state:
            return
        kept = min(self.size, state["valid"].shape[-1])
        more = self.size - kept
        pad = torch.nn.functional.pad
        start = state["valid"].shape[-1] - kept
        self._values = pad(state["values"][..., start:, :], (0, 0, more, 0), value=math.nan).clone()
        self._stands_for = pad(state["stands_for"][..., start:], (more, 0), value=1.0).clone()
        self._valid = pad(state["valid"][..., start:], (more, 0)).clone()
        self.calls = state["calls"].clone()


def past_of(state: Any, key: str) -> Any:
    """Return the window's part of the saved state of a gate, which has it under its own key."""
    if not isinstance(state, Mapping) or state.keys() != {key}:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state must have the key {key!r} alone, got {got}; {_ADVICE}")
    return state[key]


_STATE = {
    "values": (None, 2, None),
    "stands_for": (torch.float64, 1, 1.0),
    "valid": (torch.int64, 1, 0.0),
    "calls": (torch.int64, 0, 0.0),
}
"""Part of the state -> dtype, least number of dimensions, least value. NaN and infinity are fine
among the values: NaN says that no unit stands there."""


def _check_state(state: Any) -> None:
    """Raise a ValueError unless it is what `RollingPrice.state_dict` returns, {} included."""
    if state == {}:
        return
    if not isinstance(state, Mapping) or state.keys() != _STATE.keys():
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state['past'] must have the keys {sorted(_STATE)}, got {got}; {_ADVICE}")
    for name, (dtype, ndim, least) in _STATE.items():
        value = state[name]
        if (
            not isinstance(value, Tensor)
            or value.ndim < ndim
            or value.dtype != (dtype or torch.promote_types(value.dtype, torch.float32))
        ):
            got = f"{value.ndim}-d {value.dtype}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"state['past'][{name!r}] must be a tensor of {dtype or 'float32 or float64'} with "
                f"at least {ndim} dimensions, got {got}; {_ADVICE}"
            )
        if least is not None and not bool(((value >= least) & value.isfinite()).all()):
            raise ValueError(
                f"state['past'][{name!r}] must be finite and at least {least:g}, got "
                f"{value.flatten().min().item()}; {_ADVICE}"
            )
    values, stands_for, valid = (state[name] for name in ("values", "stands_for", "valid"))
    if not values.shape[:-1] == stands_for.shape == valid.shape:
        raise ValueError(
            f"state['past'] must have values [..., calls, width], and stands_for and valid "
            f"[..., calls], got {[list(part.shape) for part in (values, stands_for, valid)]}; "
            f"{_ADVICE}"
        )
    held = (~values.isnan()).sum(-1) * stands_for
    too_many = held > valid * (1 + _ROUNDING)
    if bool(too_many.any()):
        raise ValueError(
            f"state['past']['values'] must stand for at most as many units as counted in their "
            f"call, got {held[too_many][0].item():g} of {valid[too_many][0].item()}; {_ADVICE}"
        )


def _shifted(past: Tensor, new: Tensor, dim: int, where: Tensor) -> Tensor:
    """Return the past with its oldest entry dropped and `new` appended, where it is to be."""
    rest = past.narrow(dim, 1, past.shape[dim] - 1)
    return torch.where(where, torch.cat([rest, new.to(past.dtype)], dim), past)
