"""P decoder-only transformers at once: parameters have a member dimension, products are batched.

    hidden = tokens[id] + positions[place]
    hidden = hidden + attention(norm(hidden)) out,  then  hidden + gelu(norm(hidden) up) down
    logits = head norm(hidden)

Norms have no factors of their own: the product after each has them already. Nothing has a bias.
Positions are learned, and the head is its own matrix: with an alphabet of a few dozen tokens both
cost nothing. Parameters are float32; products are taken in `dtype`, bfloat16 on a GPU, and the head
in the parameters' dtype, so that log-probs are rounded once.

Shapes: P members, N rows, T tokens of a row, D width, V tokens of the alphabet, Lp tokens of a
prompt, La of a completion.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kondo.lm import packed_attention
from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of a population's attention: not cuDNN's, which plans anew for every shape, and a sampler
has one for every length of its cache."""
_LAYER = ("qkv", "out", "up", "down")


class Size(NamedTuple):
    """How large a model is: about 12 * num_layers * width^2 parameters."""

    width: int
    num_layers: int
    num_heads: int

    @property
    def num_weights(self) -> int:
        """Of the layers' products."""
        return 12 * self.num_layers * self.width**2


SIZES = {
    "toy": Size(width=64, num_layers=2, num_heads=2),
    "1m": Size(width=128, num_layers=5, num_heads=4),
    "5m": Size(width=256, num_layers=6, num_heads=4),
    "25m": Size(width=512, num_layers=8, num_heads=8),
    "85m": Size(width=768, num_layers=12, num_heads=12),
    "300m": Size(width=1024, num_layers=24, num_heads=16),
    "1b": Size(width=2048, num_layers=20, num_heads=16),
}
"""Named by their parameters; `toy` has 0.1 million, for a CPU."""


class Layer(NamedTuple):
    """One layer's weights, each [P, in, out], or [in, out] of one member."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    def mix(self, hidden: Tensor) -> Tensor:
        """Return query, key and value, [P, n, 3 D] of [P, n, D]."""
        return normalised(hidden) @ self.qkv

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream with attention and feed-forward added."""
        hidden = _add_product(hidden, attended, self.out)
        wide = F.gelu(normalised(hidden) @ self.up, approximate="tanh")
        return _add_product(hidden, wide, self.down)


class Weights(NamedTuple):
    """What a forward reads: parameters in the dtype of their products."""

    tokens: Tensor
    """[P, V, D]."""
    positions: Tensor
    """[P, Lp + La, D]."""
    layers: list[Layer]
    head: Tensor
    """[P, V, D], in the parameters' dtype."""


