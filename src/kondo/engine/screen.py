"""Stage 1, screen: log-probs of every unit, without a graph and without leaving a trace.

screen=None      no-grad forward of log_prob in chunks      costs F
screen=tensor    log-probs already known (the rollout's)    costs nothing
screen=callable  a draft: any cheaper log_prob              costs the draft's forward
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kondo.core._checks import check_float
from kondo.engine import rows

LogProb = Callable[[Any], Tensor]


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


def _check_log_probs(name: str, log_probs: Tensor, size: int) -> Tensor:
    if log_probs.ndim not in (1, 2) or log_probs.shape[0] != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, got "
            f"{list(log_probs.shape)}; return the log-prob of each taken action, not of all."
        )
    return log_probs


@contextmanager
def no_trace(model: Any, batch: Any, *, evaluate: bool = True) -> Iterator[None]:
    """Run `model` without a trace of it: graph, RNG, training flags, buffers.

    `evaluate` runs every module that takes part in evaluation mode without a graph, so dropout is
    off and batch-norm statistics stay. Otherwise modes are left alone, a graph is built, and the
    buffers the modules wrote to are put back.

    Modules are found in what the callable refers to (see `modules_in`). Only where that finds none
    does a hook find each when it is called: a global hook makes compiled code compile again.
    """
    state = _ModuleState(evaluate)
    state.visit(*(roots := list(modules_in(model))))
    hook = None if roots else register_module_forward_pre_hook(lambda m, _: state.visit(m))
    cuda = [device for device in rows.devices(batch) if device.type == "cuda"]
    try:
        with torch.random.fork_rng(cuda), torch.set_grad_enabled(not evaluate):
            yield
    finally:
        if hook is not None:
            hook.remove()
        state.restore()


class _ModuleState:
    """Training flags and buffers of the modules seen, to be put back."""

    def __init__(self, evaluate: bool):
        self._evaluate = evaluate
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

    def restore(self) -> None:
        """Put everything back as it was."""
        for module, training in self._training.items():
            module.training = training
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


def modules_in(reference: Any, *, depth: int = 4) -> Iterator[nn.Module]:
    """Yield the modules a callable can reach: itself, its owner, closure, globals, attributes."""
    if isinstance(reference, nn.Module):
        yield reference
        return
    if depth == 0 or isinstance(reference, ModuleType | type | Tensor):
        return
    inner: list[Any] = []
    if isinstance(reference, functools.partial):
        inner = [reference.func, *reference.args, *reference.keywords.values()]
    elif inspect.ismethod(reference):
        inner = [reference.__self__, reference.__func__]
    elif inspect.isfunction(reference):
        used = inspect.getclosurevars(inspect.unwrap(reference))
        inner = [*used.nonlocals.values(), *used.globals.values()]
    elif isinstance(reference, list | tuple):
        inner = list(reference)
    elif isinstance(reference, dict):
        inner = list(reference.values())
    else:
        inner = list(getattr(reference, "__dict__", {}).values())
    for item in inner:
        yield from modules_in(item, depth=depth - 1)
