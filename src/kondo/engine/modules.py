"""The modules behind a callable: which there are, where they live, and who may use them now.

A policy is any function. Its modules are found by following what it refers to, without a hook: one
that an interrupt left behind would switch every model of the process.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kondo.engine import rows

_T = TypeVar("_T")

# How deep, and how many items of a holder, the search looks: a policy may stand beside a replay
# buffer of millions.
_REACH = 4
_MOST_ITEMS = 64


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
        yield from _named(list(_global_names(holder.__code__)), holder.__globals__)
    elif isinstance(holder, list | tuple):
        yield from holder
    elif isinstance(holder, dict):
        yield from holder.values()
    elif hasattr(holder, "__dict__"):
        yield from vars(holder).values()
        yield from _in_slots(holder)
    elif not isinstance(holder, str | bytes | int | float | None):
        yield from gc.get_referents(holder)  # slots, iterators, caches, deques


def _named(names: Sequence[str], space: dict[str, Any]) -> Iterator[Any]:
    """Yield the globals of these names, and of a Python module those of its attributes: `a.net`."""
    for found in (space[name] for name in names if name in space):
        if isinstance(found, ModuleType):
            held = vars(found)
            yield from (held[name] for name in names if isinstance(held.get(name), nn.Module))
        else:
            yield found


def _in_slots(holder: Any) -> Iterator[Any]:
    slots = (getattr(kind, "__slots__", ()) for kind in type(holder).__mro__)
    for name in itertools.chain.from_iterable((s,) if isinstance(s, str) else s for s in slots):
        if hasattr(holder, name):
            yield getattr(holder, name)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names a function looks up, those of its inner functions and lambdas included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def devices_of(model: Any, batch: Any) -> set[torch.device]:
    """Return where the work happens: the devices of the rows and of the parameters reached."""
    firsts = (next(module.parameters(), None) for module in modules_in(model))
    return rows.devices(batch) | {first.device for first in firsts if first is not None}


class _Lock:
    """A lock of some modules, with its place in the order in which locks are taken."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.place = next(self._numbers)
        self.held = threading.RLock()


_LOCKS: WeakKeyDictionary[nn.Module, tuple[_Lock, ...]] = WeakKeyDictionary()
_NEW_LOCKS = threading.Lock()


def exclusively(call: Callable[[], _T], *models: Any) -> _T:
    """Return `call()`; other threads that want a module of these models wait for it.

    Policies that share a part share a lock.
    """
    locks = {lock for model in models for root in modules_in(model) for lock in _locks_of(root)}
    return _holding(sorted(locks, key=lambda lock: lock.place), call)


def _holding(locks: Sequence[_Lock], call: Callable[[], _T]) -> _T:
    # Written with `with` on the lock itself: no interrupt comes between taking it and holding it.
    if not locks:
        return call()
    with locks[0].held:
        return _holding(locks[1:], call)


def _locks_of(root: nn.Module) -> tuple[_Lock, ...]:
    """Return the locks of a module: its own, and those of parts that were met before it."""
    known = _LOCKS.get(root)
    if known is not None:
        return known
    with _NEW_LOCKS:
        parts = list(root.modules())
        own = _Lock()
        for part in parts:
            _LOCKS.setdefault(part, (own,))
        found = {lock for part in parts for lock in _LOCKS[part]} | {own}
        _LOCKS[root] = tuple(found)
        return _LOCKS[root]
