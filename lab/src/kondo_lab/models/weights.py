"""What a forward of stacked decoders reads: embeddings, layers and head, ready for their products.

Shapes: P members, n rows or tokens, D width, V tokens of the alphabet.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kondo_lab.models.architecture import ACTIVATIONS, Architecture, normalised, pick
from kondo_lab.models.fused_layers import LayerWeights


class Layer(LayerWeights):
    """One layer's weights, each [P, in, out]; the norms' factors are in the product after each."""

    def mix(self, hidden: Tensor) -> Tensor:
        """Return query, key and value, [P, n, 3 D] of [P, n, D]."""
        return torch.bmm(normalised(hidden), self.qkv)

    def finish(
        self, hidden: Tensor, attended: Tensor, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream with attention and feed-forward added.

        It may be written to `out`, such as `hidden` itself, where nothing is differentiated.
        """
        hidden = torch.baddbmm(hidden, attended, self.out, out=out)
        wide = ACTIVATIONS[activation](torch.bmm(normalised(hidden), self.up))
        return torch.baddbmm(hidden, wide, self.down, out=out)


class Weights(NamedTuple):
    """Of P members, in the dtype of their products."""

    architecture: Architecture
    tokens: Tensor
    """[P, V, D]."""
    positions: Tensor
    """[P, places, D]."""
    layers: list[Layer]
    head: Tensor
    """[P, D, V], in the parameters' dtype."""
    scaled: bool
    """The layers scale the query: attention is by plain products."""

    def embed(self, tokens: Tensor, *, start: int) -> Tensor:
        """Return [P, ..., L, D] of tokens [P, ..., L], which stand at `start` and after it."""
        embedded = pick(self.tokens, tokens.flatten(1))
        embedded = embedded.view(*tokens.shape, self.architecture.width)
        positions = self.positions[:, start : start + tokens.shape[-1]]
        lead = [1] * (tokens.dim() - 2)
        return embedded + positions.view(positions.shape[0], *lead, *positions.shape[1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [P, n, V] of the residual stream [P, n, D], in the head's dtype."""
        last = normalised(hidden) if self.architecture.final_norm else hidden
        return torch.bmm(last.to(self.head.dtype), self.head)
