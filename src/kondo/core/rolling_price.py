"""A price from past calls, for batches too small to hold a rate: a ring of tensors.

Works over leading dimensions and reads nothing from the device, as gates do; the methods for
state and reports read.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kondo.arguments import check_float
from kondo.core.quantiles import quantile_price
from kondo.core.saved_state import check_state, check_state_tensor

# A call stores at most this many values in the rolling window; beyond it, evenly spaced order
# statistics stand for the rest, each with the weight of the values it replaces.
MAX_VALUES_PER_STEP = 1024

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
        self.calls: Tensor | None = None
        """0-d int64: choices made, from which ties at the price draw their lots."""
        self._calls_before = 0  # until `calls` is there
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
        if self._values.shape[:-2] != lead:
            raise ValueError(
                f"values must have the leading dimensions of earlier calls, "
                f"{list(self._values.shape[:-2])}, got {list(lead)}; a window belongs to them."
            )
        if self.calls is None:
            self.calls = torch.full((), self._calls_before, device=values.device)
        self._stands_for, self._valid, self.calls = (
            part.to(values.device) for part in (self._stands_for, self._valid, self.calls)
        )
        dtype = torch.promote_types(self._values.dtype, values.dtype)
        self._values = self._values.to(values.device, dtype)
        if (more := width - self._values.shape[-1]) > 0:
            self._values = torch.nn.functional.pad(self._values, (0, more), value=math.nan)

    def push(self, values: Tensor, able: Tensor, num_valid: Tensor) -> None:
        """Add one call, where any unit counted.

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

    def count_call(self, counts: Tensor | int = 1) -> None:
        """Count one choice; `counts` is 0 or False for one that is not remembered."""
        if self.calls is None:
            self._calls_before += int(counts)
        else:
            self.calls.add_(counts)

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

    def valid(self) -> list[Any]:
        """Return the units that counted in each past call, oldest first; reads the device."""
        return [] if self._values is None else self._valid[..., self._first() :].tolist()

    def _first(self) -> int:
        """Return the oldest slot that any member has filled."""
        filled = int((self._valid > 0).sum(-1).max()) if self._valid.numel() else 0
        return self.size - filled

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers, loadable with weights_only=True."""
        if self._values is None:
            return {}
        first = self._first()
        return {
            "values": self._values[..., first:, :].clone(),
            "stands_for": self._stands_for[..., first:].clone(),
            "valid": self._valid[..., first:].clone(),
        }

    def load_state_dict(self, state: dict[str, Any], calls: int = 0) -> None:
        """Restore what `state_dict` saved, keeping the newest `size` calls.

        Args:
            state: from `state_dict`, checked by `check_past`.
            calls: choices made until then.
        """
        self.calls, self._calls_before, self._values = None, calls, None
        if not state or not self.size:
            return
        kept = min(self.size, state["valid"].shape[-1])
        more = self.size - kept
        pad = torch.nn.functional.pad
        start = state["valid"].shape[-1] - kept
        self._values = pad(state["values"][..., start:, :], (0, 0, more, 0), value=math.nan).clone()
        self._stands_for = pad(state["stands_for"][..., start:], (more, 0), value=1.0).clone()
        self._valid = pad(state["valid"][..., start:], (more, 0)).clone()


def check_past(state: dict[str, Any]) -> None:
    """Raise a ValueError unless it is what `RollingPrice.state_dict` returns, {} included.

    NaN and infinity are fine among the values: NaN says that no unit stands there. There are never
    more values than units that counted.
    """
    if state == {}:
        return
    check_state("state['past']", state, {"values", "stands_for", "valid"})
    name = "state['past']['values']"
    values = check_float(name, state["values"])
    stands_for = check_state_tensor(
        "state['past']['stands_for']", state["stands_for"], torch.float64, least=1.0
    )
    valid = check_state_tensor("state['past']['valid']", state["valid"], torch.int64)
    if not values.shape[:-1] == stands_for.shape == valid.shape:
        raise ValueError(
            f"state['past'] must have values [..., calls, width], and stands_for and valid "
            f"[..., calls], got {[list(part.shape) for part in (values, stands_for, valid)]}; give "
            f"what Gate.state_dict() returned."
        )
    held = (~values.isnan()).sum(-1) * stands_for
    too_many = held > valid * (1 + _ROUNDING)
    if bool(too_many.any()):
        raise ValueError(
            f"{name} must stand for at most as many units as counted in their call, got "
            f"{held[too_many][0].item():g} of {valid[too_many][0].item()}; the state is damaged: "
            f"load an older one, or start the gate anew."
        )


def _shifted(past: Tensor, new: Tensor, dim: int, where: Tensor) -> Tensor:
    """Return the past with its oldest entry dropped and `new` appended, where it is to be."""
    rest = past.narrow(dim, 1, past.shape[dim] - 1)
    return torch.where(where, torch.cat([rest, new.to(past.dtype)], dim), past)
