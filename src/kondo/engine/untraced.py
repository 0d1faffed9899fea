"""Run a policy and leave no trace: training flags, statistics and grad mode stay as they were.

Also after Ctrl-C, whenever it comes. Python looks for signals between its own instructions, and not
inside a call of C code. So one such call, in a `finally`, puts everything back. A context manager
written in Python would not do: a signal can arrive on the way into its `__exit__`.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import nn

from kondo.engine.modules import modules_in

_T = TypeVar("_T")
_Call = Callable[[], Any]


def without_trace(call: Callable[[], _T], model: Any, *, evaluate: bool = True) -> _T:
    """Return `call()`, which runs `model`.

    Args:
        call: what to run.
        model: a callable; its modules are those that `kondo.engine.modules.modules_in` finds.
        evaluate: run them in evaluation mode without a graph, so dropout is off and batch-norm
            statistics stay. Otherwise modes are left alone, a graph is built, and buffers that were
            written in place are put back.
    """
    modules = list({part: None for root in modules_in(model) for part in root.modules()})
    if evaluate:
        now = [module.training for module in modules]
        return _run(call, False, _set_flags(modules, repeat(False)), _set_flags(modules, now))
    buffers = [buffer.detach() for module in modules for buffer in module.buffers(recurse=False)]
    undo = all_of([partial(buffer.copy_, buffer.clone()) for buffer in buffers])
    return _run(call, True, all_of([]), undo)


def with_grad_mode_kept(call: Callable[[], _T]) -> _T:
    """Return `call()`; the grad mode is as before, also if a `no_grad` inside was interrupted."""
    return _run(call, torch.is_grad_enabled(), all_of([]), all_of([]))


def _run(call: Callable[[], _T], with_graph: bool, switch: _Call, undo: _Call) -> _T:
    """Return `call()` after `switch()`, with `undo()` after it; both are one call of C code."""
    before = partial(torch._C._set_grad_enabled, torch.is_grad_enabled())
    undo_all = all_of([before, undo])
    try:
        switch()
        torch._C._set_grad_enabled(with_graph)
        return call()
    finally:
        undo_all()


def all_of(calls: Iterable[_Call]) -> _Call:
    """Return one call of C code that makes all these calls, once."""
    return partial(deque, map(operator.call, calls), 0)


def _set_flags(modules: list[nn.Module], flags: Iterable[bool]) -> _Call:
    """Return a call that sets the training flag of every module."""
    calls = [_set_flag(module, flag) for module, flag in zip(modules, flags, strict=False)]
    # What runs Python code comes last: an interrupt inside it must not skip the others.
    calls.sort(key=lambda call: call.func is setattr)
    return all_of(calls)


def _set_flag(module: nn.Module, flag: bool) -> partial[None]:
    # nn.Module's own __setattr__ is Python code. Compiled and scripted modules keep the flag
    # elsewhere.
    own = vars(module)
    if "training" in own and not hasattr(type(module), "training"):
        return partial(operator.setitem, own, "training", flag)
    return partial(setattr, module, "training", flag)
