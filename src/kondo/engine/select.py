"""Stage 2, select: log-probs and advantages -> values of the gate's signal -> what the gate keeps.

Nothing is read from a GPU before somebody asks for it. A step asks at once, and reads once: where
there are few units it copies their values, and the gate chooses on the CPU, where a dozen small
operations cost microseconds; on a GPU each of them is a launch.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import check_flag, check_float, check_mask, check_whole, expand_rows
from kondo.core.adapters import adapter_of
from kondo.core.base_gate import AnyGate, BaseGate, Choice, Randomness, Unit
from kondo.core.delight import delight
from kondo.core.given_gates import as_gate
from kondo.core.sampling import with_free_reads
from kondo.core.unit_values import unit_values
from kondo.engine.selection import Counts, KeptRows, Selection, Units

if TYPE_CHECKING:
    from kondo.engine.inputs import Inputs
    from kondo.engine.screen import Screened

# Up to this many units a step chooses on the CPU from a batch on CUDA.
FEW_UNITS = 65_536


def select(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: AnyGate,
    mask: Tensor | None = None,
    unit: Unit | None = None,
    density: bool = False,
    capacity: int | None = None,
    generator: Randomness = None,
) -> Selection:
    """Let a gate choose among the units of a batch, or of many batches at once.

    value = signal(log_probs, advantages)          per unit; a sequence has the sum of its tokens
    keep, weight, price = gate(value, mask)        per choice

    The sum, not the mean: the action is then the whole sequence, with surprisal -log pi(sequence) =
    sum of token surprisals. Nothing is differentiated.

    On the CPU what cannot be right is refused at the call. On a GPU nothing is read, so that a CUDA
    graph can hold the call. A NaN in a unit that counts then makes the weight of this unit NaN;
    nothing else is kept by that choice, and a gate that remembers past calls remembers nothing of
    it. More kept rows than `capacity` make the weights of that choice NaN. `Selection.counts`, and
    `Selection.rows` without a capacity, read the device, and raise for it. They look at log_probs
    and advantages again, so these must stay as they are until then.

    Args:
        log_probs: [..., N] for unit "sample", [..., N, T] for "token" and "sequence". Leading
            dimensions are separate choices.
        advantages: like log_probs, or [..., N].
        gate: `kondo.Gate`, another `kondo.BaseGate`, a callable (values, mask, generator) ->
            `kondo.Choice`, a `kondo.Choice` that was made elsewhere, or None, which keeps all.
        mask: like log_probs, or [..., N]; bool, True means "counts".
        unit: what is gated: "sample", "token" or "sequence". None is "sample", for log-probs [N].
        density: log_probs are densities, measured from the mode: log pi(a) - log pi(mode) <= 0.
        capacity: how many rows `Selection.rows` has, at least as many as are kept; None for those
            that are kept.
        generator: for the gate's draws, the default generator if None. Or the draws themselves,
            uniform on [0, 1), one per unit.

    Returns:
        A `Selection`.

    Raises:
        ValueError: arguments that do not fit together, NaN in a unit that counts, or a kept unit
            with an infinite value, whose gradient would not be finite.

    Example:
        >>> import torch, kondo
        >>> log_probs, advantages = torch.tensor([-1.0, -2.0, -0.1]), torch.tensor([1.0, 1.0, -1.0])
        >>> selection = kondo.select(log_probs, advantages, gate=kondo.Gate(rate=0.3))
        >>> selection.keep, selection.rows, selection.counts.units_kept
        (tensor([False,  True, False]), tensor([1]), 1)

    Reference: https://arxiv.org/abs/2603.20526, Algorithm 1
    """
    log_probs = check_float("log_probs", log_probs).detach()
    advantages = check_float("advantages", advantages).detach()
    if unit is None and log_probs.ndim > 1:
        raise ValueError(
            f'unit must be given for log-probs of shape {list(log_probs.shape)}, got None; "token" '
            f'or "sequence" for [..., N, T], "sample" for [..., N].'
        )
    check_flag("density", density)
    chooser = None if gate is None else as_gate(gate)
    units = units_of(chooser, log_probs, advantages, unit or "sample", mask, density=density)
    if isinstance(generator, Tensor):
        if check_float("generator", generator).shape != units.mask.shape:
            raise ValueError(
                f"generator must hold one draw per unit, {list(units.mask.shape)}, got "
                f"{list(generator.shape)}; give draws uniform on [0, 1), or a torch.Generator."
            )
    elif not (generator is None or isinstance(generator, torch.Generator)):
        raise ValueError(
            f"generator must be a torch.Generator, draws or None, got {type(generator).__name__}; "
            f"write torch.Generator().manual_seed(0)."
        )
    num_rows = units.values.shape[len(units.lead)]
    if capacity is not None and not 1 <= check_whole("capacity", capacity) <= num_rows:
        raise ValueError(
            f"capacity must lie between 1 and the {num_rows} rows of a choice, got "
            f"{capacity}; None gives the rows that are kept."
        )
    return choose(units, chooser, generator, capacity=capacity, reads=not log_probs.is_cuda)


class Judged(NamedTuple):
    """What diagnostics look at: values and choice, of all ranks where they came together."""

    values: Tensor
    mask: Tensor
    choice: Choice
    rows: Tensor | None
    """[N] bool, rows of known value; None for all."""


class Chosen(NamedTuple):
    """What was chosen of this process's rows, and how much of its own and of the rows of all."""

    kept: KeptRows
    own: Counts
    counts: Counts
    judged: Judged | None
    """None for a dense step."""
    kept_of: Sequence[int] = ()
    """Rows kept by every rank; of many ranks alone."""


