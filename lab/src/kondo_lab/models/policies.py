"""The papers' two policies: an MLP over images and a small decoder-only transformer over tokens.

Each samples actions together with the log-probs it sampled with (no graph), and returns
differentiable log-probs of given actions: `log_prob`, what `kondo.backward` takes.
Weights are drawn from the given generator; torch's global one is not touched.

Shapes: N rows, H prompt length = answer length, M tokens, K actions, D width, L positions.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rows = dict[str, Tensor]


class ActionSample(NamedTuple):
    """Actions of a bandit policy."""

    actions: Tensor
    """[N] int64."""
    log_probs: Tensor
    """[N], of the weights that sampled."""
    action_probs: Tensor
    """[N, K], for baselines that need the whole distribution."""


class TokenSample(NamedTuple):
    """Answers of a sequence policy."""

    answers: Tensor
    """[N, H] int64."""
    log_probs: Tensor
    """[N, H], of the weights that sampled."""


class MLP(nn.Module):
    """ReLU network with two hidden layers over flat inputs, PyTorch's default initialisation."""

    def __init__(
        self, num_inputs: int, num_actions: int, *, width: int, generator: torch.Generator
    ):
        super().__init__()
        with torch.device("meta"):  # the constructors would draw from the global generator
            self.layers = nn.Sequential(
                nn.Linear(num_inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, num_actions),
            )
        self.to_empty(device="cpu")
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                bound = 1 / math.sqrt(layer.in_features)
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, K] of images [N, inputs]."""
        logits: Tensor = self.layers(images)
        return logits

    def log_prob(self, rows: Rows) -> Tensor:
        """Return log pi(action | image), [N], of rows {"images", "actions"}; differentiable."""
        log_probs = self.forward(rows["images"]).log_softmax(dim=-1)
        return log_probs.gather(1, rows["actions"].unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def sample(self, images: Tensor, generator: torch.Generator) -> ActionSample:
        """Draw one action per image."""
        log_probs = self.forward(images).log_softmax(dim=-1)
        probs = log_probs.exp()
        actions = torch.multinomial(probs, 1, generator=generator)
        return ActionSample(actions.squeeze(1), log_probs.gather(1, actions).squeeze(1), probs)


class Transformer(nn.Module):
    """Decoder-only transformer: pre-LayerNorm, ReLU, no biases, learned positions, untied head.

    There is no final LayerNorm and no separator token. The context is prompt + answer, 2H
    positions; the logits at position H-1 predict the first answer token. Initialisation as in the
    author's code: truncated normal of variance 1/fan_in, embeddings of variance 1/width.
    """

    def __init__(
        self,
        *,
        prompt_length: int,
        num_tokens: int,
        generator: torch.Generator,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        ff_width: int = 256,
    ):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}.")
        self.prompt_length = prompt_length
        with torch.device("meta"):
            self.token_embedding = nn.Embedding(num_tokens, width)
            self.position_embedding = nn.Embedding(2 * prompt_length, width)
            self.blocks = nn.ModuleList(
                _Block(width, num_heads, ff_width) for _ in range(num_layers)
            )
            self.head = nn.Linear(width, num_tokens, bias=False)
        self.to_empty(device="cpu")
        for module in self.modules():
            _initialise(module, generator)

    def log_prob(self, rows: Rows) -> Tensor:
        """Return log pi(answer token | what precedes it), [N, H], of {"prompts", "answers"}."""
        answers = rows["answers"]
        context = torch.cat([rows["prompts"], answers[:, :-1]], dim=1)
        hidden = self._embed(context, start=0)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden[:, self.prompt_length - 1 :])
        log_probs = logits.log_softmax(dim=-1)
        return log_probs.gather(2, answers.unsqueeze(2)).squeeze(2)

    @torch.no_grad()
    def sample(
        self, prompts: Tensor, generator: torch.Generator, *, num_answers: int = 1
    ) -> TokenSample:
        """Draw `num_answers` answers to each prompt, [prompts x answers, H], a prompt's together.

        Keys and values of past positions are cached, and each prompt is read once for all of its
        answers.
        """
        size = prompts.shape[0]
        caches = [_new_cache(block, size, 2 * self.prompt_length) for block in self.blocks]
        hidden = self._read(prompts, caches, start=0)[:, -1]
        caches = [cache.repeat_interleave(num_answers, dim=1) for cache in caches]
        hidden = hidden.repeat_interleave(num_answers, dim=0)
        answers, log_probs = [], []
        for position in range(self.prompt_length, 2 * self.prompt_length):
            step_log_probs = self.head(hidden).log_softmax(dim=-1)
            tokens = torch.multinomial(step_log_probs.exp(), 1, generator=generator)
            answers.append(tokens)
            log_probs.append(step_log_probs.gather(1, tokens))
            if position < 2 * self.prompt_length - 1:  # the last token is not read
                hidden = self._read(tokens, caches, start=position)[:, -1]
        return TokenSample(torch.cat(answers, dim=1), torch.cat(log_probs, dim=1))

    def _read(self, tokens: Tensor, caches: list[Tensor], *, start: int) -> Tensor:
        """Return the last block's output at the new positions, writing keys and values."""
        hidden = self._embed(tokens, start=start)
        for block, cache in zip(self.blocks, caches, strict=True):
            hidden = block(hidden, cache=cache, start=start)
        return hidden

    def _embed(self, tokens: Tensor, *, start: int) -> Tensor:
        positions = self.position_embedding.weight[start : start + tokens.shape[1]]
        embedded: Tensor = self.token_embedding(tokens) + positions
        return embedded


class _Block(nn.Module):
    """Pre-LayerNorm attention and feed-forward, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int, ff_width: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, eps=1e-6, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.ff_norm = nn.LayerNorm(width, eps=1e-6, bias=False)
        self.ff_up = nn.Linear(width, ff_width, bias=False)
        self.ff_down = nn.Linear(ff_width, width, bias=False)

    def forward(self, hidden: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Return [N, L, D]; with a cache, `hidden` holds the positions from `start` on."""
        size, length, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        mixed = mixed.view(size, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)  # each [N, heads, L, D / heads]
        if cache is not None:
            cache[0, :, :, start : start + length] = key
            cache[1, :, :, start : start + length] = value
            key, value = cache[:, :, :, : start + length]
        # A single new position sees all the past; several at once (the prompt) must be masked.
        causal = length > 1
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        attended = attended.transpose(1, 2).reshape(size, length, width)
        hidden = hidden + self.attention_out(attended)
        fed: Tensor = self.ff_down(self.ff_up(self.ff_norm(hidden)).relu())
        return hidden + fed


def _new_cache(block: nn.Module, size: int, length: int) -> Tensor:
    """Return an empty cache of one block, [2 (key, value), N, heads, L, D / heads]."""
    assert isinstance(block, _Block)
    weight = block.attention_out.weight
    head_width = weight.shape[0] // block.num_heads
    return weight.new_empty(2, size, block.num_heads, length, head_width)


def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights that `module` itself owns."""
    if isinstance(module, nn.Linear):
        # A normal cut at two standard deviations has 0.8796 of its variance's root left.
        std = 1 / math.sqrt(module.in_features) / 0.87962566
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    elif isinstance(module, nn.Embedding):
        std = 1 / math.sqrt(module.embedding_dim)
        nn.init.normal_(module.weight, std=std, generator=generator)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