class StackedLM:
    """Causal language models of one size, for prompts and completions of fixed lengths.

    Args:
        size: a name in SIZES, or a `Size`.
        prompt_length: Lp, of every prompt.
        answer_length: La, of the longest completion.
        num_tokens: V.
        dtype: of the products inside the layers, see `compute_dtype`; None takes the parameters'
            own.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> from kondo_lab.models.language_model import StackedLM
        >>> model = StackedLM("toy", prompt_length=3, answer_length=2, num_tokens=10)
        >>> parameters = model.initialise(Draws([0, 1]))
        >>> model.log_prob(parameters, torch.randint(10, (2, 4, 5))).shape
        torch.Size([2, 4, 2])
    """

    def __init__(
        self,
        size: str | Size,
        *,
        prompt_length: int,
        answer_length: int,
        num_tokens: int,
        dtype: torch.dtype | None = None,
    ):
        if isinstance(size, str) and size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)} or a Size, got {size!r}.")
        self.size = SIZES[size] if isinstance(size, str) else size
        if self.size.width % self.size.num_heads:
            raise ValueError(
                f"size must have a width that is a multiple of num_heads, got {self.size}."
            )
        for name, value in (
            ("prompt_length", prompt_length),
            ("answer_length", answer_length),
            ("num_tokens", num_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        self.prompt_length, self.answer_length = prompt_length, answer_length
        self.num_tokens, self.dtype = num_tokens, dtype

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name -> shape of one member's parameter."""
        width, num_tokens = self.size.width, self.num_tokens
        shapes = {
            "tokens": (num_tokens, width),
            "positions": (self.prompt_length + self.answer_length, width),
            "head": (num_tokens, width),
        }
        of_layer = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        for layer in range(self.size.num_layers):
            shapes |= {f"{layer}.{name}": s for name, s in zip(_LAYER, of_layer, strict=True)}
        return shapes

    @property
    def num_parameters(self) -> int:
        """Of one member."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initialise(self, draws: Draws) -> Parameters:
        """Return fresh parameters, float32 [P, ...].

        Normal with variance 1 / fan-in, embeddings 1 / D; what is added to the residual stream is
        smaller by sqrt(2 num_layers), so that its size does not grow with depth. A head that starts
        smaller learns several times slower: all gradients pass through it.
        """
        parameters = {}
        for name, (rows, columns) in self.shapes.items():
            kind = name.rpartition(".")[2]
            scale = 1 / math.sqrt(rows if kind in _LAYER else columns)
            scale /= math.sqrt(2 * self.size.num_layers) if kind in ("out", "down") else 1.0
            parameters[name] = draws.normal(name, 0, rows, columns) * scale
        return parameters

    def weights(self, parameters: Parameters) -> Weights:
        """Return the parameters cast for the products, differentiably."""
        cast = {
            name: value if self.dtype is None or name == "head" else value.to(self.dtype)
            for name, value in parameters.items()
        }
        layers = [
            Layer(**{name: cast[f"{layer}.{name}"] for name in _LAYER})
            for layer in range(self.size.num_layers)
        ]
        return Weights(cast["tokens"], cast["positions"], layers, cast["head"])

    def log_prob(self, parameters: Parameters, tokens: Tensor) -> Tensor:
        """Return log pi(completion token | what precedes it), differentiable.

        Args:
            parameters: of P members.
            tokens: int64 [P, N, Lp + La], prompts and completions; what follows an end is read
                and scored like the rest, and is the caller's to mask.

        Returns:
            [P, N, La] in the parameters' dtype.
        """
        if tokens.shape[-1] != self.prompt_length + self.answer_length:
            raise ValueError(
                f"tokens must have {self.prompt_length} + {self.answer_length} columns, prompt and "
                f"completion, got shape {list(tokens.shape)}; fill short completions with padding."
            )
        completions = tokens[..., self.prompt_length :].unsqueeze(-1)
        return self.log_softmax(parameters, tokens).gather(-1, completions).squeeze(-1)

    def log_softmax(self, parameters: Parameters, tokens: Tensor) -> Tensor:
        """Return the log-probs [P, N, La, V] of all tokens at every place of the completions."""
        weights = self.weights(parameters)
        members, rows, columns = tokens.shape
        read = columns - 1  # the last token is predicted, never read
        hidden = pick(weights.tokens, tokens[..., :-1].flatten(1))
        places = weights.positions[:, None, :read]
        hidden = (hidden.view(members, rows, read, -1) + places).flatten(1, 2)
        with sdpa_kernel(ATTENTION):
            for layer in weights.layers:
                attended = causal_attention(layer.mix(hidden), read, self.size.num_heads)
                hidden = layer.finish(hidden, attended)
        asked = hidden.view(members, rows, read, -1)[:, :, self.prompt_length - 1 :]
        logits = logits_of(asked.flatten(1, 2), weights.head)
        return logits.view(members, rows, self.answer_length, -1).log_softmax(dim=-1)

    def as_module(self, parameters: Parameters, member: int) -> "LanguageModel":
        """Return one member as a module that shares its memory: what trains one trains the other.

        Example:
            >>> import torch
            >>> from kondo_lab.tasks.draws import Draws
            >>> from kondo_lab.models.language_model import StackedLM
            >>> from kondo.lm import CausalLM
            >>> model = StackedLM("toy", prompt_length=3, answer_length=2, num_tokens=10)
            >>> module = model.as_module(model.initialise(Draws([0, 1])), member=1)
            >>> lm = CausalLM(module.backbone, head=module.head)
            >>> lm.vocab_size
            10
        """
        members = parameters["head"].shape[0]
        if not 0 <= member < members:
            raise ValueError(f"member must lie in [0, {members}), got {member}.")
        one = {name: nn.Parameter(value.detach()[member]) for name, value in parameters.items()}
        return LanguageModel(self, one)


class LanguageModel(nn.Module):
    """One member: a backbone, token ids -> hidden states, and the head that makes logits of them.

    For `kondo.lm`: CausalLM(module.backbone, head=module.head).
    """

    def __init__(self, model: StackedLM, parameters: dict[str, nn.Parameter]):
        super().__init__()
        self.backbone = Backbone(model, parameters)
        self.head = _HeadLayer(parameters["head"])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [B, T, V] of input_ids [B, T]."""
        logits: Tensor = self.head(self.backbone(input_ids))
        return logits


class Backbone(nn.Module):
    """Token ids -> normalised hidden states. Layers can be compiled in place, `layer.compile()`."""

    takes_packs = True
    """Of rows laid end to end, see `kondo.lm.packed_attention`."""

    def __init__(self, model: StackedLM, parameters: dict[str, nn.Parameter]):
        super().__init__()
        self.dtype = model.dtype
        self.tokens, self.positions = parameters["tokens"], parameters["positions"]
        self.layers = nn.ModuleList(
            _Block({name: parameters[f"{layer}.{name}"] for name in _LAYER}, model)
            for layer in range(model.size.num_layers)
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int = 0,
    ) -> Tensor:
        """Return hidden states [B, T, D] of rows padded on the right, or of a pack [1, total].

        A causal model needs no mask for what comes after everything that is read, so
        `attention_mask` is not looked at.
        """
        dtype = self.tokens.dtype if self.dtype is None else self.dtype
        if position_ids is None:
            places = self.positions.to(dtype)[: input_ids.shape[1]]
        else:
            places = pick(self.positions.to(dtype), position_ids)
        hidden = pick(self.tokens.to(dtype), input_ids) + places
        for layer in self.layers:
            hidden = layer(hidden, cu_seqlens, max_length)
        return normalised(hidden)


class _Block(nn.Module):
    """One layer, [B, T, D] -> [B, T, D]."""

    def __init__(self, weights: dict[str, nn.Parameter], model: StackedLM):
        super().__init__()
        self.weights = nn.ParameterDict(weights)
        self.num_heads = model.size.num_heads

    def forward(
        self, hidden: Tensor, cu_seqlens: Tensor | None = None, max_length: int = 0
    ) -> Tensor:
        layer = Layer(**{name: self.weights[name].to(hidden.dtype) for name in _LAYER})
        flat = hidden.flatten(0, 1)
        mixed = layer.mix(flat)
        if cu_seqlens is None:
            attended = causal_attention(mixed, hidden.shape[1], self.num_heads)
        else:
            query, key, value = mixed.view(len(flat), 3, self.num_heads, -1).unbind(1)
            attended = packed_attention(query, key, value, cu_seqlens, max_length).flatten(1)
        return layer.finish(flat, attended).view_as(hidden)


class _HeadLayer(nn.Module):
    """Hidden states -> logits, in the weight's dtype."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.weight.dtype), self.weight)


def normalised(hidden: Tensor) -> Tensor:
    """Return the last dimension with mean 0 and variance 1."""
    return F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)


def causal_attention(mixed: Tensor, length: int, num_heads: int) -> Tensor:
    """Return attention within rows of `length` tokens laid end to end, [..., D] of [..., 3 D]."""
    rows = mixed.reshape(-1, length, 3, num_heads, mixed.shape[-1] // (3 * num_heads))
    query, key, value = rows.transpose(1, 3).unbind(2)  # each [rows, heads, length, D / heads]
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).reshape(*mixed.shape[:-1], -1)


def pick(table: Tensor, ids: Tensor) -> Tensor:
    """Return table[id] for each id: [P, n, D] of [P, V, D] and [P, n], or without P.

    A product with the one-hot ids: a gather's backward would add thousands of rows to the few of a
    small table one by one.
    """
    known = torch.arange(table.shape[-2], device=ids.device)
    return torch.eq(ids.unsqueeze(-1), known).to(table.dtype) @ table


def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
    """Return [P, n, V] of the residual stream [P, n, D], in the head's dtype."""
    return torch.bmm(normalised(hidden).to(head.dtype), head.transpose(1, 2))


def entropy(log_probs: Tensor) -> Tensor:
    """Return -sum_v p log p over the last dimension; 0 where a probability is 0."""
    found: Tensor = torch.special.entr(log_probs.exp()).sum(dim=-1)
    return found


def compute_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products on a device: bfloat16 on CUDA, elsewhere the parameters' own."""
    return torch.bfloat16 if device.type == "cuda" else None


def _add_product(hidden: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return hidden + left right in one product, batched where the weights are."""
    if right.dim() == 3:
        return torch.baddbmm(hidden, left, right)
    return torch.addmm(hidden, left, right)
