"""P networks at once: every parameter has a leading member dimension, every product is batched.

The single-run twins are `kondo_lab.policies.MLP` and `Transformer`: same shapes, same
initialisation (an MLP's where it is "uniform"), same outputs (tested).

Shapes: P members, N rows, D width, K actions, M tokens, G prompts, A answers per prompt,
Hp prompt length, Ha answer length.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kondo_lab.draws import Draws

Parameters = dict[str, Tensor]
"""Name -> [P, ...]."""

Initialisation = Literal["uniform", "lecun normal"]
"""Of an MLP: PyTorch's default, or that of JAX's libraries."""

_TRUNCATED_STD = 0.87962566
"""Standard deviation of a standard normal cut at two."""


class StackedMLP:
    """ReLU networks with two hidden layers over flat inputs.

    | initialisation | weights                                              | biases             |
    |----------------|------------------------------------------------------|--------------------|
    | uniform        | uniform within 1 / sqrt(fan-in)                      | the same           |
    | lecun normal   | normal of variance 1 / fan-in, cut at two deviations | 0                  |
    """

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        *,
        width: int,
        initialisation: Initialisation = "uniform",
    ):
        self.sizes = (num_inputs, width, width, num_actions)
        self.num_actions = num_actions
        self.initialisation = initialisation

    def initialise(self, draws: Draws) -> Parameters:
        """Return fresh parameters."""
        parameters = {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(self.sizes)):
            weight, bias = f"weight {layer}", f"bias {layer}"
            if self.initialisation == "uniform":
                drawn = _uniform(draws, weight, fan_in, fan_out), _uniform(draws, bias, 1, fan_out)
                fresh = tuple(value / math.sqrt(fan_in) for value in drawn)
            else:
                cut = _truncated_normal(draws, weight, fan_in, fan_out)
                fresh = cut, cut.new_zeros(len(cut), 1, fan_out)
            parameters[f"{layer}.weight"], parameters[f"{layer}.bias"] = fresh
        return parameters

    def logits(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Return [P, N, K] of inputs [P, N, D]."""
        hidden = inputs.to(parameters["0.weight"].dtype)
        last = len(self.sizes) - 2
        for layer in range(last + 1):
            weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
            hidden = torch.baddbmm(bias, hidden, weight)
            if layer < last:
                hidden = hidden.relu()
        return hidden

    def shared_logits(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Return [P, N, K] of the same inputs [N, D] for every member."""
        weight = parameters["0.weight"]
        members, fan_in, fan_out = weight.shape
        # One product for all members: repeating the inputs for each would cost P times the memory.
        flat = inputs.to(weight.dtype) @ weight.permute(1, 0, 2).reshape(fan_in, members * fan_out)
        hidden = flat.view(-1, members, fan_out).transpose(0, 1) + parameters["0.bias"]
        for layer in range(1, len(self.sizes) - 1):
            weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
            hidden = torch.baddbmm(bias, hidden.relu(), weight)
        return hidden


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
            "head": _truncated_normal(draws, "head", width, self.num_tokens),
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
                parameters[key] = _truncated_normal(draws, key, *shape)
            parameters[f"{layer}.attention_norm"] = ones.clone()
            parameters[f"{layer}.ff_norm"] = ones.clone()
        return parameters

    def log_prob(self, parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return log pi(answer token | what precedes it), [P, G, A, Ha], differentiable.

        Prompts are [P, G, Hp] int64, answers [P, G, A, Ha] int64.
        """
        members, groups, repeats, length = answers.shape
        prompt_length = prompts.shape[-1]
        asked = self._embed(parameters, prompts, start=0).flatten(1, 2)
        read = answers[..., :-1]  # the last token is predicted, never read
        told = self._embed(parameters, read, start=prompt_length).flatten(1, 3)
        for layer in self._layers(parameters):
            prompt = self._heads(layer.mix(asked), members * groups, 1, prompt_length)
            asked = layer.finish(asked, _attend(prompt).reshape(asked.shape))
            if length > 1:
                answer = self._heads(layer.mix(told), members * groups, repeats, length - 1)
                told = layer.finish(told, _attend(answer, prompt).reshape(told.shape))
        last = asked.view(members, groups, prompt_length, -1)[:, :, -1]
        first = torch.bmm(last, parameters["head"])[:, :, None, None]  # [P, G, 1, 1, M]
        rest = torch.bmm(told, parameters["head"])
        rest = rest.view(members, groups, repeats, length - 1, self.num_tokens)
        logits = torch.cat([first.expand(-1, -1, repeats, -1, -1), rest], dim=3)
        return logits.log_softmax(dim=-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def sample(self, parameters: Parameters, prompts: Tensor, uniform: Tensor) -> Sampled:
        """Draw answers, keys and values of past positions cached.

        The token is argmax(logits + Gumbel noise), an exact draw from the softmax, where the noise
        is made of `uniform`, [P, G, A, Ha, M] in (0, 1). Prompts are [P, G, Hp] int64.
        """
        members, groups, repeats, length, _ = uniform.shape
        prompt_length = self.prompt_length
        layers = self._layers(parameters)
        hidden = self._embed(parameters, prompts, start=0).flatten(1, 2)
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
        gumbel = -torch.log(-torch.log(uniform.flatten(1, 2)))  # [P, N, Ha, M]
        # Every read multiplies all places of the cache and masks those after its own: products of
        # one size, whatever the token.
        places = torch.arange(prompt_length + length - 1, device=prompts.device)
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
        log_probs = log_probs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
        shape = (members, groups, repeats, length)
        return Sampled(answers.view(shape), log_probs.view(shape))

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


class _Layer(NamedTuple):
    """One layer's weights, each [P, in, out].

    The norms' factors are multiplied into `qkv` and `up`, the scale of attention into the query's
    part of `qkv`: once for the weights instead of once for every token.
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

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


def categorical(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return [...] int64 drawn from log_probs [..., K], by inverting the distribution at `uniform`.

    The last step of the cumulated probabilities is taken as their total, so that rounding cannot
    point past the end.
    """
    cumulated = log_probs.exp().cumsum(dim=-1)
    below = cumulated[..., :-1] < (uniform * cumulated[..., -1]).unsqueeze(-1)
    return below.sum(dim=-1)


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


def _uniform(draws: Draws, name: str, *shape: int) -> Tensor:
    """Return [P, *shape], uniform on -1 .. 1."""
    return 2 * draws.uniform(name, 0, *shape) - 1


def _truncated_normal(draws: Draws, name: str, fan_in: int, fan_out: int) -> Tensor:
    """Return [P, fan_in, fan_out]: normal of variance 1 / fan-in, cut at two deviations."""
    low = math.erf(-2 / math.sqrt(2))
    draw = draws.uniform(name, 0, fan_in, fan_out)
    standard = math.sqrt(2) * torch.erfinv(low + (-2 * low) * draw)
    return standard / (_TRUNCATED_STD * math.sqrt(fan_in))
