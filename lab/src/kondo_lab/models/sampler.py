"""Completions of a population, with the log-probs they were drawn with.

    prompts -> prefill, once per prompt -> cache, repeated for its completions -> token after token

The token is argmax(logits + Gumbel noise), an exact draw from the softmax. A completion is real up
to its END; after it everything is PAD, and the mask is False. Every place of a completion is a
piece of program of its own, so that attention reads just the filled part of the cache. The host is
not asked whether all rows have ended, so that a whole generation can be one CUDA graph.

Shapes: P members, G prompts, N = G * repeats rows (the completions of a prompt stand together),
Lp tokens of a prompt, La of a completion.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kondo_lab.models.attend import attend
from kondo_lab.models.language_model import (
    ATTENTION,
    StackedLM,
    Weights,
    causal_attention,
    entropy,
    logits_of,
    pick,
)
from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import END, PAD


class Sampled(NamedTuple):
    """Completions, and what the policy thought of them when it drew them."""

    tokens: Tensor
    """int64 [P, N, Lp + La]: prompts and completions, what `StackedLM.log_prob` reads."""
    log_probs: Tensor
    """[P, N, La] in the head's dtype; 0 after the END."""
    entropies: Tensor
    """[P, N, La]: of the distribution at each token; 0 after the END."""
    mask: Tensor
    """bool [P, N, La]: the policy drew this token, END included."""

    @property
    def prompts(self) -> Tensor:
        """int64 [P, N, Lp]."""
        return self.tokens[..., : -self.mask.shape[-1]]

    @property
    def completions(self) -> Tensor:
        """int64 [P, N, La]."""
        return self.tokens[..., -self.mask.shape[-1] :]


@torch.no_grad()
def sample(
    model: StackedLM,
    parameters: Parameters,
    prompts: Tensor,
    *,
    repeats: int = 1,
    draws: Draws | None = None,
    step: int | Tensor = 0,
    stream: str = "completions",
    temperature: Tensor | None = None,
) -> Sampled:
    """Draw `repeats` completions of every prompt.

    Args:
        model: of the members.
        parameters: of P members.
        prompts: int64 [P, G, Lp].
        repeats: completions per prompt.
        draws: random sources of the members; None takes the likeliest token each time (greedy).
        step: when, for the draws; a 0-d tensor stays on the device.
        stream: which numbers of the draws to take.
        temperature: [P] > 0: members draw from softmax(logits / temperature), and log-probs and
            entropies are those of this distribution. None is 1.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> from kondo_lab.models.language_model import StackedLM
        >>> from kondo_lab.models.sampler import sample
        >>> model = StackedLM("toy", prompt_length=3, answer_length=4, num_tokens=10)
        >>> draws = Draws([0, 1])
        >>> prompts = draws.integers("prompts", 0, 10, 6, 3)
        >>> sampled = sample(model, model.initialise(draws), prompts, repeats=2, draws=draws)
        >>> sampled.tokens.shape, sampled.log_probs.shape
        (torch.Size([2, 12, 7]), torch.Size([2, 12, 4]))
    """
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1 completions per prompt, got {repeats}.")
    if prompts.dim() != 3 or prompts.shape[-1] != model.prompt_length:
        raise ValueError(
            f"prompts must have shape [members, prompts, {model.prompt_length}], got "
            f"{list(prompts.shape)}."
        )
    with sdpa_kernel(ATTENTION):
        weights = model.weights(parameters)
        drawn = _generate(model, weights, prompts, repeats, draws, step, stream, temperature)
    asked = prompts.repeat_interleave(repeats, 1)
    return drawn._replace(tokens=torch.cat([asked, drawn.tokens], dim=2))


