"""What one step was given, checked: every check of an argument comes before the first forward."""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import check_dense, check_float, check_mask, check_size, expand_rows
from kondo.core.base_gate import BaseGate, Unit
from kondo.core.fingerprint import name_of
from kondo.core.given_gates import as_gate
from kondo.engine.differentiate import Loss, check_log_probs
from kondo.engine.options import Options
from kondo.engine.policy import LogProb, Policy, devices_of, modules_of, policy_of
from kondo.engine.screen import from_mode
from kondo.engine.select import check_unit

_DEFAULT = Options()
_NEEDS_INDEX = "needs_sequence_index"


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
    """Check the arguments of `kondo.backward`, and bring what the gate looks at to one device.

    `may_be_empty` says whether a batch of 0 rows is fine, as on one of many ranks.
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
    mask, own = given.mask, known.mask(given.batch)
    if mask is None:
        mask = own
    elif own is not None:  # the policy's own mask bounds what can count
        counts = check_mask(mask, own.shape)
        assert counts is not None
        mask = counts.to(own.device) & own
    if isinstance(mask, Tensor):
        check_dense("mask", mask)
        mask = mask.to(device)
    screen, at_mode = from_mode(given.screen)
    if isinstance(screen, Tensor):
        screen = check_log_probs("screen", screen, size).detach()
    elif screen is not None:
        draft, draft_log_prob = policy_of(screen, "screen")
        screen = draft.screen or draft_log_prob
    checked = Rows(given.batch, advantages, mask, loss_inputs, screen)
    sized = {"advantages": advantages, "mask": mask}
    sized |= {f"loss_inputs[{name!r}]": value for name, value in loss_inputs.items()}
    for name, value in sized.items():
        if isinstance(value, Tensor) and value.shape[:1] != (size,):
            raise ValueError(
                f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, "
                f"got {list(value.shape)}."
            )
    unit = known.unit if unit is None else unit
    if size:
        known.check(given.batch, advantages, screen, loss_inputs, unit)
    _check_unit(unit, checked)
    return Inputs(
        policy=known,
        log_prob=log_prob,
        modules=modules,
        gate=gate if gate is None or isinstance(gate, BaseGate) else as_gate(gate),
        rows=checked,
        unit=unit,
        loss=loss,
        sequences=_check_loss(loss, loss_inputs, gated=gate is not None, unit=unit),
        micro_batch=micro_batch,
        options=options,
        own_mask=given.mask is None,
        masks_rows=mask is not None and (mask.ndim == 1 or mask.shape[1] == 1),
        at_mode=at_mode,
        device=device,
    )


def _main_device(modules: list[nn.Module], batch: Any) -> torch.device:
    """Return where the work happens: CUDA if any row or given module lives there."""
    found = devices_of(modules, batch)
    return max(found, key=lambda device: device.type == "cuda", default=torch.device("cpu"))


def _check_unit(unit: str, given: Rows) -> None:
    """Raise a ValueError for a unit, mask or advantages that cannot fit together."""
    check_unit(unit)
    if given.mask is not None:
        check_mask(given.mask, getattr(given.mask, "shape", torch.Size()))  # its dtype
    shapes = [part.shape for part in (given.advantages, given.mask) if part is not None]
    full = given.screen.shape if isinstance(given.screen, Tensor) else max(shapes, key=len)
    if len(full) == 2 and full[1] == 1 and unit != "sample":
        return  # one value per row, whatever their tokens
    check_mask(given.mask, full)
    expand_rows("advantages", given.advantages, full)


def _check_loss_inputs(given: Any) -> dict[str, Tensor]:
    """Return the loss's further tensors, detached."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"loss_inputs must be a dict of name -> tensor, by the names that the loss takes, got "
            f"{type(given).__name__}."
        )
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"loss_inputs must hold tensors with one row per row of the batch, got "
                f"{type(value).__name__} for {name!r}; wrap it with torch.as_tensor(...), or bind "
                f"a number with functools.partial(loss, {name}=...)."
            )
        check_dense(f"loss_inputs[{name!r}]", value)
    return {name: value.detach() for name, value in given.items()}


# The names of loss_inputs that a loss was found to take, for as long as it lives.
_TAKEN: weakref.WeakKeyDictionary[Loss, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _check_loss(loss: Any, loss_inputs: Mapping[str, Tensor], *, gated: bool, unit: Unit) -> bool:
    """Return whether a loss needs `sequence_index`, and refuse inputs and units it cannot take."""
    function = loss
    while isinstance(function, functools.partial) and not hasattr(function, _NEEDS_INDEX):
        function = function.func
    whole = bool(getattr(function, _NEEDS_INDEX, False))
    if whole and "sequence_index" in loss_inputs:
        raise ValueError(
            f"loss_inputs must not hold 'sequence_index', which the step itself gives to "
            f"{name_of(loss)}; leave it out."
        )
    if whole and gated and unit == "token":
        raise ValueError(
            f'unit must be "sequence" for {name_of(loss)}, got "token": it weighs whole sequences, '
            f"of which a gate of tokens keeps a part. Use a loss of tokens, or no gate."
        )
    names = (*sorted(loss_inputs), "sequence_index") if whole else tuple(sorted(loss_inputs))
    try:
        taken = _TAKEN.setdefault(loss, set())
    except TypeError:  # it has no hash, or cannot be referred to weakly
        taken = set()
    if names in taken:
        return whole
    try:  # a module's own call takes anything
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # it does not tell, as some built-ins
        return whole
    try:
        signature.bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"loss_inputs must hold what {name_of(loss)} takes after log_probs and advantages, got "
            f"{sorted(loss_inputs)}: {error}. Give tensors as loss_inputs={{name: tensor}}, with "
            f"one row per row of the batch, and numbers by functools.partial(loss, name=number)."
        ) from None
    taken.add(names)
    return whole
