"""Stage 1, screen: log-probs of every unit, without a graph and without leaving a trace.

screen=None      no-grad forward of log_prob in chunks      costs F
screen=tensor    log-probs already known (the rollout's)    costs nothing
screen=callable  a draft: any cheaper log_prob              costs the draft's forward

A density can exceed 1. Where a screen gives a pair (log_probs, mode_log_probs), the gate sees
log pi(a) - log pi(mode) <= 0; see `from_mode`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kondo.core._checks import check_float
from kondo.engine import rows
from kondo.engine.untraced import without_trace

LogProb = Callable[[Any], Tensor]
"""Rows -> [n] or [n, T] log-probs of the taken actions."""
Screen = Callable[[Any], Tensor | tuple[Tensor, Tensor]]
"""Like `LogProb`; for densities it returns them together with those at the mode."""


def screen_log_probs(
    log_prob: LogProb,
    batch: Any,
    *,
    screen: Tensor | LogProb | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return detached log-probs of all rows, [N] or [N, T].

    Args:
        log_prob: rows -> [n] or [n, T].
        batch: any nest of tensors with N rows.
        screen: None, log-probs that already exist, or a draft like log_prob.
        chunk: rows per no-grad forward; all at once if None.
    """
    size = rows.num_rows(batch)
    if isinstance(screen, Tensor):
        known = check_float("screen", screen).detach()
        return _check_log_probs("screen", known, size)
    name = "log_prob" if screen is None else "screen"
    model = log_prob if screen is None else screen
    if not callable(model):
        raise ValueError(
            f"{name} must be callable on rows{'' if screen is None else ', a tensor or None'}, got "
            f"{type(model).__name__}."
        )

    def forwards() -> Tensor:
        parts = []
        for start in range(0, size, chunk or size):
            piece = slice(start, min(start + (chunk or size), size))
            whole = piece == slice(0, size)
            part = check_float(f"{name}(rows)", model(batch if whole else rows.take(batch, piece)))
            parts.append(_check_log_probs(f"{name}(rows)", part, piece.stop - piece.start))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return without_trace(forwards, model)


def from_mode(given: Any, name: str = "screen") -> tuple[Any, Tensor | None]:
    """Return log-probs, and the log-densities at the mode that they are measured from, if any.

    Args:
        given: log-probs, or a pair (log_probs, mode_log_probs) of one shape.
        name: of the argument, for messages.
    """
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2 or not all(isinstance(part, Tensor) for part in given):
        kinds = [type(part).__name__ for part in given]
        raise ValueError(
            f"{name} must be log-probs or a pair (log_probs, mode_log_probs), got {kinds}."
        )
    log_probs, modes = (check_float(name, part).detach() for part in given)
    if log_probs.shape != modes.shape:
        raise ValueError(
            f"{name} must hold log_probs and mode_log_probs of one shape, got "
            f"{list(log_probs.shape)} and {list(modes.shape)}; give the mode's log-density for "
            f"every taken action."
        )
    modes = modes.to(log_probs.device)
    return log_probs - modes, modes


def _check_log_probs(name: str, log_probs: Tensor, size: int) -> Tensor:
    if log_probs.ndim not in (1, 2) or log_probs.shape[0] != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, got "
            f"{list(log_probs.shape)}; return the log-prob of each taken action, not of all."
        )
    return log_probs
