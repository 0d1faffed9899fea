"""Checks of arguments: each raises a ValueError that names the argument.

Every message says what was expected, what came, and what to do.
"""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def require(holds: bool, why: str) -> None:
    """Raise a ValueError that says why, unless it holds. For what costs nothing to put in words."""
    if not holds:
        raise ValueError(why)


def check_number(name: str, value: Any) -> float:
    """Return an option that is a number, as an int or a float of Python; True would count as 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, "a number", value, "write it as one, such as 1 or 0.1")
    return int(value) if isinstance(value, Integral) else float(value)


def check_optional(name: str, value: Any) -> float | None:
    """Return an option that is a number or None."""
    return None if value is None else check_number(name, value)


def check_whole(name: str, value: Any) -> int:
    """Return an option that counts something; a float does not, not even 3.0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        hint = "write it without a decimal point, such as 3"
        raise _wrong_type(name, "a whole number", value, hint)
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Return an option that is True or False: text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise _wrong_type(name, "True or False", value, "give one of the two")
    return value


def check_size(name: str, size: Any) -> None:
    """Raise a ValueError unless it is None or a whole number of rows, at least one."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, Integral):
        hint = "round it with int(...), or give None for all rows at once"
        raise _wrong_type(name, "a whole number of rows", size, hint)
    require(int(size) >= 1, f"{name} must be at least 1 row, got {size}; None takes all at once.")


def _wrong_type(name: str, wanted: str, value: Any, hint: str) -> ValueError:
    kind = type(value).__name__
    return ValueError(f"{name} must be {wanted}, got {value!r} of type {kind}; {hint}.")


def check_dense(name: str, value: Tensor, *, coo: bool = False) -> None:
    """Refuse a tensor whose rows cannot be taken by their places: nested, sparse or without data.

    Args:
        name: of the argument, or a path in it.
        value: a tensor.
        coo: whether the coordinate format, whose rows can be taken, is fine.
    """
    if value.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one, whose rows differ in length; pad it "
            f"with torch.nested.to_padded_tensor(tensor, 0.0), and give a mask, or the lengths "
            f"beside it."
        )
    if value.layout != torch.strided and not (coo and value.layout == torch.sparse_coo):
        raise ValueError(
            f"{name} must be a dense tensor, got the layout {value.layout}; convert it with "
            f".to_dense()."
        )
    if value.is_meta:
        raise ValueError(
            f"{name} must be a tensor with data, got one on the meta device; make it on a real one."
        )


def check_float(name: str, value: object) -> Tensor:
    """Return `value` if it is a floating-point tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a floating-point tensor, got {type(value).__name__}; "
            f"wrap it with torch.as_tensor(...)."
        )
    if not value.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {value.dtype}; convert it with {name}.float()."
        )
    check_dense(name, value)
    return value


def check_mask(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return `mask` broadcast to `shape`: bool, True means "counts"."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"mask must be a bool tensor where True means 'counts', got {got}; "
            f"convert it with mask.bool()."
        )
    check_dense("mask", mask)
    return expand_rows("mask", mask, shape)


def expand_rows(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """Broadcast one value per row, [..., N], to `shape`, [..., N, T]; a full shape passes."""
    if value.shape == shape:
        return value
    rows = shape[:-1]
    if rows and value.shape in (rows, (*rows, 1)):
        return value.reshape(*rows, 1).expand(shape)
    allowed = f"{list(shape)}" + (f" or {list(rows)}" if rows else "")
    raise ValueError(
        f"{name} must have shape {allowed}, got {list(value.shape)}; give one value per unit, or "
        f"one per row."
    )


def prepare_units(
    log_probs: Tensor, advantages: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check, detach and broadcast; write 0 wherever the mask says a unit does not count."""
    log_probs = check_float("log_probs", log_probs).detach()
    advantages = check_float("advantages", advantages).detach()
    advantages = at_least_float32(expand_rows("advantages", advantages, log_probs.shape))
    mask = check_mask(mask, log_probs.shape)
    if mask is not None:
        log_probs = torch.where(mask, log_probs, 0.0)
        advantages = torch.where(mask, advantages, 0.0)
    return log_probs, advantages, mask


def at_least_float32(value: Tensor) -> Tensor:
    """Upcast half-precision tensors to float32; keep float32 and float64."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def first_unit(where: Tensor) -> str:
    """Name the first True position of `where`, for error messages."""
    position = where.nonzero()[0].tolist()
    return f"unit {position[0] if len(position) == 1 else tuple(position)}"
