"""What a decoder is made of, as data: one code serves the papers' transformer and language models.

    hidden = tokens[id] + positions[place]
    hidden = hidden + attention(norm(hidden)) out,  then  hidden + activation(norm(hidden) up) down
    logits = head norm(hidden), or head hidden

Nothing has a bias. Positions are learned, and the head is its own matrix.

Shapes: D width, F feed-forward width, V tokens of the alphabet.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCTS = ("qkv", "out", "up", "down")
"""Of a layer."""
EMBEDDINGS = ("tokens", "positions")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # In place: the product before it does not need its result for the gradient.
    "relu": torch.relu_,
    "gelu": partial(F.gelu, approximate="tanh"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and parts of a decoder; the defaults are the papers' transformer for token reversal.

    Args:
        width: D.
        num_layers: of attention and feed-forward.
        num_heads: of attention; divides the width.
        ff_width: F.
        activation: between `up` and `down`; "gelu" is its approximation by tanh.
        norm_factors: every norm before a layer's product has learned factors, [1, D]. Without
            them the product after each has them already.
        final_norm: there is a norm before the head.
        initialisation: "truncated" cuts normals of variance 1 / fan-in at two deviations, as the
            authors' code does. "by depth" does not cut, and makes what is added to the residual
            stream smaller by sqrt(2 num_layers), so that its size does not grow with depth. A head
            that starts smaller learns several times slower: all gradients pass through it.
        head: shape of the head, [D, V] or [V, D].

    Example:
        >>> from kondo_lab.models.architecture import Architecture, language
        >>> Architecture(num_layers=1).ff_width, language(width=64, num_layers=2, num_heads=2).head
        (256, '[V, D]')
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    ff_width: int = 256
    activation: Literal["relu", "gelu"] = "relu"
    norm_factors: bool = True
    final_norm: bool = False
    initialisation: Literal["truncated", "by depth"] = "truncated"
    head: Literal["[D, V]", "[V, D]"] = "[D, V]"

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads, got {self.width} and {self.num_heads}; "
                f"choose num_heads that divides the width."
            )

    @property
    def num_weights(self) -> int:
        """Of the layers' products."""
        return self.num_layers * (4 * self.width**2 + 2 * self.width * self.ff_width)

    def shapes(self, num_tokens: int, num_positions: int) -> dict[str, tuple[int, int]]:
        """Return name -> shape of one member's parameter."""
        width, ff_width = self.width, self.ff_width
        head = (num_tokens, width) if self.head == "[V, D]" else (width, num_tokens)
        shapes = {"tokens": (num_tokens, width), "positions": (num_positions, width), "head": head}
        of_layer = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, ff_width),
            "down": (ff_width, width),
        }
        if self.norm_factors:
            of_layer |= {"attention_norm": (1, width), "ff_norm": (1, width)}
        for layer in range(self.num_layers):
            shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
        return shapes

    def fan_in(self, name: str, shape: tuple[int, int]) -> int:
        """Return how many numbers a product or the head sums; D for embeddings."""
        return shape[0] if name.endswith(PRODUCTS) else self.width

    def deviation(self, name: str, shape: tuple[int, int]) -> float:
        """Return the standard deviation that a fresh parameter starts with."""
        deviation = 1 / math.sqrt(self.fan_in(name, shape))
        if self.initialisation == "by depth" and name.endswith(("out", "down")):
            deviation /= math.sqrt(2 * self.num_layers)
        return deviation

    def is_cut(self, name: str) -> bool:
        """Return whether the normal that a parameter starts with is cut at two deviations."""
        return self.initialisation == "truncated" and name not in EMBEDDINGS


def language(*, width: int, num_layers: int, num_heads: int) -> Architecture:
    """Return the architecture of small language models: about 12 num_layers width^2 parameters."""
    return Architecture(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        ff_width=4 * width,
        activation="gelu",
        norm_factors=False,
        final_norm=True,
        initialisation="by depth",
        head="[V, D]",
    )


SIZES = {
    "toy": language(width=64, num_layers=2, num_heads=2),
    "1m": language(width=128, num_layers=5, num_heads=4),
    "5m": language(width=256, num_layers=6, num_heads=4),
    "25m": language(width=512, num_layers=8, num_heads=8),
    "85m": language(width=768, num_layers=12, num_heads=12),
    "300m": language(width=1024, num_layers=24, num_heads=16),
    "1b": language(width=2048, num_layers=20, num_heads=16),
}
"""Language models, named by their parameters; `toy` has 0.1 million, for a CPU."""


def normalised(hidden: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the last dimension with mean 0 and variance 1, times factors if there are any."""
    return F.layer_norm(hidden, hidden.shape[-1:], factors, eps=1e-6)


def pick(table: Tensor, ids: Tensor) -> Tensor:
    """Return table[id] for each id: [P, n, D] of [P, V, D] and [P, n], or without P.

    A product with the one-hot ids: a gather's backward would add thousands of rows to the few of a
    small table one by one.
    """
    known = torch.arange(table.shape[-2], device=ids.device)
    return torch.eq(ids.unsqueeze(-1), known).to(table.dtype) @ table


def compute_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products on a device: bfloat16 on CUDA, elsewhere the parameters' own."""
    return torch.bfloat16 if device.type == "cuda" else None
