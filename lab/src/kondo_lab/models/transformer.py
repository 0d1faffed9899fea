"""P transformers at once, stacked as in `networks`, which has the shapes.

The single-run twin is `policies.Transformer`: same shapes, initialisation and outputs (tested). On
a GPU whole layers are fused kernels, `fused_layers`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kondo_lab.models import fused_layers
from kondo_lab.models.networks import Parameters, truncated_normal
from kondo_lab.tasks.draws import HAS_TRITON, Draws


class Sampled(NamedTuple):
    """Answers of a population, with the log-probs they were sampled with."""

    answers: Tensor
    """[P, G, A, Ha] int64."""
    log_probs: Tensor
    """[P, G, A, Ha]."""


class StackedTransformer:
    """Decoder-only transformers: pre-LayerNorm, ReLU, no biases, learned positions, untied head.

    No separator token and no final LayerNorm; the logits at the prompt's last position predict the
    first answer token. Answers to one prompt share its hidden states, in sampling and in training:
    with ten answers per prompt a training forward has about half the tokens.
    """

    def __init__(
        self,
        *,
        prompt_length: int,
        answer_length: int,
        num_tokens: int,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        ff_width: int = 256,
    ):
        if width % num_heads:
            raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}.")
        self.prompt_length, self.answer_length = prompt_length, answer_length
        self.num_tokens, self.width, self.ff_width = num_tokens, width, ff_width
        self.num_layers, self.num_heads = num_layers, num_heads

    def initialise(self, draws: Draws) -> Parameters:
        """Return fresh parameters: truncated normal of variance 1 / fan-in, embeddings normal."""
        width, ff_width = self.width, self.ff_width
        positions = self.prompt_length + self.answer_length
        scale = 1 / math.sqrt(width)
        parameters = {
            "tokens": draws.normal("tokens", 0, self.num_tokens, width) * scale,
            "positions": draws.normal("positions", 0, positions, width) * scale,
            "head": truncated_normal(draws, "head", width, self.num_tokens),
        }
        ones = torch.ones(draws.keys.numel(), 1, width, device=draws.keys.device)
        for layer in range(self.num_layers):
            shapes = {
                "qkv": (width, 3 * width),
                "out": (width, width),
                "up": (width, ff_width),
                "down": (ff_width, width),
            }
            for name, shape in shapes.items():
                key = f"{layer}.{name}"
                parameters[key] = truncated_normal(draws, key, *shape)
            parameters[f"{layer}.attention_norm"] = ones.clone()
            parameters[f"{layer}.ff_norm"] = ones.clone()
        return parameters

    def log_prob(self, parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return log pi(answer token | what precedes it), [P, G, A, Ha], differentiable.

        Prompts are [P, G, Hp] int64, answers [P, G, A, Ha] int64.
        """
        members, groups, repeats, length = answers.shape
        asked = self._embed(parameters, prompts, start=0)
        read = answers[..., :-1]  # the last token is predicted, never read
        told = self._embed(parameters, read, start=prompts.shape[-1])
        through = self._in_tiles if self._fused(asked) else self._in_products
        last, told = through(self._layers(parameters), asked, told)
        first = torch.bmm(last, parameters["head"])[:, :, None, None]  # [P, G, 1, 1, M]
        rest = torch.bmm(told, parameters["head"])
        rest = rest.view(members, groups, repeats, length - 1, self.num_tokens)
        logits = torch.cat([first.expand(-1, -1, repeats, -1, -1), rest], dim=3)
        return logits.log_softmax(dim=-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)

    def _in_products(
        self, layers: Sequence["_Layer"], asked: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the layers' output at each prompt's last token, [P, G, D], and of all that was
        read of the answers, [P, G x A x L, D].

        Embedded are `asked`, [P, G, Hp, D], and `told`, [P, G, A, L, D].
        """
        members, groups, repeats, length, _ = told.shape
        prompt_length = asked.shape[2]
        asked, told = asked.flatten(1, 2), told.flatten(1, 3)
        for layer in layers:
            prompt = self._heads(layer.mix(asked), members * groups, 1, prompt_length)
            asked = layer.finish(asked, _attend(prompt).reshape(asked.shape))
            if length > 0:
                answer = self._heads(layer.mix(told), members * groups, repeats, length)
                told = layer.finish(told, _attend(answer, prompt).reshape(told.shape))
        return asked.view(members, groups, prompt_length, -1)[:, :, -1], told

    def _in_tiles(
        self, layers: Sequence["_Layer"], asked: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `_in_products` does, by fused kernels, with as many answers beside a prompt
        as these hold."""
        members, groups, repeats, length, _ = told.shape
        prompt_length = asked.shape[2]
        several = fused_layers.answers_per_tile(prompt_length, length, repeats)
        told = told.reshape(members, groups, repeats // several, several * length, self.width)
        asked = asked.unsqueeze(2).expand(-1, -1, repeats // several, -1, -1)
        hidden = torch.cat([asked, told], dim=3)  # [P, G, tiles of a prompt, S, D]
        shape, hidden = hidden.shape, hidden.flatten(0, 2)
        for layer in layers:
            tiles = fused_layers.Tiles(prompt_length, length, several)
            hidden = fused_layers.apply(hidden, layer, tiles, num_heads=self.num_heads)
        hidden = hidden.view(shape)
        told = hidden[:, :, :, prompt_length:].reshape(members, -1, self.width)
        return hidden[:, :, 0, prompt_length - 1], told

    def _fused(self, hidden: Tensor) -> bool:
        """Return whether fused kernels do this: float32 on a GPU, products may be rounded."""
        return (
            HAS_TRITON
            and hidden.is_cuda
            and hidden.dtype == torch.float32
            and torch.get_float32_matmul_precision() != "highest"
            and fused_layers.fit(self.width, self.num_heads, self.ff_width)
            and self.prompt_length + self.answer_length <= fused_layers.TILE
        )

    @torch.no_grad()
    def sample(self, parameters: Parameters, prompts: Tensor, uniform: Tensor) -> Sampled:
        """Draw answers, keys and values of past positions cached.

        The token is argmax(logits + Gumbel noise), an exact draw from the softmax, where the noise
        is made of `uniform`, [P, G, A, Ha, M] in (0, 1). Prompts are [P, G, Hp] int64.
        """
        members, groups, repeats, length, _ = uniform.shape
        asked = self._embed(parameters, prompts, start=0)
        gumbel = -torch.log(-torch.log(uniform.flatten(1, 2)))  # [P, N, Ha, M]
        draw = self._draw_fused if self._fused(asked) else self._draw
        answers, log_probs = draw(parameters, self._layers(parameters), asked, gumbel)
        shape = (members, groups, repeats, length)
        return Sampled(answers.view(shape), log_probs.view(shape))

    def _draw_fused(
        self, parameters: Parameters, layers: Sequence["_Layer"], asked: Tensor, gumbel: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `_draw` does, by fused kernels."""
        members, groups, length, width = asked.shape
        tiles = fused_layers.Tiles(prompt=length, answer=0, answers=0)
        hidden, past = asked, []
        for layer in layers:
            mixed = layer.mix(hidden.flatten(1, 2)).view(members, groups, length, 3 * width)
            past.append(mixed[..., width:])
            flat = hidden.reshape(-1, length, width)
            hidden = fused_layers.apply(flat, layer, tiles, num_heads=self.num_heads)
            hidden = hidden.view(asked.shape)
        last = hidden[:, :, -1].repeat_interleave(gumbel.shape[1] // groups, 1)
        return fused_layers.sample(last, parameters, layers, past, gumbel, num_heads=self.num_heads)

    def _draw(
        self, parameters: Parameters, layers: Sequence["_Layer"], asked: Tensor, gumbel: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return answers to the embedded prompts [P, G, Hp, D] and log-probs, each [P, N, Ha].

        The noise is [P, N, Ha, M]; neighbouring rows answer one prompt.
        """
        members, groups, prompt_length, _ = asked.shape
        repeats, length = gumbel.shape[1] // groups, gumbel.shape[2]
        hidden = asked.flatten(1, 2)
        caches = []
        for layer in layers:
            prompt = self._heads(layer.mix(hidden), members * groups, 1, prompt_length)
            attended = _attend(prompt).reshape(members, -1, self.width)
            hidden = layer.finish_in_place(hidden, attended)
            past = torch.stack([prompt.key, prompt.value]).squeeze(3)  # [2, P x G, heads, Hp, d]
            past = past.repeat_interleave(repeats, 1)
            caches.append(F.pad(past, (0, 0, 0, length - 1)))
        hidden = hidden.view(members, groups, prompt_length, -1)[:, :, -1]
        hidden = hidden.repeat_interleave(repeats, 1)  # [P, N, D]
        # Every read multiplies all places of the cache and masks those after its own: products of
        # one size, whatever the token.
        places = torch.arange(prompt_length + length - 1, device=hidden.device)
        later = torch.where(places > places.unsqueeze(1), -math.inf, 0.0).to(hidden.dtype)
        tokens, logits = [], []
        for place in range(length):
            logits.append(torch.bmm(hidden, parameters["head"]))
            tokens.append((logits[-1] + gumbel[:, :, place]).argmax(dim=-1))
            if place < length - 1:
                position = prompt_length + place
                hidden = self._read(
                    parameters, layers, tokens[-1], caches, position, later[position]
                )
        answers = torch.stack(tokens, dim=2)  # [P, N, Ha]
        log_probs = torch.stack(logits, dim=2).log_softmax(dim=-1)
        return answers, log_probs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)

    def _read(
        self,
        parameters: Parameters,
        layers: Sequence["_Layer"],
        token: Tensor,
        caches: Sequence[Tensor],
        position: int,
        later: Tensor,
    ) -> Tensor:
        """Return the last layer's output [P, N, D] after one more token [P, N] of every row.

        `later`, [Hp + Ha - 1], is minus infinity after `position` and 0 elsewhere.
        """
        placed = parameters["tokens"] + parameters["positions"][:, position : position + 1]
        hidden = placed.gather(1, token.unsqueeze(-1).expand(-1, -1, self.width))
        members, rows, width = hidden.shape
        for layer, cache in zip(layers, caches, strict=True):
            mixed = layer.mix(hidden).view(members * rows, 3, self.num_heads, -1)
            cache[:, :, :, position] = mixed[:, 1:].transpose(0, 1)
            key, value = cache.flatten(1, 2)  # [P x N x heads, Hp + Ha - 1, d]
            query = mixed[:, 0].reshape(-1, 1, key.shape[-1])
            weight = (torch.bmm(query, key.transpose(1, 2)) + later).softmax(dim=-1)
            attended = torch.bmm(weight, value)
            hidden = layer.finish_in_place(hidden, attended.reshape(members, rows, width))
        return hidden

    def _layers(self, parameters: Parameters) -> list["_Layer"]:
        """Return the layers' weights in the form that needs the fewest operations per token."""
        scale = torch.ones_like(parameters["0.qkv"][0, 0])
        scale[: self.width] /= math.sqrt(self.width / self.num_heads)
        layers = []
        for layer in range(self.num_layers):
            weight = {name: parameters[f"{layer}.{name}"] for name in _Layer._fields}
            attention_norm = parameters[f"{layer}.attention_norm"].transpose(1, 2)  # [P, D, 1]
            weight["qkv"] = attention_norm * weight["qkv"] * scale
            weight["up"] = parameters[f"{layer}.ff_norm"].transpose(1, 2) * weight["up"]
            layers.append(_Layer(**weight))
        return layers

    def _heads(self, mixed: Tensor, groups: int, repeats: int, length: int) -> "_Heads":
        """Return query, key and value, each [groups, heads, repeats, length, D / heads]."""
        mixed = mixed.reshape(groups, repeats, length, 3, self.num_heads, -1)
        return _Heads(*mixed.permute(3, 0, 4, 1, 2, 5))

    def _embed(self, parameters: Parameters, tokens: Tensor, *, start: int) -> Tensor:
        """Return [P, ..., L, D] of tokens [P, ..., L], which stand at `start` and after it."""
        # A product with the one-hot tokens: a gather's backward would add thousands of rows to
        # the few of a small vocabulary one by one.
        known = torch.arange(self.num_tokens, device=tokens.device)
        table = parameters["tokens"]
        one_hot = (tokens.unsqueeze(-1) == known).to(table.dtype)
        embedded = torch.bmm(one_hot.flatten(1, -2), table).view(*tokens.shape, self.width)
        positions = parameters["positions"][:, start : start + tokens.shape[-1]]
        lead = [1] * (tokens.dim() - 2)
        return embedded + positions.view(positions.shape[0], *lead, *positions.shape[1:])


class _Layer(fused_layers.LayerWeights):
    """A layer in plain products."""

    def mix(self, hidden: Tensor) -> Tensor:
        """Return query, key and value, [P, n, 3 D]."""
        return torch.bmm(_normalised(hidden), self.qkv)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream with attention and feed-forward added."""
        hidden = torch.baddbmm(hidden, attended, self.out)
        # In place: the product does not need its result for the gradient.
        return torch.baddbmm(hidden, torch.bmm(_normalised(hidden), self.up).relu_(), self.down)

    def finish_in_place(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add them to `hidden` itself, where nothing is differentiated."""
        hidden.baddbmm_(attended, self.out)
        return hidden.baddbmm_(torch.bmm(_normalised(hidden), self.up).relu_(), self.down)


def _normalised(hidden: Tensor) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)


class _Heads(NamedTuple):
    """What attention works on, each [groups, heads, repeats, length, D / heads]."""

    query: Tensor
    key: Tensor
    value: Tensor


def _attend(own: _Heads, before: _Heads | None = None) -> Tensor:
    """Return causal attention, [groups, repeats, length, heads, D / heads]; the query is scaled.

    Every row sees its own past and all of `before`, which the rows of its group share (one
    repeat). Plain products: fused attention kernels are made for long rows, and are many times
    slower on thousands of rows of ten tokens.
    """
    groups, heads, repeats, length, size = own.query.shape
    query = own.query
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ own.key.transpose(-1, -2)).masked_fill(later, -math.inf)
    if before is None:
        attended = scores.softmax(dim=-1) @ own.value
    else:
        shared = query.reshape(groups, heads, repeats * length, size)
        shared = shared @ before.key.squeeze(2).transpose(-1, -2)
        shared = shared.view(groups, heads, repeats, length, -1)
        weight = torch.cat([shared, scores], dim=-1).softmax(dim=-1)
        # One cut, not two slices: the gradient then comes back in one piece.
        of_shared, of_own = torch.split(weight, [before.key.shape[-2], length], dim=-1)
        past = of_shared.reshape(groups, heads, repeats * length, -1) @ before.value.squeeze(2)
        attended = past.view_as(own.value) + of_own @ own.value
    return attended.permute(0, 2, 3, 1, 4)
