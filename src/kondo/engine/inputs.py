"""What one step was given, checked: every check of an argument comes before the first forward."""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import check_dense, check_float, check_mask, check_size, expand_rows
from kondo.core.base_gate import BaseGate, Unit
from kondo.core.given_gates import as_gate
from kondo.engine.differentiate import Loss
from kondo.engine.loss_arguments import check_loss
from kondo.engine.options import Options
from kondo.engine.policy import LogProb, Policy, devices_of, modules_of, policy_of
from kondo.engine.screen import from_mode
from kondo.engine.validate import check_unit

# What is known of losses, for as long as they live: whether they want a `sequence_index`.
_LOSSES: weakref.WeakKeyDictionary[Loss, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()

# The no-grad screen stores no activations: its chunks can be this much larger.
SCREEN_CHUNK_FACTOR = 4

_DEFAULT = Options()


class Rows(NamedTuple):
    """Everything of a step that has rows."""

    batch: Any
    advantages: Tensor
    """[N] or [N, T]."""
    mask: Tensor | None
    """bool [N] or [N, T]."""
    loss_inputs: dict[str, Tensor]
    screen: Any
    """None, log-probs [N] or [N, T], or a draft."""

    @property
    def size(self) -> int:
        """N; may be 0 on one of many ranks."""
        return int(self.advantages.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call of `kondo.backward`, checked."""

    policy: Policy
    log_prob: LogProb
    """What is called for log-probs."""
    modules: list[nn.Module]
    """Those that were given: by the options, or as the policy."""
    gate: BaseGate | None
    """None for dense."""
    rows: Rows
    unit: Unit
    loss: Loss
    sequences: bool
    """Whether the loss must be told which sequence each element belongs to."""
    micro_batch: int | None
    options: Options
    own_mask: bool
    """Whether the mask is the policy's."""
    masks_rows: bool
    """Whether the mask has one value per row, [N] or [N, 1], on every rank."""
    at_mode: Tensor | None
    """Log-densities at the mode, if the screen that was given is measured from them."""
    device: torch.device
    """Where the work happens: CUDA if any row or given module lives there."""
    spare: Rows | None = None
    """A row to run where a rank has none of its own."""

    @property
    def density(self) -> bool:
        """Whether the screen that was given is densities, measured from the mode."""
        return self.at_mode is not None

    @property
    def screen_chunk(self) -> int | None:
        """Rows per screening forward; None for all at once."""
        if self.options.screen_chunk is not None or self.micro_batch is None:
            return self.options.screen_chunk
        return SCREEN_CHUNK_FACTOR * self.micro_batch

    @property
    def screens_promising(self) -> bool:
        """Whether rows with advantage <= 0 are not scored, if the gate cannot keep them."""
        return (self.options.screen_rows or self.policy.screen_rows) == "promising"


def prepare(
    policy: Any,
    gate: Any,
    given: Rows,
    *,
    unit: Unit | None,
    loss: Loss,
    micro_batch: int | None,
    options: Options | None,
    may_be_empty: bool,
) -> Inputs:
    """Check what a step was given, and bring what the gate looks at to one device.

    Args:
        policy: a function rows -> log-probs, or an object that brings more.
        gate: a gate, a callable, or None.
        given: batch, advantages, mask, loss_inputs and screen as they came.
        unit: what is gated; None takes the policy's.
        loss: per element.
        micro_batch: rows per forward/backward.
        options: what few people set.
        may_be_empty: whether a batch of 0 rows is fine, as on one of many ranks.
    """
    known, log_prob = policy_of(policy)
    if options is None:
        options = _DEFAULT
    else:  # here, not when they are made: an error of one rank is then one of all
        options.check()
    check_size("micro_batch", micro_batch)
    size = rows.num_rows(given.batch, may_be_empty=may_be_empty)
    modules = list(dict.fromkeys([*options.modules, *modules_of(known, log_prob)]))
    device = _main_device(modules, given.batch)
    advantages = check_float("advantages", given.advantages).detach().to(device)
    loss_inputs = _check_loss_inputs(given.loss_inputs)
    own_mask = given.mask is None
    mask = known.mask(given.batch)
    if not own_mask:
        narrower = mask is not None  # the policy's own mask bounds what can count
        mask = _both(given.mask, mask) if narrower else given.mask
    if isinstance(mask, Tensor):
        check_dense("mask", mask)
    mask = mask.to(device) if isinstance(mask, Tensor) else mask
    screen, at_mode = from_mode(given.screen)
    if not (screen is None or isinstance(screen, Tensor)):
        draft, draft_log_prob = policy_of(screen, "screen")
        screen = draft.screen or draft_log_prob
    checked = Rows(given.batch, advantages, mask, loss_inputs, screen)
    _check_rows(checked, size)
    unit = known.unit if unit is None else unit
    if size:
        known.check(given.batch, advantages, screen, loss_inputs, unit)
    _check_unit(unit, checked)
    sequences = _takes_sequences(loss, loss_inputs, gated=gate is not None, unit=unit)
    return Inputs(
        policy=known,
        log_prob=log_prob,
        modules=modules,
        gate=gate if gate is None or isinstance(gate, BaseGate) else as_gate(gate),
        rows=checked,
        unit=unit,
        loss=loss,
        sequences=sequences,
        micro_batch=micro_batch,
        options=options,
        own_mask=own_mask,
        masks_rows=mask is not None and (mask.ndim == 1 or mask.shape[1] == 1),
        at_mode=at_mode,
        device=device,
    )


def _takes_sequences(
    loss: Loss, loss_inputs: Mapping[str, Tensor], *, gated: bool, unit: Unit
) -> bool:
    """Return whether the loss wants a `sequence_index`; it is checked in the first step alone."""
    asked = (gated, unit, *sorted(loss_inputs))
    try:
        known = _LOSSES.setdefault(loss, {})
    except TypeError:  # it has no hash, or cannot be referred to weakly
        known = {}
    if asked not in known:
        known[asked] = check_loss(loss, loss_inputs, gated=gated, unit=unit)
    return known[asked]


def _check_loss_inputs(given: Any) -> dict[str, Tensor]:
    """Return the further tensors of the loss, detached, by name."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"loss_inputs must be a dict of name -> tensor, got {type(given).__name__}; give the "
            f'names that the loss takes, e.g. {{"old_log_probs": ...}}.'
        )
    for name, value in given.items():
        if not isinstance(name, str):
            raise ValueError(
                f"loss_inputs must have the names of the loss's arguments as keys, got {name!r}."
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"loss_inputs must hold tensors with one row per row of the batch, got "
                f"{type(value).__name__} for {name!r}; wrap it with torch.as_tensor(...), or bind "
                f"a number with functools.partial(loss, {name}=...)."
            )
        check_dense(f"loss_inputs[{name!r}]", value)
    return {name: value.detach() for name, value in given.items()}


def _both(given: Any, own: Tensor | None) -> Tensor | None:
    """Return where a given mask and the policy's own are both True."""
    if own is None:
        return given if isinstance(given, Tensor) else None
    counts = check_mask(given, own.shape)
    return own if counts is None else counts.to(own.device) & own


def _main_device(modules: list[nn.Module], batch: Any) -> torch.device:
    """Return where the work happens: CUDA if any row or given module lives there."""
    found = devices_of(modules, batch)
    cpu = torch.device("cpu")
    return max(found, key=lambda device: device.type == "cuda", default=cpu)


def _check_rows(given: Rows, size: int) -> None:
    """Raise a ValueError unless everything has as many rows as the batch."""
    if isinstance(given.screen, Tensor):
        check_float("screen", given.screen)
    for name, value in given._asdict().items():
        if isinstance(value, Tensor) and name != "batch" and value.shape[:1] != (size,):
            raise ValueError(
                f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, "
                f"got {list(value.shape)}."
            )
    for name, value in given.loss_inputs.items():
        if value.shape[:1] != (size,):
            raise ValueError(
                f"loss_inputs must have {size} rows like batch, got shape {list(value.shape)} for "
                f"{name!r}."
            )


def _check_unit(unit: str, given: Rows) -> None:
    """Raise a ValueError for a unit, mask or advantages that cannot fit together."""
    check_unit(unit)
    shapes = [part.shape for part in (given.advantages, given.mask) if isinstance(part, Tensor)]
    full = given.screen.shape if isinstance(given.screen, Tensor) else max(shapes, key=len)
    if given.mask is not None:
        check_mask(given.mask, given.mask.shape)  # its dtype
    if len(full) == 2 and full[1] == 1 and unit != "sample":
        return  # one value per row, whatever their tokens
    if given.mask is not None:
        check_mask(given.mask, full)
    expand_rows("advantages", given.advantages, full)