def choose_rows(inputs: "Inputs", screened: "Screened | None", gate: BaseGate | None) -> Chosen:
    """Select from the one batch of this process's step, and read at once; all without a gate.

    Of a batch on CUDA few units are copied to the CPU with what a gate looks at, which is the one
    read of the step, and the kept rows back to the device of the log-probs.
    """
    if screened is None or gate is None:
        return _keep_all(inputs)
    log_probs, advantages, unit = screened.log_probs, inputs.rows.advantages, inputs.unit
    check_shape(unit, log_probs)
    density = screened.at_mode is not None
    units = units_of(gate, log_probs, advantages, unit, inputs.rows.mask, density=density)
    few = units.values.is_cuda and units.values.numel() <= FEW_UNITS
    if few and adapter_of(gate).on_host:
        # Those of larger elements first.
        ordered = (units.sums(), units.counted().long(), units.values, units.mask)
        faults, elements, values, counts = _copy_together(ordered, torch.device("cpu"))
        units = units._replace(faults=faults, elements=elements, values=values, mask=counts)
    selection = choose(units, gate, inputs.options.generator)
    index, home, mask = selection.rows, log_probs.device, units.valid
    parts = (index, selection.weight, selection.keep)
    rows, weight, keep = parts if index.device == home else _copy_together(parts, home)
    if unit == "sequence":
        keep, weight = keep.unsqueeze(1) & mask, weight.unsqueeze(1) * mask
    # What the policy knows of its rows is about its own mask.
    host = index if inputs.own_mask and not index.is_cuda else None
    kept = KeptRows(rows, keep, weight, mask, by_row=unit != "token", host_rows=host)
    own = screened.counts(selection.counts, mask)
    judged = Judged(selection.values, selection.mask, selection.choice, screened.rows)
    return Chosen(kept, own, own, judged)


def _keep_all(inputs: "Inputs") -> Chosen:
    """Keep all elements that count, with weight 1; nothing is read where the policy knows them."""
    size, mask, device = inputs.rows.size, inputs.rows.mask, inputs.device
    known = inputs.policy.num_counted(inputs.rows.batch) if inputs.own_mask else None
    of_rows = inputs.unit != "sample" and mask is not None and inputs.masks_rows
    valid = torch.ones(size, dtype=torch.bool, device=device) if mask is None else mask
    valid = valid.reshape(size) if of_rows else valid
    index, elements = torch.arange(size, device=device), size if known is None else known
    host = torch.arange(size) if inputs.own_mask else None
    if mask is not None and known is None:
        some = valid if valid.ndim == 1 else valid.any(dim=1)
        elements, rows_kept = (int(n) for n in torch.stack([valid.sum(), some.sum()]).tolist())
        if rows_kept < size:
            index, host = some.nonzero_static(size=rows_kept).squeeze(1), None
    counts = Counts(
        units=elements,
        units_kept=elements,
        elements=elements,
        elements_kept=elements,
        rows=size,
        rows_kept=index.numel(),
        rate=float(elements > 0),
    )
    whole = mask is None or of_rows
    kept = KeptRows(index, valid, None, valid, whole, by_row=True, host_rows=host)
    return Chosen(kept, counts, counts, None)


def units_of(
    gate: BaseGate | None,
    log_probs: Tensor,
    advantages: Tensor,
    unit: Unit,
    mask: Tensor | None,
    *,
    density: bool = False,
) -> Units:
    """Return the units of log-probs, checked as far as nothing is read."""
    check_unit(unit)
    if log_probs.ndim < (1 if unit == "sample" else 2):
        check_shape(unit, log_probs)
    check_float("advantages", advantages)
    counts = check_mask(mask, log_probs.shape)
    expand_rows("advantages", advantages, log_probs.shape)
    for name, given in {"advantages": advantages, "mask": mask}.items():
        if unit == "sample" and given is not None and given.shape != log_probs.shape:
            raise ValueError(
                f'{name} must have shape {list(log_probs.shape)} for unit "sample", got '
                f"{list(given.shape)}; give one value per sample."
            )
    valid = torch.ones_like(log_probs, dtype=torch.bool) if counts is None else counts
    signal = delight if gate is None else gate.signal
    whole = counts is None
    values, unit_mask = unit_values(
        signal, log_probs, advantages, valid, unit, density, whole=whole
    )
    parts = (values, unit_mask, log_probs, advantages, valid)
    return Units(None, None, *parts, unit, signal, not whole)


