"""Stage 1, screen: log-probs of every unit, without a graph and without leaving a trace.

screen=None      no-grad forward of log_prob in chunks      costs F
screen=tensor    log-probs already known (the rollout's)    costs nothing
screen=callable  a draft: any cheaper log_prob              costs the draft's forward

A density can exceed 1. Where a screen gives a pair (log_probs, mode_log_probs), the gate sees
log pi(a) - log pi(mode) <= 0; see `from_mode`.
"""

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kondo.core._checks import check_float
from kondo.engine import rows

LogProb = Callable[[Any], Tensor]
"""Rows -> [n] or [n, T] log-probs of the taken actions."""
Screen = Callable[[Any], Tensor | tuple[Tensor, Tensor]]
"""Like `LogProb`; for densities it returns them together with those at the mode."""

# How deep, and how many items of a holder, the search for modules looks: a policy may stand beside
# a replay buffer of millions. What it misses the hook finds.
_REACH = 4
_MOST_ITEMS = 64


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
    parts = []
    with no_trace(model, batch):
        for start in range(0, size, chunk or size):
            piece = slice(start, min(start + (chunk or size), size))
            whole = piece == slice(0, size)
            part = check_float(f"{name}(rows)", model(batch if whole else rows.take(batch, piece)))
            parts.append(_check_log_probs(f"{name}(rows)", part, piece.stop - piece.start))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_mode(given: Any, name: str = "screen") -> tuple[Any, bool]:
    """Return log-probs, and whether they are densities measured from the mode, at most 0.

    Args:
        given: log-probs, or a pair (log_probs, mode_log_probs) of one shape.
        name: of the argument, for messages.
    """
    if not isinstance(given, tuple | list):
        return given, False
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
    return log_probs - modes.to(log_probs.device), True


def _check_log_probs(name: str, log_probs: Tensor, size: int) -> Tensor:
    if log_probs.ndim not in (1, 2) or log_probs.shape[0] != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, got "
            f"{list(log_probs.shape)}; return the log-prob of each taken action, not of all."
        )
    return log_probs


@contextmanager
def no_trace(model: Any, batch: Any, *, evaluate: bool = True) -> Iterator[None]:
    """Run `model` and leave graph, RNG, training flags, statistics and `.grad` as they were.

    `evaluate` runs every module that takes part in evaluation mode without a graph, so dropout is
    off and batch-norm statistics stay. Otherwise modes are left alone, a graph is built, and
    buffers that were written in place are put back.

    Modules are found in what the callable refers to (see `modules_in`), and the rest by a hook when
    they are called. Where compiled code is found there is no hook: under one it compiles again.
    """
    state = _ModuleState(evaluate)
    state.visit(*(roots := list(modules_in(model))))
    hook = None
    if not _is_compiled(model) and not any(
        _is_compiled(m) for root in roots for m in root.modules()
    ):
        hook = register_module_forward_pre_hook(state.on_forward)
    cuda = [device for device in devices_of(model, batch) if device.type == "cuda"]
    try:
        with torch.random.fork_rng(cuda), torch.set_grad_enabled(not evaluate):
            yield
    finally:
        if hook is not None:
            hook.remove()
        state.restore()


def devices_of(model: Any, batch: Any) -> set[torch.device]:
    """Return where the work happens: the devices of the rows and of the parameters reached."""
    firsts = (next(module.parameters(), None) for module in modules_in(model))
    return rows.devices(batch) | {first.device for first in firsts if first is not None}


class _ModuleState:
    """Training flags and buffers of the modules seen, to be put back."""

    def __init__(self, evaluate: bool):
        self._evaluate = evaluate
        self._thread = threading.get_ident()
        self._training: dict[nn.Module, bool] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def visit(self, *roots: nn.Module) -> None:
        """Remember new modules below the roots; in evaluation, switch them to it."""
        new = [m for root in roots for m in root.modules() if m not in self._training]
        self._training |= {module: module.training for module in new}
        for module in new:
            if self._evaluate:
                module.training = False
            else:
                own = module.named_buffers(recurse=False)
                self._buffers += [(buffer, buffer.clone()) for _, buffer in own]

    def on_forward(self, module: nn.Module, _: Any) -> None:
        """Visit a module that is about to run; what another thread runs is none of our business."""
        if module not in self._training and threading.get_ident() == self._thread:
            self.visit(module)

    def restore(self) -> None:
        """Put everything back as it was."""
        for module, training in self._training.items():
            module.training = training
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


def modules_in(model: Any) -> Iterator[nn.Module]:
    """Yield the modules a callable can reach: itself, its owner, closure, globals, attributes."""
    pending, seen = [(model, 0)], set()
    while pending:
        reference, depth = pending.pop()
        if id(reference) in seen or isinstance(reference, ModuleType | type | Tensor):
            continue
        seen.add(id(reference))
        if isinstance(reference, nn.Module):
            yield reference
        elif depth < _REACH:
            inner = itertools.islice(_references(reference), _MOST_ITEMS)
            pending += [(item, depth + 1) for item in inner]


def _references(holder: Any) -> Iterator[Any]:
    """Yield what an object, container or function holds."""
    if isinstance(holder, functools.partial):
        yield from (holder.func, *holder.args, *holder.keywords.values())
    elif inspect.ismethod(holder):
        yield from (holder.__self__, holder.__func__)
    elif inspect.isfunction(holder):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not assigned yet
                yield cell.cell_contents
        names = _global_names(holder.__code__)
        yield from (holder.__globals__[name] for name in names if name in holder.__globals__)
    elif isinstance(holder, list | tuple):
        yield from holder
    elif isinstance(holder, dict):
        yield from holder.values()
    else:
        yield from getattr(holder, "__dict__", {}).values()


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names a function looks up, those of its inner functions and lambdas included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_compiled(target: Any) -> bool:
    """Return whether torch.compile made this function or module."""
    return (
        hasattr(target, "_torchdynamo_orig_callable")
        or getattr(target, "_compiled_call_impl", None) is not None
        or hasattr(target, "_orig_mod")
    )
