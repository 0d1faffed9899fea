"""Stage 2, select: log-probs and advantages -> delight -> gate -> kept elements and rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kondo.core import delight as delights
from kondo.core._checks import check_float, check_mask, expand_rows, first_unit
from kondo.core.contract import Choice as GateOutput

Unit = Literal["sample", "token", "sequence"]
GateLike = Callable[..., GateOutput]
Priority = Callable[..., Tensor]


def needs_log_probs(priority: Priority) -> bool:
    """Return whether a priority looks at log-probs; it does unless it says that it does not.

    See `kondo.signals`. Options that were bound with `functools.partial` change nothing. Of what
    wraps another function (`functools.wraps` copies attributes) nothing is believed.

    Example:
        >>> import kondo
        >>> needs_log_probs(kondo.delight), needs_log_probs(kondo.signals.advantage)
        (True, False)
    """
    while isinstance(priority, partial) and not hasattr(priority, "needs_log_probs"):
        priority = priority.func
    return hasattr(priority, "__wrapped__") or bool(getattr(priority, "needs_log_probs", True))


class Counts(NamedTuple):
    """How much counts and how much is kept, read from the device together."""

    units: int
    """That count."""
    units_kept: int
    elements: int
    """That count."""
    elements_kept: int


class Selection(NamedTuple):
    """What was selected. Shapes: N rows, T tokens (absent for unit "sample")."""

    delight: Tensor
    """Per unit: [N], or [N, T] for unit "token"."""
    unit_mask: Tensor
    """bool like delight: the unit counts."""
    gate: GateOutput
    """The gate's decision per unit."""
    mask: Tensor
    """bool like log_probs: the element counts."""
    weight: Tensor
    """float like log_probs: factor of each element's loss; 0 where not kept."""
    keep: Tensor
    """bool like log_probs: the element is kept."""
    rows: Tensor
    """[R] int64, ascending: rows with a kept element."""
    hidden_nan: Tensor
    """0-d int64: elements with a NaN that the mask hides."""
    counts: Counts
    """Sizes of unit_mask, of the gate's keep, of mask and of keep, as they were selected: rows that
    move to another rank afterwards take mask and keep along, and these stay with the choice."""


