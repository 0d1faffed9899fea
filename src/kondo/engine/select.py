"""Stage 2, select: log-probs and advantages -> values of the gate's signal -> kept elements.

The device is read once. Where there are few units their values are what is read, and the gate
chooses on the CPU: a dozen small operations cost microseconds there, on a GPU a launch each. Else
the gate chooses on the device, and counts, price and rate are read. Only after that is anything
refused, with a message that looks closer.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, check_mask, expand_rows, first_unit
from kondo.core.contract import BaseGate, Choice, Signal, attribute_of
from kondo.core.delight import check_excess, excess
from kondo.core.rules import with_free_reads

Unit = Literal["sample", "token", "sequence"]

# Up to this many units a CUDA batch is chosen from on the CPU.
FEW_UNITS = 65_536


class Counts(NamedTuple):
    """How much counts and how much is kept."""

    units: int
    """That count."""
    units_kept: int
    elements: int
    """That count."""
    elements_kept: int
    rows: int
    rows_kept: int
    """Rows with a kept element."""
    hidden_nan: int
    """Elements with a NaN that the mask hides."""
    rows_screened: int
    """Rows that entered a screening forward; the screen tells."""
    surprised: int
    """Elements that count whose log-probs are known."""
    price: float
    rate: float
    surprisal: float
    """Sum over these elements; NaN where none are known."""
    advantage: float = 0.0
    """Sum over elements that count."""
    abs_advantage: float = 0.0
    """Sum of absolute values, likewise."""

    @property
    def entropy(self) -> float:
        """Mean surprisal: on-policy, an estimate of the policy's entropy per element."""
        return self.surprisal / self.surprised if self.surprised else math.nan

    def denominator(self, asked: str | float) -> float:
        """Return what the sum of losses is divided by; see `kondo.Options`."""
        counted = {"full": self.elements, "kept": self.elements_kept}
        return max(1.0, float(counted[asked])) if isinstance(asked, str) else float(asked)


class Selection(NamedTuple):
    """What was selected. Shapes: N rows, T tokens (absent for unit "sample")."""

    values: Tensor
    """The gate's signal per unit: [N], or [N, T] for unit "token"."""
    unit_mask: Tensor
    """bool like values: the unit counts."""
    choice: Choice
    """The gate's choice per unit."""
    mask: Tensor
    """bool like log_probs: the element counts."""
    weight: Tensor | None
    """float like log_probs: factor of each element's loss; 0 where not kept. None: 1 where kept."""
    keep: Tensor
    """bool like log_probs: the element is kept."""
    rows: Tensor
    """[R] int64, ascending: rows with a kept element."""
    counts: Counts
    """Of the selection as it was made. Rows that move to another rank afterwards take mask, weight
    and keep along; these stay with the choice."""
    whole: bool = False
    """Every element of every row is kept with weight 1; keep and mask have one value per row."""
    by_row: bool = False
    """A kept row is kept in all its elements that count."""
    host_rows: Tensor | None = None
    """`rows` on the CPU, where they are known there."""


