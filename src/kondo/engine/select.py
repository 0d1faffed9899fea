"""Stage 2, select: log-probs and advantages -> values of the gate's signal -> what the gate keeps.

Nothing is read from a GPU before somebody asks for it. A step asks at once, and reads once: where
there are few units it copies their values, and the gate chooses on the CPU, where a dozen small
operations cost microseconds; on a GPU each of them is a launch.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import check_flag, check_float, check_whole
from kondo.core.base_gate import (
    AnyGate,
    BaseGate,
    Choice,
    Randomness,
    Signal,
    Unit,
    attribute_of,
    unit_values,
)
from kondo.core.delight import delight
from kondo.core.given_gates import as_gate
from kondo.core.sampling import with_free_reads
from kondo.engine.selection import Counts, KeptRows, Selection
from kondo.engine.transfer import copy_together
from kondo.engine.validate import (
    check_choice,
    check_inputs,
    faults_of,
    refuse_choice,
    refuse_inputs,
    refuse_unknown,
)

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
    sum of token surprisals. A mean would rank a short sequence above a long one of the same
    surprise per token. Nothing is differentiated.

    On the CPU what cannot be right is refused at the call. On a GPU nothing is read, so that a CUDA
    graph can hold the call. A NaN in a unit that counts then makes the weight of this unit NaN;
    nothing else is kept by that choice, and a gate that remembers past calls remembers nothing of
    it. More kept rows than `capacity` make the weights of that choice NaN. `Selection.counts`, and
    `Selection.rows` without a capacity, read the device, and raise for it.

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
    chooser = None if gate is None else as_gate(gate)
    signal: Signal = delight if chooser is None else chooser.signal
    check_flag("density", density)
    units = units_of(signal, log_probs, advantages, unit or "sample", mask, density=density)
    _check_generator(generator, units.mask.shape)
    if capacity is not None and not 1 <= check_whole("capacity", capacity) <= units.num_rows:
        raise ValueError(
            f"capacity must lie between 1 and the {units.num_rows} rows of a choice, got "
            f"{capacity}; None gives the rows that are kept."
        )
    return choose(units, chooser, generator, capacity=capacity, reads=not log_probs.is_cuda)


class Units(NamedTuple):
    """What a gate chooses from, and what it was made of."""

    faults: Tensor
    """[6] float64, see `validate.faults_of`."""
    elements: Tensor
    """int64 or bool like values: elements of each unit that count."""
    values: Tensor
    """[..., M] float: [..., N], or [..., N, T] for unit "token"."""
    mask: Tensor
    """bool like values."""
    log_probs: Tensor
    advantages: Tensor
    valid: Tensor
    """bool like log_probs: the element counts."""
    unit: Unit
    signal: Signal

    @property
    def num_rows(self) -> int:
        """N."""
        return self.values.shape[-2 if self.unit == "token" else -1]

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions: one choice each."""
        return self.values.shape[: -2 if self.unit == "token" else -1]

    def on_host(self, gate: BaseGate) -> "Units":
        """Return few units with what a gate looks at on the CPU; the one read of a step."""
        if not (self.values.is_cuda and gate.on_host and self.values.numel() <= FEW_UNITS):
            return self
        # Those of larger elements first.
        ordered = (self.faults, self.elements.long(), self.values, self.mask)
        faults, elements, values, mask = copy_together(ordered, torch.device("cpu"))
        return self._replace(faults=faults, elements=elements, values=values, mask=mask)

    def broken(self) -> Tensor:
        """Return bool like values: the unit counts and holds a NaN, or an infinite advantage."""
        spread = self.advantages
        if spread.ndim < self.log_probs.ndim:
            spread = spread.unsqueeze(-1)
        elements = (self.log_probs.isnan() | ~spread.isfinite()) & self.valid
        units = elements.any(dim=-1) if self.unit == "sequence" else elements
        return units | (self.values.isnan() & self.mask)


def units_of(
    signal: Signal,
    log_probs: Tensor,
    advantages: Tensor,
    unit: Unit,
    mask: Tensor | None,
    *,
    density: bool = False,
) -> Units:
    """Return the units of checked log-probs; nothing is read."""
    valid = check_inputs(log_probs, advantages, unit, mask)
    # Our own signals need log-probs that are at most 0; others may be given densities.
    ours = attribute_of(signal, "unchecked") is not None
    faults = faults_of(log_probs, advantages, valid, ours)
    values, unit_mask = unit_values(signal, log_probs, advantages, valid, unit, density)
    elements = valid.sum(dim=-1) if unit == "sequence" else valid
    return Units(faults, elements, values, unit_mask, log_probs, advantages, valid, unit, signal)