def select(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: GateLike,
    priority: Priority,
    unit: Unit = "sample",
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Selection:
    """Gate units by their priority (delight).

    unit "sample" gates [N]. For [N, T], "token" gates every token, and "sequence" gates rows by the
    sum of their tokens' delight. The sum, not the mean: the action is then the whole sequence, with
    surprisal -log pi(sequence) = sum of token surprisals, and delight is the paper's U * l of that
    action. A mean would rank a short sequence above a long one of the same surprise per token. A
    priority with another rule for rows returns [N] itself.

    Raises:
        ValueError: shapes that do not fit the unit, NaN in a unit that counts, or a kept unit with
            infinite delight, whose gradient would not be finite.
    """
    _check_unit(unit, log_probs)
    check_float("advantages", advantages)
    valid = check_mask(mask, log_probs.shape)
    if valid is None:
        valid = torch.ones_like(log_probs, dtype=torch.bool)
    expand_rows("advantages", advantages, log_probs.shape)  # refuses other shapes
    hidden_nan = _check_finite_inputs(log_probs, advantages, valid)
    delight, unit_mask = priority(log_probs, advantages, mask=valid), valid
    if getattr(gate, "of_advantages", False):
        _check_of_advantages(priority, unit, delight)
    if unit == "sequence":
        unit_mask = valid.any(dim=1)
        delight = delight if delight.ndim == 1 else delight.sum(dim=1)
    if delight.shape != unit_mask.shape:
        raise ValueError(
            f"priority must return one value per unit, {list(unit_mask.shape)}, got "
            f"{list(delight.shape)}; for sequences, one per row or one per token to be summed."
        )
    decision = gate(delight, unit_mask, generator)
    _check_shapes(decision, unit_mask)
    keep, weight = decision.keep, decision.weight
    if unit == "sequence":
        keep, weight = keep.unsqueeze(1) & valid, weight.unsqueeze(1) * valid
    # A sequence that counts has an element that counts, so its unit is kept where its row is.
    kept_rows = keep.any(dim=1) if unit == "token" else decision.keep
    outside = decision.keep > unit_mask  # on masks, "and not" in one kernel
    bought = delight * decision.keep
    parts = (outside, bought, kept_rows, unit_mask, decision.keep, valid, keep)
    # One device sync; float64 holds every count below 2^53.
    num_outside, worth, num_rows, *counts = torch.stack(
        [part.sum(dtype=torch.float64) for part in parts]
    ).tolist()
    if num_outside or not math.isfinite(worth):
        _refuse(decision, delight, outside)
    index = kept_rows.nonzero_static(size=int(num_rows)).squeeze(1)  # of known size: no sync
    sizes = Counts(*(int(count) for count in counts))
    return Selection(delight, unit_mask, decision, valid, weight, keep, index, hidden_nan, sizes)


def _check_of_advantages(priority: Priority, unit: Unit, values: Tensor) -> None:
    """Refuse what a gate that is made for advantages would choose by without a word."""
    if priority is delights.delight:
        raise ValueError(
            "priority must be an advantage for a gate by variance, got kondo.delight, the default; "
            'give priority=kondo.signals.sequence_advantage for unit "sequence", or '
            "kondo.signals.advantage."
        )
    if unit == "sequence" and values.ndim == 2:
        raise ValueError(
            "priority must return one value per row, [N], for a gate by variance and unit "
            f'"sequence", got {list(values.shape)}, whose sums would favour long rows; give '
            "priority=kondo.signals.sequence_advantage."
        )


def _check_shapes(decision: GateOutput, unit_mask: Tensor) -> None:
    """A gate may be anybody's: hold it to the units, and to a decision."""
    if decision.keep.dtype != torch.bool:
        raise ValueError(
            f"gate must return keep of dtype torch.bool, got {decision.keep.dtype}; compare with "
            f"the price, and put factors into weight."
        )
    for name in ("keep", "weight"):
        shape = getattr(decision, name).shape
        if shape != unit_mask.shape:
            raise ValueError(
                f"gate must return {name} with one value per unit, {list(unit_mask.shape)}, got "
                f"{list(shape)}."
            )


def _refuse(decision: GateOutput, delight: Tensor, outside: Tensor) -> None:
    """Raise if a unit is kept that does not count, or whose delight is not finite.

    A skipped unit of infinite delight, which also spoils the sum, is fine.
    """
    if bool(outside.any()):
        raise ValueError(
            f"gate must not keep units that the mask leaves out, got {first_unit(outside)}; "
            f"multiply its keep by the mask."
        )
    infinite = decision.keep & ~delight.isfinite()
    if bool(infinite.any()):
        raise ValueError(
            f"delight must be finite in kept units, got {first_unit(infinite)} with an infinite "
            f"one: the policy gives this action probability zero, so its gradient is not finite. "
            f"Mask it, or use the log-probs of the policy that took it."
        )


def _check_unit(unit: str, log_probs: Tensor) -> None:
    if unit not in ("sample", "token", "sequence"):
        raise ValueError(f'unit must be "sample", "token" or "sequence", got {unit!r}.')
    if (unit == "sample") != (log_probs.ndim == 1):
        wanted = "[N]" if unit == "sample" else "[N, T]"
        raise ValueError(
            f'unit "{unit}" needs log-probs of shape {wanted}, got {list(log_probs.shape)}; '
            f'use unit="sample" for [N], "token" or "sequence" for [N, T].'
        )


def _check_finite_inputs(log_probs: Tensor, advantages: Tensor, valid: Tensor) -> Tensor:
    """Name the unit and the argument of a NaN that counts, and refuse infinite advantages.

    Returns the number of NaN that the mask hides, 0-d int64. One device sync, more only where a sum
    says that there may be something: a NaN or an infinity never leaves a sum finite.
    """
    sums = [values.sum(dtype=torch.float64) for values in (log_probs, advantages)]
    log_prob, advantage = torch.stack(sums).tolist()
    if not math.isnan(log_prob) and math.isfinite(advantage):  # log-probs may be -infinity
        return torch.zeros((), dtype=torch.int64, device=valid.device)
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
    return ((log_probs.isnan() | spread.isnan()) & ~valid).sum()