def choose(
    units: Units,
    gate: BaseGate | None,
    generator: Randomness = None,
    *,
    capacity: int | None = None,
    reads: bool = True,
) -> Selection:
    """Let the gate choose; None keeps all.

    `reads` says whether the device may be read, so that faults are raised now.
    """
    values, mask, lead, broken = units.values, units.mask, units.lead, None
    each_choice = (*lead, *[1] * (mask.ndim - len(lead)))
    if not reads:
        spread = units.advantages
        if spread.ndim < units.log_probs.ndim:
            spread = spread.unsqueeze(-1)
        # x - x is 0 for finite numbers and NaN for others: few kernels, as each of them counts in
        # a CUDA graph of small ones. Infinite log-probs are no fault as long as they are skipped.
        broken, unknown = (units.log_probs + (spread - spread)).isnan(), values.isnan()
        if units.masked:
            broken, unknown = broken & units.valid, unknown & mask
        broken = broken.any(dim=-1) if units.unit == "sequence" else broken
        broken = broken | unknown
        whole = ~broken.flatten(len(lead)).any(-1).view(each_choice)
        mask = mask & whole if units.masked else whole.expand_as(mask)
        values = torch.where(broken, 0.0, values)
    elif not values.is_cuda or (gate is not None and adapter_of(gate).remembers):
        # A broken batch must not enter a running state.
        known = units.sums() if units.faults is None else units.faults
        units = units._replace(faults=known.tolist())
        units.refuse(units.faults)
        units.refuse_values()
    choice = _ask(gate, values, mask, lead, generator, free_reads=reads and not values.is_cuda)
    if broken is not None:
        weight = torch.where(broken, math.nan, choice.weight)
        choice = choice._replace(keep=choice.keep | broken, weight=weight)
    if capacity is not None and not reads:
        kept = choice.keep.any(dim=-1) if units.unit == "token" else choice.keep
        over = (kept.sum(-1) > capacity).view(each_choice)
        choice = choice._replace(weight=torch.where(over & choice.keep, math.nan, choice.weight))
    selection = Selection(units, choice, capacity)
    if reads:
        selection.counts  # noqa: B018  # raises what is wrong
    return selection


def _ask(
    gate: BaseGate | None,
    values: Tensor,
    mask: Tensor,
    lead: torch.Size,
    generator: Randomness,
    *,
    free_reads: bool,
) -> Choice:
    """Return what a gate chooses, in the shape of the values, after a look at what it returns."""
    flat = len(lead)
    if gate is None:
        choice = Choice.of(mask.flatten(flat), dtype=values.dtype).reshape(values.shape)
    elif lead:
        draws = generator.flatten(flat) if isinstance(generator, Tensor) else generator
        parts = (values.flatten(flat), mask.flatten(flat), draws)
        choice = with_free_reads(free_reads, gate.choose, *parts).reshape(values.shape)
    else:
        choice = with_free_reads(free_reads, adapter_of(gate).choose, values, mask, generator)
    if choice.keep.dtype != torch.bool:
        raise ValueError(
            f"gate must return keep of dtype torch.bool, got {choice.keep.dtype}; compare with "
            f"the price, and put factors into weight."
        )
    numbers = {}
    for name in ("price", "rate"):
        numbers[name] = torch.as_tensor(getattr(choice, name), dtype=torch.float64)
        if numbers[name].shape != lead:
            raise ValueError(
                f"gate must return one {name} for all units of a choice, {list(lead) or '0-d'}, "
                f"got shape {list(numbers[name].shape)}; flatten the values first."
            )
    return choice._replace(**numbers)


def check_unit(unit: str) -> None:
    """Refuse what is none of the three units."""
    if unit not in ("sample", "token", "sequence"):
        raise ValueError(f'unit must be "sample", "token" or "sequence", got {unit!r}.')


def check_shape(unit: Unit, log_probs: Tensor) -> None:
    """Refuse log-probs of one batch that do not have the shape of the unit."""
    if (unit == "sample") != (log_probs.ndim == 1):
        wanted = "[N]" if unit == "sample" else "[N, T]"
        raise ValueError(
            f'unit "{unit}" needs log-probs of shape {wanted}, got {list(log_probs.shape)}; '
            f'use unit="sample" for [N], "token" or "sequence" for [N, T].'
        )


def _copy_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors, those of larger elements first, to a device in one piece.

    To a GPU without waiting; to the CPU that is the one read of a step.
    """
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    together, to_gpu = torch.cat(flat), device.type == "cuda"
    if to_gpu:
        together = together.pin_memory()
    there = together.to(device, non_blocking=to_gpu)
    pieces = torch.split(there, [part.numel() for part in flat])
    return [
        piece.view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)
    ]
