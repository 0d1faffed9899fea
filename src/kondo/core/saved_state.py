"""Checks of the saved state of a gate."""

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


def check_state(name: str, state: Any, keys: set[str]) -> None:
    """Raise a ValueError unless a saved state is a dict with these keys."""
    if not isinstance(state, Mapping) or state.keys() != keys:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"{name} must have the keys {sorted(keys)}, got {got}; give what Gate.state_dict() "
            f"returned."
        )


def check_state_count(name: str, value: Any) -> int:
    """Return a number of a saved state that counts something."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(
            f"{name} must be a whole number >= 0, got {value!r}; give what Gate.state_dict() "
            f"returned."
        )
    return int(value)


def check_state_tensor(name: str, value: Any, dtype: torch.dtype, least: float = 0.0) -> Tensor:
    """Return a tensor of a saved state: of this dtype, finite, and nowhere below `least`."""
    if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim == 0:
        got = f"{value.ndim}-d {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must be a tensor of {dtype} with at least 1 dimension, got {got}; give what "
            f"Gate.state_dict() returned."
        )
    broken = ~((value >= least) & (value < math.inf))  # NaN is neither
    if bool(broken.any()):
        raise ValueError(
            f"{name} must be finite and at least {least:g}, got {value[broken][0].item()}; the "
            f"state is damaged: load an older one, or start the gate anew."
        )
    return value