def select(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: BaseGate,
    unit: Unit = "sample",
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    density: bool = False,
) -> Selection:
    """Let the gate choose among the units.

    unit "sample" gates [N]. For [N, T], "token" gates every token, and "sequence" gates rows by the
    sum of their tokens' values. The sum, not the mean: the action is then the whole sequence, with
    surprisal -log pi(sequence) = sum of token surprisals, and delight is the paper's U * l of that
    action. A mean would rank a short sequence above a long one of the same surprise per token. A
    signal with another rule for sequences brings it as `of_sequences`, and one with another rule
    for densities, whose log_probs are measured from the mode, as `of_densities`.

    Raises:
        ValueError: shapes that do not fit the unit, NaN in a unit that counts, or a kept unit with
            an infinite value, whose gradient would not be finite.
    """
    valid = _check_inputs(log_probs, advantages, unit, mask)
    units = _units(gate, log_probs, advantages, valid, unit, density)
    early = gate.remembers or not units.values.is_cuda
    if early:  # a broken batch must not enter a running state
        hidden_nan = _refuse_inputs(units.faults.tolist(), log_probs, advantages, valid)
        _refuse_unknown(units)
    free = not units.values.is_cuda
    choice = with_free_reads(free, gate.choose_all, units.values, units.mask, generator)
    numbers = (torch.as_tensor(one, dtype=torch.float64) for one in (choice.price, choice.rate))
    choice = choice._replace(**dict(zip(("price", "rate"), numbers, strict=True)))
    _check_shapes(choice, units.mask)
    # A sequence that counts has an element that counts, so its unit is kept where its row is.
    kept_rows = choice.keep.any(dim=1) if unit == "token" else choice.keep
    read = _read(units, choice, kept_rows)
    if not early:
        hidden_nan = _refuse_inputs(read[:6], log_probs, advantages, valid)
    _refuse_choice(read[6:10], choice, units)
    counted, kept, elements, elements_kept, rows_kept = (int(number) for number in read[10:15])
    index = kept_rows.nonzero_static(size=rows_kept).squeeze(1)  # of known size: no read
    counts = Counts(
        units=counted,
        units_kept=kept,
        elements=elements,
        elements_kept=elements_kept,
        rows=log_probs.shape[0],
        rows_kept=rows_kept,
        hidden_nan=hidden_nan,
        rows_screened=0,
        surprised=elements,
        price=read[15],
        rate=read[16],
        surprisal=read[3],
        advantage=read[4],
        abs_advantage=read[5],
    )
    rows, weight, keep = copy_together((index, choice.weight, choice.keep), log_probs.device)
    if unit == "sequence":
        keep, weight = keep.unsqueeze(1) & valid, weight.unsqueeze(1) * valid
    return Selection(
        values=units.values,
        unit_mask=units.mask,
        choice=choice,
        mask=valid,
        weight=weight,
        keep=keep,
        rows=rows,
        counts=counts,
        by_row=unit != "token",
        host_rows=None if index.is_cuda else index,
    )


class _Units(NamedTuple):
    """What a gate chooses from: on the CPU where there are few, else on the device."""

    faults: Tensor
    """[6], see `_faults`."""
    values: Tensor
    mask: Tensor
    elements: Tensor
    """Of each unit that count, like mask."""


def _check_inputs(log_probs: Tensor, advantages: Tensor, unit: Unit, mask: Tensor | None) -> Tensor:
    """Return which elements count, after checking shapes and dtypes."""
    check_unit(unit, log_probs)
    check_float("advantages", advantages)
    valid = check_mask(mask, log_probs.shape)
    expand_rows("advantages", advantages, log_probs.shape)  # refuses other shapes
    return torch.ones_like(log_probs, dtype=torch.bool) if valid is None else valid


def _units(
    gate: BaseGate,
    log_probs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    unit: Unit,
    density: bool,
) -> _Units:
    # Our own signals need log-probs that are at most 0; others may be given densities.
    ours = attribute_of(gate.signal, "unchecked") is not None
    faults = _faults(log_probs, advantages, valid, ours)
    values, unit_mask = unit_values(gate.signal, log_probs, advantages, valid, unit, density)
    elements = valid.sum(dim=1) if unit == "sequence" else valid
    units = _Units(faults, values, unit_mask, elements)
    few = gate.on_host and values.is_cuda and values.numel() <= FEW_UNITS
    if not few:
        return units
    ordered = (faults, elements.long(), values, unit_mask)  # by the size of their elements
    faults, elements, values, unit_mask = copy_together(ordered, torch.device("cpu"))
    return _Units(faults, values, unit_mask, elements)


