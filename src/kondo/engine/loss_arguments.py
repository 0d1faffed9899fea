"""What a loss is called with beside log-probs and advantages.

loss_inputs       by the caller, gathered with the rows
sequence_index    by the step, for losses that have a parameter of this name: int64 like log_probs,
                  the sequence of each element, -1 for elements that do not count
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kondo.core.fingerprint import name_of
from kondo.engine.compact import MicroBatch

SEQUENCE_INDEX = "sequence_index"


def takes_sequences(loss: Callable[..., Tensor]) -> bool:
    """Return whether the step must say which sequence each element belongs to.

    Example:
        >>> import kondo
        >>> [takes_sequences(loss) for loss in (kondo.losses.is_pg, kondo.losses.sequence_is_pg)]
        [False, True]
    """
    signature = _signature(loss)
    return signature is not None and _has_index(signature)


def check_loss(
    loss: Callable[..., Tensor], loss_inputs: Mapping[str, Tensor], *, gated: bool, unit: str
) -> bool:
    """Raise a ValueError for loss_inputs that the loss does not take, and for units that it cannot.

    Returns what `takes_sequences` does.

    Args:
        loss: (log_probs, advantages, **loss_inputs).
        loss_inputs: by name.
        gated: whether there is a gate.
        unit: what is gated.
    """
    signature = _signature(loss)
    if signature is None:
        return False
    whole = _has_index(signature)
    if whole and SEQUENCE_INDEX in loss_inputs:
        raise ValueError(
            f"loss_inputs must not hold {SEQUENCE_INDEX!r}, which the step itself gives to "
            f"{name_of(loss)}; leave it out."
        )
    if whole and gated and unit == "token":
        raise ValueError(
            f'unit must be "sequence" for {name_of(loss)}, got "token": it weighs whole sequences, '
            f"and a gate of tokens keeps a part of them. Use a loss of tokens, such as "
            f"kondo.losses.is_pg, or no gate."
        )
    names = [*loss_inputs, *([SEQUENCE_INDEX] if whole else [])]
    try:
        signature.bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"loss_inputs must hold what {name_of(loss)} takes after log_probs and advantages, got "
            f"{sorted(loss_inputs)}: {error}. Give tensors as loss_inputs={{name: tensor}}, with "
            f"one row per row of the batch, and numbers by functools.partial(loss, name=number)."
        ) from None
    return whole


def sequence_index(log_probs: Tensor, micro: MicroBatch, keep: Tensor | None) -> Tensor:
    """Return the sequence of each element of a micro-batch, -1 where it is not kept.

    A row is a sequence. Nothing is read from the device.

    Args:
        log_probs: [n] or [n, T]; [K] of a compaction that flattens.
        micro: whose rows these are.
        keep: bool like log_probs; None where every element is kept.

    Raises:
        ValueError: a compaction flattened its rows, and does not say which elements belong
            together.
    """
    if micro.row_of is not None:
        rows = micro.row_of.to(log_probs.device)
        # Rows of the batch, counted anew: there may be more of them than elements here.
        starts = torch.ones_like(rows)
        starts[1:] = rows[1:] != rows[:-1]
        number = starts.cumsum(0) - 1
    elif micro.filler or log_probs.shape[0] == micro.num_rows:
        number = torch.arange(log_probs.shape[0], device=log_probs.device)
        if log_probs.ndim == 2:
            number = number.unsqueeze(1).expand_as(log_probs)
    else:
        raise ValueError(
            f"compact must say which row each element belongs to, for a loss that weighs whole "
            f"sequences: got {list(log_probs.shape)} log-probs of {micro.num_rows} rows. Set "
            f"MicroBatch.row_of, or use a loss of tokens, such as kondo.losses.is_pg."
        )
    return number if keep is None else torch.where(keep, number, -1)


def _has_index(signature: inspect.Signature) -> bool:
    found = signature.parameters.get(SEQUENCE_INDEX)
    # Another default was bound by the caller, with functools.partial.
    return found is not None and (found.default is None or found.default is found.empty)


def _signature(loss: Any) -> inspect.Signature | None:
    """Return the parameters of a callable; None where it does not tell, as some built-ins."""
    try:
        return inspect.signature(_spelled_out(loss))
    except (TypeError, ValueError):
        return None


def _spelled_out(loss: Any) -> Any:
    """Return what a callable hands its arguments on to: a module's own call takes anything."""
    if isinstance(loss, functools.partial):
        return functools.partial(_spelled_out(loss.func), *loss.args, **loss.keywords)
    if isinstance(loss, torch.nn.Module):
        return getattr(loss, "_orig_mod", loss).forward  # of a module that torch.compile wraps
    return loss
