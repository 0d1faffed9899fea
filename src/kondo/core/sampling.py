"""Numbers of units, sums and draws: what gates have in common. Nothing is read from the device.

count_for        rate -> number of units
lottery          a fixed pseudo-random number per place, for ties
uniform_of       such numbers as draws on [0, 1)
uniform          draws on [0, 1) from a generator of any device
running_sum      sums of the first 1, ..., M values, the same every time
"""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TypeVar

import torch
from torch import Tensor

_Count = TypeVar("_Count", int, Tensor)
_Chosen = TypeVar("_Chosen")

# Odd multipliers of the splitmix64 finaliser, as signed 64-bit integers.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)

_FREE_READS = ContextVar("_FREE_READS", default=False)


def with_free_reads(free: bool, choose: Callable[..., _Chosen], *inputs: object) -> _Chosen:
    """Return choose(*inputs), telling what it calls that values lie in CPU memory: work that a
    look at them shows to be needless is left out. What is chosen stays the same.

    It runs in a context of its own: an interrupt at any place leaves nothing behind.
    """
    context = copy_context()
    context.run(_FREE_READS.set, free)
    return context.run(choose, *inputs)


def reads_are_free() -> bool:
    """Return whether a look at values costs nothing; see `with_free_reads`."""
    return _FREE_READS.get()


def count_for(rate: float, num_units: _Count) -> _Count:
    """Return the number of units a rate buys: round(rate * num_units), half to even, at least 1."""
    if isinstance(num_units, Tensor):
        return (rate * num_units.double()).round().clamp(min=1).long()
    return max(1, round(rate * num_units))


def lottery(position: Tensor, *, salt: Tensor) -> Tensor:
    """Return a fixed pseudo-random int64 per position: splitmix64 of position and salt.

    The salt is a float, or one per position; its bits enter the hash, so different tied values draw
    different lots.
    """
    bits = salt.double().view(torch.int64)
    return mix_bits((position + bits) * GOLDEN)


def uniform_of(lots: Tensor) -> Tensor:
    """Return lots, int64 by `lottery`, as float64 on [0, 1)."""
    # The upper 53 bits: all 64 would round to 1 in the end.
    return (lots >> 11).double() / 2.0**53 + 0.5


def mix_bits(bits: Tensor) -> Tensor:
    """Return splitmix64's finaliser of int64 bits: each bit of the result depends on all of them.

    Multiples of GOLDEN, one per place, become independent-looking numbers.
    """
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    # int64 >> repeats the sign bit: the last step above would then clear it, and no lot would ever
    # fall in the lower half.
    return (bits >> places) & ((1 << (64 - places)) - 1)


def running_sum(values: Tensor) -> Tensor:
    """Return the sums of the first 1, ..., M values along the last dimension, the same every time.

    On CUDA `cumsum` adds floats in an order that varies from run to run.
    """
    if not values.is_cuda:
        return values.cumsum(-1)
    step = 1
    while step < values.shape[-1]:
        values = values + torch.nn.functional.pad(values[..., :-step], (step, 0))
        step *= 2
    return values


def uniform(like: Tensor, generator: torch.Generator | Tensor | None) -> Tensor:
    """Draw U[0, 1) in like's shape on its device, from a generator of any device.

    Args:
        like: [..., M].
        generator: the default one if None; or the draws themselves, like `like`.
    """
    if isinstance(generator, Tensor):
        return generator
    device = like.device if generator is None else generator.device
    # float64: a float32 draw is exactly 0 once in 2^24, below any probability however small.
    draws = torch.rand(like.shape, generator=generator, dtype=torch.float64, device=device)
    return draws.to(like.device)