def _read(units: _Units, choice: Choice, kept_rows: Tensor) -> list[float]:
    """Return what the host must know, [17], after one read.

    What `_faults` says, four faults of the choice (see `_refuse_choice`), five sizes, price, rate.
    """
    keep, mask = choice.keep, units.mask
    # On masks, a > b is "a and not b" in one kernel.
    masks = torch.stack([keep > mask, units.values.isnan() & mask, mask, keep]).flatten(1)
    outside, unknown, counted, kept = masks.sum(1)
    bought, weighed = (
        torch.where(keep, part, 0.0).sum(dtype=torch.float64)
        for part in (units.values, choice.weight)
    )
    elements = torch.stack([units.elements, units.elements * keep]).flatten(1).sum(1)
    rows = kept if kept_rows is keep else kept_rows.sum()
    faults = (outside, unknown, bought, weighed)
    numbers = (*faults, counted, kept, *elements, rows, choice.price, choice.rate)
    if not keep.is_cuda:  # nothing to wait for
        return [*units.faults.tolist(), *(float(number) for number in numbers)]
    # float64 holds every count below 2^53.
    together = torch.stack([number.to(keep.device).double() for number in numbers])
    read: list[float] = torch.cat([units.faults, together]).tolist()
    return read


def copy_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors, those of larger elements first, to a device in one piece.

    To a GPU without waiting; to the CPU that is the one read of a step.
    """
    if all(part.device == device for part in parts):
        return list(parts)
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    together, to_gpu = torch.cat(flat), device.type == "cuda"
    if to_gpu:
        together = together.pin_memory()
    there = together.to(device, non_blocking=to_gpu)
    pieces = torch.split(there, [part.numel() for part in flat])
    return [
        piece.view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)
    ]


def unit_values(
    signal: Signal,
    log_probs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    unit: Unit,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the signal's value of every unit, and which units count: [N], or [N, T] for tokens."""
    function: Signal = attribute_of(signal, "unchecked", signal)
    if unit == "sequence":
        function = attribute_of(signal, "of_sequences", function)
    if density:
        function = attribute_of(signal, "of_densities", function)
    values = at_least_float32(function(log_probs, advantages, mask=valid))
    unit_mask = valid
    if unit == "sequence":
        unit_mask = valid.any(dim=1)
        values = values if values.ndim == 1 else values.sum(dim=1)
    if values.shape != unit_mask.shape:
        raise ValueError(
            f"signal must return one value per unit, {list(unit_mask.shape)}, got "
            f"{list(values.shape)}; for sequences, one per row or one per token to be summed."
        )
    return values, unit_mask


def everything(
    num_rows: int,
    mask: Tensor | None,
    device: torch.device,
    num_counted: int | None = None,
    *,
    of_rows: bool = False,
) -> Selection:
    """Return the selection of a dense step: all elements that count, with weight 1.

    Args:
        num_rows: N.
        mask: bool [N] or [N, T]; None where everything counts.
        device: where the work happens.
        num_counted: elements that count, in every row some, where that is known: nothing is read.
        of_rows: the mask has one value per row, whatever their tokens.
    """
    valid = torch.ones(num_rows, dtype=torch.bool, device=device) if mask is None else mask
    if of_rows:
        valid = valid.reshape(num_rows)
    whole = mask is None or of_rows
    index = torch.arange(num_rows, device=device)
    elements = num_rows if num_counted is None else num_counted
    host: Tensor | None = torch.arange(num_rows)
    if mask is not None and num_counted is None:
        some = valid if valid.ndim == 1 else valid.any(dim=1)
        elements, rows_kept = (int(n) for n in torch.stack([valid.sum(), some.sum()]).tolist())
        if rows_kept < num_rows:
            index, host = some.nonzero_static(size=rows_kept).squeeze(1), None
    counts = Counts(
        units=elements,
        units_kept=elements,
        elements=elements,
        elements_kept=elements,
        rows=num_rows,
        rows_kept=index.numel(),
        hidden_nan=0,
        rows_screened=0,
        surprised=0,
        price=-math.inf,
        rate=float(elements > 0),
        surprisal=math.nan,
    )
    price, rate = torch.tensor([counts.price, counts.rate], dtype=torch.float64)
    choice = Choice(valid, valid, price, rate, valid)  # weights of 1, whatever their dtype
    return Selection(
        values=valid,
        unit_mask=valid,
        choice=choice,
        mask=valid,
        weight=None,
        keep=valid,
        rows=index,
        counts=counts,
        whole=whole,
        by_row=True,
        host_rows=host,
    )


