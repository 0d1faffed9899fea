"""Random numbers by counting: each is a hash of (seed, stream, step, place), nothing is remembered.

A population trains many members in one program. If they shared a generator, what a member draws
would depend on who runs beside it; with a number per place it depends on its own seed alone, is the
same on a CPU and a GPU, and a resumed run goes on where it stopped.
"""

import functools
import hashlib
import importlib.util
import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from kondo import sampling

HAS_TRITON = importlib.util.find_spec("triton") is not None
BLOCK = 1024
"""Numbers that a program of the kernel makes."""


class Draws:
    """The random sources of P members.

    Args:
        seeds: [P], one per member; equal seeds draw equal numbers.
        device: where the numbers are made.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> both, alone = Draws([3, 4]), Draws([4])
        >>> torch.equal(both.uniform("x", 7, 5)[1:], alone.uniform("x", 7, 5))
        True
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu"):
        if any(seed < 0 for seed in seeds):
            raise ValueError(f"seeds must be >= 0, got {list(seeds)}.")
        self.keys = sampling.mix_bits(torch.tensor(list(seeds), dtype=torch.int64, device=device))
        self._streams: dict[str, Tensor] = {}
        """Keys of streams, on a CPU: they are the same at every step."""

    def restart(self, seeds: Sequence[int]) -> None:
        """Go on as the random sources of as many other seeds, where the tensors lie."""
        self.keys.copy_(Draws(seeds, self.keys.device).keys)
        self._streams.clear()

    def part(self, members: slice) -> "Draws":
        """Return the random sources of some of the members."""
        some = Draws([], self.keys.device)
        some.keys = self.keys[members]
        return some

    def uniform(self, stream: str, step: int | Tensor, *shape: int) -> Tensor:
        """Return [P, *shape] float32, uniform on (0, 1): neither end is ever drawn.

        Args:
            stream: what is drawn; different names share no numbers.
            step: when; a 0-d int64 tensor stays on the device, so that a CUDA graph can move on.
        """
        count = math.prod(shape)
        if self._fused(step):
            return self._draw(stream, step, count, torch.float32).view(len(self.keys), *shape)
        bits = self._bits(stream, step, count)
        # The top 23 bits, in the middle of their cell: with 24 the last cell would round to 1.
        cells = (bits >> 41 & 0x7FFFFF).float()
        return cells.add_(0.5).mul_(2.0**-23).view(len(self.keys), *shape)

    def normal(self, stream: str, step: int | Tensor, *shape: int) -> Tensor:
        """Return [P, *shape] float32, standard normal (Box-Muller)."""
        radius = self.uniform(f"{stream}/radius", step, *shape).log_().mul_(-2).sqrt_()
        return radius.mul_(self.uniform(f"{stream}/angle", step, *shape).mul_(2 * math.pi).cos_())

    def integers(self, stream: str, step: int | Tensor, high: int, *shape: int) -> Tensor:
        """Return [P, *shape] int64, uniform on 0 .. high-1.

        The modulus of a 63-bit hash: the bias is below high / 2^63.
        """
        if high < 1:
            raise ValueError(f"high must be >= 1, got {high}.")
        bits = self._bits(stream, step, math.prod(shape))
        return ((bits & 0x7FFFFFFFFFFFFFFF) % high).view(len(self.keys), *shape)

    def _bits(self, stream: str, step: int | Tensor, count: int) -> Tensor:
        if self._fused(step):
            return self._draw(stream, step, count, torch.int64)
        if (key := self._streams.get(stream)) is None:
            key = sampling.mix_bits(self.keys + _number(stream))
            if key.device.type == "cpu":
                self._streams[stream] = key
        state = sampling.mix_bits(key + step)
        places = (
            _places(count) if state.device.type == "cpu" else _place_numbers(count, state.device)
        )
        return sampling.mix_bits(state.unsqueeze(1) + places)

    def _fused(self, step: int | Tensor) -> TypeGuard[Tensor]:
        """Return whether a kernel makes the same numbers at once."""
        return self.keys.is_cuda and isinstance(step, Tensor) and HAS_TRITON

    def _draw(self, stream: str, step: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return [P, count], the numbers of `uniform` in float32 or the bits in int64."""
        from kondo_lab.tasks.draw_kernel import draw  # Triton, which a CPU build does not have

        made = torch.empty(len(self.keys), count, dtype=dtype, device=self.keys.device)
        grid = (len(self.keys), -(-count // BLOCK))
        uniform = dtype == torch.float32
        draw[grid](self.keys, step, made, _number(stream), count, BLOCK=BLOCK, UNIFORM=uniform)
        return made


def _place_numbers(count: int, device: torch.device) -> Tensor:
    """Return [count] int64, a number for every place."""
    return torch.arange(1, count + 1, device=device) * sampling.GOLDEN


@functools.lru_cache(maxsize=64)
def _places(count: int) -> Tensor:
    """Return the same on a CPU, where it need not be made at every step."""
    return _place_numbers(count, torch.device("cpu"))


@functools.lru_cache(maxsize=1024)
def _number(stream: str) -> int:
    """Return a signed 64-bit number that stands for a stream's name."""
    digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") - (1 << 63)
