"""Refuse what cannot be selected from: shapes, NaN, and choices that cannot be right.

A NaN or an infinity never leaves a sum finite. So a few sums are read, and only where one is broken
does anything look closer, and name the unit.
"""

import math

import torch
from torch import Tensor

from kondo.arguments import check_float, check_mask, expand_rows, first_unit
from kondo.core.base_gate import Choice, Unit
from kondo.core.delight import check_excess, excess


def check_unit(unit: str) -> None:
    """Raise a ValueError unless it is one of the three units."""
    if unit not in ("sample", "token", "sequence"):
        raise ValueError(f'unit must be "sample", "token" or "sequence", got {unit!r}.')


def check_shape(unit: Unit, log_probs: Tensor) -> None:
    """Raise a ValueError unless log-probs of one batch have the shape that the unit needs."""
    if (unit == "sample") != (log_probs.ndim == 1):
        wanted = "[N]" if unit == "sample" else "[N, T]"
        raise ValueError(
            f'unit "{unit}" needs log-probs of shape {wanted}, got {list(log_probs.shape)}; '
            f'use unit="sample" for [N], "token" or "sequence" for [N, T].'
        )


def check_inputs(log_probs: Tensor, advantages: Tensor, unit: Unit, mask: Tensor | None) -> Tensor:
    """Return which elements count, after checking shapes and dtypes."""
    check_unit(unit)
    if log_probs.ndim < (1 if unit == "sample" else 2):
        check_shape(unit, log_probs)
    check_float("advantages", advantages)
    valid = check_mask(mask, log_probs.shape)
    expand_rows("advantages", advantages, log_probs.shape)  # refuses other shapes
    for name, value in {"advantages": advantages, "mask": mask}.items():
        if unit == "sample" and value is not None and value.shape != log_probs.shape:
            raise ValueError(
                f'{name} must have shape {list(log_probs.shape)} for unit "sample", got '
                f"{list(value.shape)}; give one value per sample."
            )
    return torch.ones_like(log_probs, dtype=torch.bool) if valid is None else valid


def check_choice(choice: Choice, unit_mask: Tensor, lead: torch.Size) -> None:
    """Validate dtypes and shapes of a choice; [..., M], and [...] for price and rate."""
    if choice.keep.dtype != torch.bool:
        raise ValueError(
            f"gate must return keep of dtype torch.bool, got {choice.keep.dtype}; compare with "
            f"the price, and put factors into weight."
        )
    for name in ("price", "rate"):
        if getattr(choice, name).shape != lead:
            raise ValueError(
                f"gate must return one {name} for all units of a choice, {list(lead) or '0-d'}, "
                f"got shape {list(getattr(choice, name).shape)}; flatten the values first."
            )
    for name in ("keep", "weight"):
        shape = getattr(choice, name).shape
        if shape != unit_mask.shape:
            raise ValueError(
                f"gate must return {name} with one value per unit, {list(unit_mask.shape)}, got "
                f"{list(shape)}."
            )


def faults_of(log_probs: Tensor, advantages: Tensor, valid: Tensor, at_most_zero: bool) -> Tensor:
    """Return [6] float64: two sums that are finite, an excess <= 0, and three sums to watch.

    The first are of all log-probs and advantages, the last of surprisals, advantages and absolute
    advantages that count. Log-probs may be -infinity; those of densities may exceed 0.
    """
    counted = torch.where(valid, log_probs, 0.0)
    centred = torch.where(valid, expand_rows("advantages", advantages, log_probs.shape), 0.0)
    summed = (log_probs, advantages, counted, centred, centred.abs())
    sums = [part.sum(dtype=torch.float64) for part in summed]
    above = excess(counted).double() if at_most_zero else torch.zeros_like(sums[0])
    return torch.stack([*sums[:2], above, -sums[2], *sums[3:]])


def refuse_inputs(faults: list[float], log_probs: Tensor, advantages: Tensor, valid: Tensor) -> int:
    """Name the unit and the argument of a NaN that counts, and refuse infinite advantages.

    Returns:
        The number of elements with a NaN that the mask hides.
    """
    log_prob, advantage, above = faults[:3]
    if above > 0:
        check_excess(torch.where(valid, log_probs, 0.0))
    if not math.isnan(log_prob) and math.isfinite(advantage):
        return 0
    spread = expand_rows("advantages", advantages, log_probs.shape)
    suspects = {
        "log_prob must not hold NaN": log_probs.isnan() & valid,
        "advantages must not hold NaN or infinity": ~spread.isfinite() & valid,
    }
    for rule, broken in suspects.items():
        if bool(broken.any()):
            raise ValueError(
                f"{rule} in a unit that counts, got it in {first_unit(broken)} "
                f"({int(broken.sum())} in all); fix it or mask the unit."
            )
    return int(((log_probs.isnan() | spread.isnan()) & ~valid).sum())


def refuse_unknown(values: Tensor, mask: Tensor) -> None:
    """Raise a ValueError if a unit that counts has a value of NaN."""
    unknown = values.isnan() & mask
    if bool(unknown.any()):
        raise ValueError(
            f"signal must not return NaN for a unit that counts, got it in {first_unit(unknown)} "
            f"({int(unknown.sum())} in all)."
        )


def refuse_choice(faults: list[float], choice: Choice, values: Tensor, mask: Tensor) -> None:
    """Raise if a value is NaN, or a kept unit does not count, or its value or weight is not finite.

    A skipped unit of infinite value is fine.

    Args:
        faults: units kept that do not count, NaN in units that count, sums of the kept values and
            of their weights.
        choice: what the gate chose.
        values: [..., M], what it chose from.
        mask: [..., M] bool.
    """
    num_outside, num_unknown, worth, weight = faults
    if not (num_outside or num_unknown) and math.isfinite(worth) and math.isfinite(weight):
        return
    if num_outside:
        raise ValueError(
            f"gate must not keep units that the mask leaves out, got "
            f"{first_unit(choice.keep & ~mask)}; multiply its keep by the mask."
        )
    refuse_unknown(values, mask)
    broken = choice.keep & ~values.isfinite()
    if bool(broken.any()):
        raise ValueError(
            f"the gate's signal must be finite in kept units, got {first_unit(broken)} with a "
            f"value that is not: the policy gives this action probability zero, so its gradient "
            f"is not finite. Mask it, or use the log-probs of the policy that took it."
        )
    broken = choice.keep & ~choice.weight.isfinite()
    if bool(broken.any()):
        raise ValueError(
            f"gate must return finite weights for kept units, got "
            f"{choice.weight[broken][0].item()} in {first_unit(broken)} ({int(broken.sum())} in "
            f"all); a probability of 0 must not be kept."
        )
