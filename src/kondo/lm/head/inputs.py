"""What a head is, what is asked of it, and whether it can be right."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float

# A chunk's float32 logits take this much, or as much as MIN_CHUNK_CUDA tokens need. In the backward
# each chunk reads the weight, and reads and writes the float32 sum of its gradient: 10 bytes an
# entry, for 6 n operations with n tokens. An H200 does 165 operations a byte, so 300 tokens would
# only balance the two.
CHUNK_BYTES = 512 * 2**20
MIN_CHUNK_CUDA = 2048

# Logits of less than this are one chunk on a GPU: the gradient of the weight is written once,
# in the weight's own dtype, and needs no float32 sum.
ONE_CHUNK_BYTES_CUDA = 2_500_000_000


class Head(NamedTuple):
    """What turns hidden states into logits: soft_cap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    """[V, D]."""
    bias: Tensor | None = None
    """[V]."""
    soft_cap: float | None = None
    """logits = cap * tanh(logits / cap), as in Gemma 2."""
    scale: float = 1.0
    """Multiplies the logits before the cap: Cohere's logit_scale, 1 / Granite's logits_scaling."""


def default_chunk(vocabulary: int, device: torch.device, num_tokens: int | None = None) -> int:
    """Return how many tokens' logits exist at a time: CHUNK_BYTES, or more where a GPU wants it.

    Told how many tokens there are, all of them if they take less than ONE_CHUNK_BYTES_CUDA there.
    """
    fitting = max(1, CHUNK_BYTES // (4 * vocabulary))
    if device.type != "cuda":
        return fitting
    if num_tokens is not None and 4 * vocabulary * num_tokens < ONE_CHUNK_BYTES_CUDA:
        fitting = max(fitting, num_tokens)
    return max(fitting, MIN_CHUNK_CUDA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """All that is not differentiated: the head's numbers, the temperature, dtypes, chunks."""

    scale: float
    soft_cap: float | None
    temperature: float | Tensor  # A number, or [K, 1]
    chunk: int
    dtype: torch.dtype  # of matrix products
    device: torch.device

    @property
    def wide(self) -> torch.dtype:
        """Of logits, log-sum-exp, sums over chunks and the result."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def slope(self) -> float | Tensor:
        """d logits / d raw without the cap's part, s / T: a number, or [K, 1]."""
        return self.scale / self.temperature

    @property
    def top(self) -> float | Tensor:
        """Where capped logits end, c / T: a number, or [K, 1]."""
        assert self.soft_cap is not None
        return self.soft_cap / self.temperature

    def at(self, part: slice) -> "How":
        """Return the same for some of the tokens."""
        if isinstance(self.temperature, float):
            return self
        return dataclasses.replace(self, temperature=self.temperature[part])

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield slices of at most `chunk` tokens: as few as can be, of nearly equal length."""
        pieces = math.ceil(num_tokens / self.chunk)
        for piece in range(pieces):
            yield slice(num_tokens * piece // pieces, num_tokens * (piece + 1) // pieces)

    def cast(self, value: Tensor) -> Tensor:
        """Return `value` as matrix products take it."""
        return value.to(self.dtype)

    def cast_head(self, head: Head) -> Head:
        """Return the head as matrix products take it."""
        bias = None if head.bias is None else self.cast(head.bias)
        return head._replace(weight=self.cast(head.weight), bias=bias)

    def no_autocast(self) -> torch.autocast:
        """Casts are written out here; autocast would repeat them in every chunk."""
        return torch.autocast(self.device.type, enabled=False)


def wants_graph(hidden: Tensor, head: Head) -> bool:
    """Whether the log-probs are to be differentiated."""
    inputs = (hidden, head.weight, head.bias)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def prepare(
    hidden: Tensor, head: Head, temperature: float | Tensor, chunk: int | None, check: bool
) -> How:
    """Check everything but the targets, and say how to compute."""
    _check_shapes(hidden, head)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}; None chooses.")
    if head.soft_cap is not None and not head.soft_cap > 0:
        raise ValueError(f"head.soft_cap must be positive, got {head.soft_cap}; None for no cap.")
    if not math.isfinite(head.scale):
        raise ValueError(f"head.scale must be finite, got {head.scale}.")
    return How(
        scale=float(head.scale),
        soft_cap=head.soft_cap,
        temperature=_check_temperature(temperature, hidden, check),
        chunk=chunk or default_chunk(head.weight.shape[0], hidden.device, hidden.shape[0]),
        dtype=_product_dtype(hidden, head),
        device=hidden.device,
    )


def _check_shapes(hidden: Tensor, head: Head) -> None:
    check_float("hidden", hidden)
    check_float("head.weight", head.weight)
    if hidden.ndim != 2:
        raise ValueError(
            f"hidden must have shape [K, D], one row per token, got {list(hidden.shape)}; gather "
            f"the states whose log-probs are read, or flatten with hidden.flatten(0, -2)."
        )
    if head.weight.ndim != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"head.weight must have shape [V, {hidden.shape[1]}] like hidden {list(hidden.shape)}, "
            f"got {list(head.weight.shape)}."
        )
    if head.bias is not None and head.bias.shape != head.weight.shape[:1]:
        raise ValueError(
            f"head.bias must have shape [{head.weight.shape[0]}] like head.weight, got "
            f"{list(head.bias.shape)}."
        )
    if head.weight.device != hidden.device:
        raise ValueError(
            f"hidden must be on the head's device, {head.weight.device}, got {hidden.device}."
        )


def _product_dtype(hidden: Tensor, head: Head) -> torch.dtype:
    """Return autocast's dtype where it is on (it leaves float64 alone), else hidden's."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if head.weight.dtype != hidden.dtype:
        raise ValueError(
            f"hidden must have the head's dtype, {head.weight.dtype}, got {hidden.dtype}; convert "
            f"it with hidden.to(head.weight.dtype), or use torch.autocast."
        )
    return hidden.dtype


def _check_temperature(temperature: float | Tensor, hidden: Tensor, check: bool) -> float | Tensor:
    """Return a float, or [K, 1] on the device of hidden."""
    num_tokens = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, got {temperature}; use the one the "
                f"tokens were sampled with, and 1.0 for greedy ones."
            )
        return float(temperature)
    check_float("temperature", temperature)
    if temperature.shape not in ((), (1,), (num_tokens,)):
        raise ValueError(
            f"temperature must be a number or have shape [{num_tokens}], one per token, got "
            f"{list(temperature.shape)}."
        )
    found = at_least_float32(temperature.detach()).to(hidden.device)
    if check and not bool(((found > 0) & found.isfinite()).all()):
        raise ValueError(
            "temperature must be positive and finite, got a tensor with an entry that is not; use "
            "the one the tokens were sampled with, and 1.0 for greedy ones."
        )
    return found.reshape(-1, 1).expand(num_tokens, 1)


def check_targets(targets: Tensor, num_tokens: int, weight: Tensor, check: bool) -> None:
    """Raise a ValueError unless targets are K ids of the vocabulary; `check` looks at values."""
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 token ids, got {targets.dtype}; use .long().")
    if targets.shape != (num_tokens,):
        raise ValueError(
            f"targets must have shape [{num_tokens}], one per row of hidden, got "
            f"{list(targets.shape)}."
        )
    if targets.device != weight.device:
        raise ValueError(f"targets must be on {weight.device} like hidden, got {targets.device}.")
    if not check or not num_tokens:
        return
    low, high = torch.stack(targets.aminmax()).tolist()
    if low < 0 or high >= weight.shape[0]:
        raise ValueError(
            f"targets must lie in [0, {weight.shape[0]}), the head's vocabulary, got "
            f"{low if low < 0 else high}; were these tokens sampled with another model's "
            f"tokeniser, or is padding (-100) among them?"
        )
