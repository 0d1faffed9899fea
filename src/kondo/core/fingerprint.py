"""Functions, options and gates in words that are the same in every process."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kondo.core.base_gate import BaseGate

# Odd, so that no byte of a place is lost; and bytes at a time, so that a large tensor needs no more
# memory than this many 64-bit integers.
_CHECKSUM_STRIDE = 0x9E3779B1
_CHECKSUM_CHUNK = 2**20


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a signal, loss or gate function, with what `functools.partial` bound.

    Example:
        >>> import functools
        >>> name_of(functools.partial(round, 2.5, ndigits=1))
        'partial(round, 2.5, ndigits=1)'
    """
    if isinstance(function, functools.partial):
        bound = [in_words(value) for value in function.args]
        bound += [f"{name}={in_words(value)}" for name, value in function.keywords.items()]
        return f"partial({', '.join([name_of(function.func), *bound])})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def fingerprint(gate: BaseGate) -> str:
    """Return what ranks must have in common: a gate's options and its running state.

    The options are its own repr, or without one its class and its public attributes.
    """
    words = repr(gate)
    if type(gate).__repr__ is object.__repr__:
        options = {name: value for name, value in vars(gate).items() if not name.startswith("_")}
        shown = (f"{name}={in_words(value)}" for name, value in options.items())
        words = f"{type(gate).__name__}({', '.join(shown)})"
    state = gate.state_dict()
    return f"{words} with state {in_words(state)}" if state else words


def in_words(value: Any) -> str:
    """Return a value as text that is the same in every process, and differs where the value does.

    A tensor is its shape, dtype and a checksum, which reads it from its device. An object without a
    repr of its own is its class.
    """
    if isinstance(value, BaseGate):
        return fingerprint(value)
    if isinstance(value, Tensor):
        return f"tensor({list(value.shape)}, {value.dtype}, checksum {_checksum(value):x})"
    if isinstance(value, dict):
        inside = (f"{in_words(name)}: {in_words(part)}" for name, part in value.items())
        return f"{{{', '.join(inside)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(in_words, value))})"
    if isinstance(value, set | frozenset):  # their order is the process's
        return f"{type(value).__name__}({', '.join(sorted(map(in_words, value)))})"
    if callable(value):
        return name_of(value)
    kind: Any = type(value)
    # The default repr is an address.
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(value)


def _checksum(value: Tensor) -> int:
    """Return a number of the tensor's bytes and their places."""
    found = torch.zeros((), dtype=torch.int64, device=value.device)
    place = 1
    data = value.detach().reshape(-1).contiguous().view(torch.uint8)
    for part in torch.split(data, _CHECKSUM_CHUNK):
        places = torch.arange(place, place + part.numel(), device=value.device)
        # Overflow wraps around, in the same way on every device.
        found += ((part.long() + 1) * (places * _CHECKSUM_STRIDE)).sum()
        place += part.numel()
    return int(found) % 2**64
