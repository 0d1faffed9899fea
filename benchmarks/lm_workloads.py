"""What bench_lm_step differentiates: causal models by their shapes, random weights, random rows.

Shapes: N rows of S tokens, the first P of them a prompt; G answers to a prompt are a group.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from kondo.lm import CausalLM, TokenRows

SEED = 0
PROMPT_PART = 8
"""A prompt is one of so many parts of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a causal language model."""

    layers: int
    width: int
    heads: int
    key_heads: int
    ff_width: int
    vocabulary: int


SHAPES = {
    "qwen2-0.5b": Shape(
        layers=24, width=896, heads=14, key_heads=2, ff_width=4864, vocabulary=151_936
    ),
    "qwen2-1.5b": Shape(
        layers=28, width=1536, heads=12, key_heads=2, ff_width=8960, vocabulary=151_936
    ),
}
QUICK = Shape(layers=2, width=32, heads=2, key_heads=1, ff_width=64, vocabulary=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmWorkload:
    """A model, one batch, and what the sampler would have recorded."""

    name: str
    config: str
    plain: Any
    """The Hugging Face model as it is."""
    lm: CausalLM
    """The same weights, compiled where that was asked for."""
    rows: TokenRows
    advantages: Tensor
    """[N], centred in each group."""
    micro_rows: int
    """Rows of a forward that materialises logits."""

    @property
    def num_rows(self) -> int:
        """N."""
        return self.rows.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int(self.rows.attention_mask.sum())

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.rows.input_ids.shape[1] // PROMPT_PART

    @property
    def counted(self) -> float:
        """Completion tokens: the denominator."""
        return float(self.rows.completion_mask.sum())

    def take(self, num_rows: int) -> "LmWorkload":
        """Return the same model with the first rows of the batch."""
        few = slice(0, num_rows)
        rows = TokenRows(
            input_ids=self.rows.input_ids[few],
            attention_mask=self.rows.attention_mask[few],
            completion_mask=self.rows.completion_mask[few],
        )
        return dataclasses.replace(self, rows=rows, advantages=self.advantages[few])


def build_model(
    shape: Shape,
    device: torch.device,
    *,
    max_tokens: int,
    compiled: bool,
    positions: int,
    graph_tokens: int = 0,
) -> tuple[Any, CausalLM]:
    """Return a Qwen2 with random weights, plain, and as an adapter that shares them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        intermediate_size=shape.ff_width,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        use_cache=False,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        plain: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    plain.to(dtype)
    model = plain
    if compiled:
        # A second model around the same weights: the plain one stays as its user has it.
        model = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    return plain, CausalLM(model, max_tokens=max_tokens, graph_tokens=graph_tokens)


def build_batch(
    shape: Shape,
    num_rows: int,
    num_tokens: int,
    device: torch.device,
    *,
    spread: bool = False,
    group: int = 8,
) -> tuple[TokenRows, Tensor]:
    """Return rows of a prompt and a completion, and 0/1 rewards minus their group's mean.

    Completions fill the row, or, spread, have log-normal lengths: half of them at most a quarter.
    """
    data = torch.Generator().manual_seed(SEED)
    ids = torch.randint(shape.vocabulary, (num_rows, num_tokens), generator=data)
    prompt = num_tokens // PROMPT_PART
    longest = num_tokens - prompt
    lengths = torch.full((num_rows, 1), longest)
    if spread:
        lengths = torch.randn(num_rows, 1, generator=data).mul(0.7).exp().mul(longest / 4).long()
        lengths = lengths.clamp(1, longest)
    place = torch.arange(num_tokens)
    real = place < prompt + lengths
    sampled = real & (place >= prompt)
    rewards = torch.randint(2, (num_rows,), generator=data).float()
    groups = rewards.view(-1, group)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    rows = TokenRows(
        input_ids=ids.to(device),
        attention_mask=real.to(device),
        completion_mask=sampled.to(device),
    )
    return rows, advantages.to(device)