def _generate(
    model: StackedLM,
    weights: Weights,
    prompts: Tensor,
    repeats: int,
    draws: Draws | None,
    step: int | Tensor,
    stream: str,
    temperature: Tensor | None,
) -> Sampled:
    """Return what was drawn, the prompts not yet before it."""
    hidden, cache = _prefill(model, weights, prompts, repeats)
    alive = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    tokens, log_probs, entropies, mask = [], [], [], []
    for place in range(model.answer_length):
        logits = logits_of(hidden, weights.head)
        if temperature is not None:
            logits = logits / temperature[:, None, None]
        log_softmax = logits.log_softmax(dim=-1)
        scores = log_softmax
        if draws is not None:
            scores = scores + _gumbel(draws, f"{stream} {place}", step, *scores.shape[1:])
        token = torch.where(alive, scores.argmax(dim=-1), PAD)
        chosen = log_softmax.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        tokens.append(token)
        log_probs.append(torch.where(alive, chosen, 0.0))
        entropies.append(torch.where(alive, entropy(log_softmax), 0.0))
        mask.append(alive)
        if place < model.answer_length - 1:
            alive = alive & (token != END)
            hidden = _read(model, weights, token, cache, model.prompt_length + place)
    return Sampled(*(torch.stack(parts, 2) for parts in (tokens, log_probs, entropies, mask)))


def completion_mask(completions: Tensor) -> Tensor:
    """Return bool like completions [..., La]: True up to their first END, which counts itself.

    Example:
        >>> import torch
        >>> from kondo_lab.models.sampler import completion_mask
        >>> completion_mask(torch.tensor([[5, 7, 1, 0], [5, 7, 6, 9]])).int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    ends = (completions == END).long()
    return ends.cumsum(dim=-1) == ends


def _prefill(
    model: StackedLM, weights: Weights, prompts: Tensor, repeats: int
) -> tuple[Tensor, Tensor]:
    """Read every prompt once.

    Returns:
        The residual stream at its last token, repeated for its completions, [P, N, D]; and the
        cache, [layers, 2 (key, value), P * N, heads, Lp + La - 1, D / heads].
    """
    members, groups, length = prompts.shape
    width, num_layers, num_heads = model.size
    places = length + model.answer_length - 1  # the last token is drawn, never read
    shape = (num_layers, 2, members * groups, repeats, num_heads, places, width // num_heads)
    cache = weights.tokens.new_empty(shape)
    hidden = pick(weights.tokens, prompts.flatten(1)).view(members, groups, length, width)
    hidden = (hidden + weights.positions[:, None, :length]).flatten(1, 2)
    for number, layer in enumerate(weights.layers):
        mixed = layer.mix(hidden)
        past = mixed.view(members * groups, 1, length, 3, num_heads, -1)[:, :, :, 1:]
        cache[number, ..., :length, :] = past.permute(3, 0, 1, 4, 2, 5)
        hidden = layer.finish(hidden, causal_attention(mixed, length, num_heads))
    last = hidden.view(members, groups, length, width)[:, :, -1]
    return last.repeat_interleave(repeats, 1), cache.flatten(2, 3)


def _read(
    model: StackedLM, weights: Weights, token: Tensor, cache: Tensor, position: int
) -> Tensor:
    """Return the residual stream [P, N, D] after one more token [P, N] of every row."""
    placed = weights.tokens + weights.positions[:, position, None]
    hidden = placed.gather(1, token.unsqueeze(-1).expand(-1, -1, model.size.width))
    for layer, own in zip(weights.layers, cache, strict=True):
        mixed = layer.mix(hidden).view(own.shape[1], 3, model.size.num_heads, -1)
        own[:, :, :, position] = mixed[:, 1:].transpose(0, 1)
        key, value = own[:, :, :, : position + 1]
        hidden = layer.finish(hidden, attend(mixed[:, 0], key, value).view_as(hidden))
    return hidden


def _gumbel(draws: Draws, stream: str, step: int | Tensor, rows: int, num_tokens: int) -> Tensor:
    return draws.uniform(stream, step, rows, num_tokens).log_().neg_().log_().neg_()