def check_unit(unit: str, log_probs: Tensor) -> None:
    """Raise a ValueError unless log-probs have the shape that the unit needs."""
    if unit not in ("sample", "token", "sequence"):
        raise ValueError(f'unit must be "sample", "token" or "sequence", got {unit!r}.')
    if (unit == "sample") != (log_probs.ndim == 1):
        wanted = "[N]" if unit == "sample" else "[N, T]"
        raise ValueError(
            f'unit "{unit}" needs log-probs of shape {wanted}, got {list(log_probs.shape)}; '
            f'use unit="sample" for [N], "token" or "sequence" for [N, T].'
        )


def _check_shapes(choice: Choice, unit_mask: Tensor) -> None:
    """Validate the output of user-defined gates."""
    if choice.keep.dtype != torch.bool:
        raise ValueError(
            f"gate must return keep of dtype torch.bool, got {choice.keep.dtype}; compare with "
            f"the price, and put factors into weight."
        )
    for name in ("price", "rate"):
        if getattr(choice, name).ndim:
            raise ValueError(
                f"gate must return one {name} for all units, 0-d, got shape "
                f"{list(getattr(choice, name).shape)}; flatten the values first."
            )
    for name in ("keep", "weight"):
        shape = getattr(choice, name).shape
        if shape != unit_mask.shape:
            raise ValueError(
                f"gate must return {name} with one value per unit, {list(unit_mask.shape)}, got "
                f"{list(shape)}."
            )


def _faults(log_probs: Tensor, advantages: Tensor, valid: Tensor, at_most_zero: bool) -> Tensor:
    """Return [6] float64: two sums that are finite, an excess <= 0, and three sums to watch.

    The first are of all log-probs and advantages, the last of surprisals, advantages and absolute
    advantages that count. A NaN or an infinity never leaves a sum finite; log-probs may be
    -infinity. Log-probs of densities may exceed 0.
    """
    counted = torch.where(valid, log_probs, 0.0)
    centred = torch.where(valid, expand_rows("advantages", advantages, log_probs.shape), 0.0)
    summed = (log_probs, advantages, counted, centred, centred.abs())
    sums = [part.sum(dtype=torch.float64) for part in summed]
    above = excess(counted).double() if at_most_zero else torch.zeros_like(sums[0])
    return torch.stack([*sums[:2], above, -sums[2], *sums[3:]])


def _refuse_inputs(
    faults: list[float], log_probs: Tensor, advantages: Tensor, valid: Tensor
) -> int:
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


def _refuse_unknown(units: _Units) -> None:
    """Raise if a unit that counts has a value of NaN."""
    unknown = units.values.isnan() & units.mask
    if bool(unknown.any()):
        raise ValueError(
            f"signal must not return NaN for a unit that counts, got it in {first_unit(unknown)} "
            f"({int(unknown.sum())} in all)."
        )


def _refuse_choice(faults: list[float], choice: Choice, units: _Units) -> None:
    """Raise if a value is NaN, or a kept unit does not count, or its value or weight is not finite.

    A skipped unit of infinite value is fine.

    Args:
        faults: units kept that do not count, NaN in units that count, sums of the kept values and
            of their weights.
        choice: what the gate chose.
        units: what it chose from.
    """
    num_outside, num_unknown, worth, weight = faults
    if not (num_outside or num_unknown) and math.isfinite(worth) and math.isfinite(weight):
        return
    outside = choice.keep & ~units.mask
    if num_outside:
        raise ValueError(
            f"gate must not keep units that the mask leaves out, got {first_unit(outside)}; "
            f"multiply its keep by the mask."
        )
    _refuse_unknown(units)
    broken = choice.keep & ~units.values.isfinite()
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