def choose(
    units: Units,
    gate: BaseGate | None,
    generator: Randomness = None,
    *,
    capacity: int | None = None,
    reads: bool = True,
) -> Selection:
    """Let the gate choose; None keeps all that counts.

    Args:
        units: by `units_of`.
        gate: bound to its rows where it has to be.
        generator: for draws, or the draws.
        capacity: see `select`.
        reads: whether the device may be read, so that faults are raised now.
    """
    values, mask, broken, known = units.values, units.mask, None, None
    if not reads:
        broken = units.broken()
        choices = broken.flatten(len(units.lead)).any(-1)
        mask = mask & ~choices.view(*units.lead, *[1] * (mask.ndim - len(units.lead)))
        values = torch.where(broken, 0.0, values)
    elif not values.is_cuda or (gate is not None and gate.remembers):
        # A broken batch must not enter a running state.
        known = units.faults.tolist()
        refuse_inputs(known, units.log_probs, units.advantages, units.valid)
        refuse_unknown(values, mask)
    free = reads and not values.is_cuda
    choice = with_free_reads(free, partial(_ask, gate, units.lead), values, mask, generator)
    numbers = (torch.as_tensor(one, dtype=torch.float64) for one in (choice.price, choice.rate))
    choice = choice._replace(**dict(zip(("price", "rate"), numbers, strict=True)))
    check_choice(choice, mask, units.lead)
    if broken is not None:
        choice = choice._replace(
            keep=choice.keep | broken, weight=torch.where(broken, math.nan, choice.weight)
        )
    given = choice
    if capacity is not None and not reads:
        kept = choice.keep.any(dim=-1) if units.unit == "token" else choice.keep
        over = (kept.sum(-1) > capacity).view(*units.lead, *[1] * (mask.ndim - len(units.lead)))
        choice = choice._replace(weight=torch.where(over & choice.keep, math.nan, choice.weight))
    selection = Selection(
        units.values,
        units.mask,
        choice,
        element_mask=units.valid,
        unit=units.unit,
        signal=units.signal,
        # Not of the selection itself, which would then wait for the garbage collector.
        read=partial(_read, units, given, known, capacity),
        capacity=capacity,
    )
    if reads:
        selection.counts  # noqa: B018  # raises what is wrong
    return selection


def kept_rows(selection: Selection, device: torch.device) -> KeptRows:
    """Return the kept rows of one batch, and of them what counts, on the device of the rows."""
    index = selection.rows
    parts = (index, selection.weight, selection.keep)
    rows, weight, keep = parts if index.device == device else copy_together(parts, device)
    mask = selection.element_mask
    if selection.unit == "sequence":
        keep, weight = keep.unsqueeze(1) & mask, weight.unsqueeze(1) * mask
    host = None if index.is_cuda else index
    return KeptRows(rows, keep, weight, mask, by_row=selection.unit != "token", host_rows=host)


def _check_generator(generator: Any, shape: torch.Size) -> None:
    """Raise a ValueError unless it is a generator, None or one draw per unit."""
    if isinstance(generator, Tensor):
        if check_float("generator", generator).shape != shape:
            raise ValueError(
                f"generator must hold one draw per unit, {list(shape)}, got "
                f"{list(generator.shape)}; give draws uniform on [0, 1), or a torch.Generator."
            )
    elif not (generator is None or isinstance(generator, torch.Generator)):
        raise ValueError(
            f"generator must be a torch.Generator, draws or None, got {type(generator).__name__}; "
            f"write torch.Generator().manual_seed(0)."
        )


def _ask(
    gate: BaseGate | None, lead: torch.Size, values: Tensor, mask: Tensor, generator: Randomness
) -> Choice:
    """Return the choice of a gate among values [..., N] or [..., N, T]."""
    if gate is None:
        choice = Choice.of(mask.flatten(len(lead)), mask.flatten(len(lead)), dtype=values.dtype)
        return choice.reshape(values.shape)
    if not lead:
        return gate.choose_all(values, mask, generator)
    flat = len(lead)
    draws = generator.flatten(flat) if isinstance(generator, Tensor) else generator
    return gate.choose(values.flatten(flat), mask.flatten(flat), draws).reshape(values.shape)


def _read(
    units: Units,
    choice: Choice,
    faults: list[float] | None,
    capacity: int | None,
    kept_rows: Tensor,
) -> Counts:
    """Read once what the host must know, and refuse what is wrong."""
    keep, mask, values = choice.keep, units.mask, units.values
    # On masks, a > b is "a and not b" in one kernel.
    masks = torch.stack([keep > mask, values.isnan() & mask, mask, keep])
    outside, unknown, counted, kept = masks.flatten(1).sum(1)
    bought, weighed = (
        torch.where(keep, part, 0.0).sum(dtype=torch.float64) for part in (values, choice.weight)
    )
    elements = torch.stack([units.elements, units.elements * keep]).flatten(1).sum(1)
    rows = kept if kept_rows is keep else kept_rows.sum()
    most = rows if capacity is None else kept_rows.sum(-1).max()
    numbers = [outside, unknown, bought, weighed, counted, kept, *elements, rows, most]
    if not units.lead:
        numbers += [choice.price, choice.rate]
    if keep.is_cuda:
        # float64 holds every count below 2^53.
        together = torch.stack([number.to(keep.device).double() for number in numbers])
        read: list[float] = torch.cat([units.faults, together]).tolist()
        faults, read = read[:6], read[6:]
    else:  # nothing to wait for
        read = [float(number) for number in numbers]
        faults = units.faults.tolist() if faults is None else faults
    hidden_nan = refuse_inputs(faults, units.log_probs, units.advantages, units.valid)
    refuse_choice(read[:4], choice, values, mask)
    found = [int(number) for number in read[4:10]]
    if capacity is not None and found[5] > capacity:
        raise ValueError(
            f"capacity must be at least the number of rows that are kept, got {capacity}, and "
            f"{found[5]} of {units.num_rows} rows kept; rows that did not fit are missing."
        )
    price, rate = read[10:] or (math.nan, math.nan)
    return Counts(
        units=found[0],
        units_kept=found[1],
        elements=found[2],
        elements_kept=found[3],
        rows=kept_rows.numel(),
        rows_kept=found[4],
        hidden_nan=hidden_nan,
        rows_screened=0,
        surprised=found[2],
        price=price,
        rate=rate,
        surprisal=faults[3],
        advantage=faults[4],
        abs_advantage=faults[5],
    )
