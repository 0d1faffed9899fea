"""Answers of a population, token after token, with a cache of keys and values.

    prompts -> read, once per prompt -> cache, repeated for its answers -> token after token

Every place of an answer is a piece of program of its own, so that attention reads just the filled
part of the cache. The host is not asked for anything, so that all of it can be one CUDA graph.

Shapes: P members, G prompts, N = G * repeats rows (the answers to a prompt stand together), Lp
tokens of a prompt, La of an answer, D width, d width of a head, V tokens of the alphabet.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kondo_lab.models.attend import (
    attend,
    attend_by_products,
    causal_attention,
    causal_products,
    heads,
)
from kondo_lab.models.weights import Weights

Choose = Callable[[int, Tensor], Tensor]
"""(place in the answer, logits [P, N, V]) -> tokens [P, N] int64."""


def generate(
    weights: Weights,
    prompts: Tensor,
    choose: Choose,
    *,
    answer_length: int,
    repeats: int,
) -> None:
    """Read prompts, then what `choose` makes of the logits at every place of the answers.

    Nothing may be differentiated.

    Args:
        weights: of the members; `scaled` ones attend by plain products, for rows of some ten
            tokens.
        prompts: int64 [P, G, Lp].
        choose: called La times; keeps what it wants to know.
        answer_length: La.
        repeats: answers to each prompt.
    """
    length = prompts.shape[-1]
    places = length + answer_length - 1  # the last token is drawn, never read
    hidden, caches = _read_prompts(weights, prompts, places, repeats)
    later = _later(hidden, places) if weights.scaled else [None] * places
    for place in range(answer_length):
        token = choose(place, weights.logits(hidden))
        if place < answer_length - 1:
            hidden = _read(weights, token, caches, length + place, later[length + place])


def _read_prompts(
    weights: Weights, prompts: Tensor, places: int, repeats: int
) -> tuple[Tensor, list[Tensor]]:
    """Read every prompt once.

    Returns:
        The residual stream at its last token, repeated for its answers, [P, N, D]; and every
        layer's cache, [2 (key, value), P * N, heads, places, d].
    """
    own = weights.architecture
    members, groups, length = prompts.shape
    rows, size = members * groups, own.width // own.num_heads
    shape, caches = (2, rows, repeats, own.num_heads, places, size), []
    hidden = weights.embed(prompts, start=0).flatten(1, 2)
    for layer in weights.layers:
        mixed = layer.mix(hidden)
        # Zeros: products also meet the places that are not filled yet, and weigh them with 0.
        cache = hidden.new_zeros(shape)
        past = mixed.view(rows, 1, length, 3, own.num_heads, -1)[:, :, :, 1:]
        cache[..., :length, :] = past.permute(3, 0, 1, 4, 2, 5)
        caches.append(cache.flatten(1, 2))
        if weights.scaled:
            attended = causal_products(heads(mixed, rows, 1, length, own.num_heads))
        else:
            attended = causal_attention(mixed, length, own.num_heads)
        attended = attended.reshape(hidden.shape)
        hidden = layer.finish(hidden, attended, own.activation, out=hidden)
    last = hidden.view(members, groups, length, own.width)[:, :, -1]
    return last.repeat_interleave(repeats, 1), caches


def _read(
    weights: Weights, token: Tensor, caches: list[Tensor], position: int, later: Tensor | None
) -> Tensor:
    """Return the residual stream [P, N, D] after one more token [P, N] of every row.

    `later` hides what comes after it, where attention is by products.
    """
    own = weights.architecture
    placed = weights.tokens + weights.positions[:, position, None]
    hidden = placed.gather(1, token.unsqueeze(-1).expand(-1, -1, own.width))
    for layer, past in zip(weights.layers, caches, strict=True):
        mixed = layer.mix(hidden).view(past.shape[1], 3, own.num_heads, -1)
        past[:, :, :, position] = mixed[:, 1:].transpose(0, 1)
        if later is None:
            key, value = past[:, :, :, : position + 1]
            attended = attend(mixed[:, 0], key, value)
        else:
            key, value = past
            attended = attend_by_products(mixed[:, 0], key, value, later)
        hidden = layer.finish(hidden, attended.view_as(hidden), own.activation, out=hidden)
    return hidden


def _later(like: Tensor, places: int) -> Tensor:
    """Return [places, places]: minus infinity for what comes after a row's place, 0 elsewhere."""
    known = torch.arange(places, device=like.device)
    return torch.where(known > known.unsqueeze(1), -math.inf, 0.0).to(like.dtype)
