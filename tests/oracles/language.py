"""One small transformer, token by token, from its equations; torch alone."""

import math

import torch


def log_softmax(weights, ids, *, num_layers, num_heads):
    """Return log pi(next token | tokens so far) after each of ids [T], [T, V].

    weights: name -> [in, out] of a layer; tokens, positions and head [rows, D].
    """
    stream = [weights["tokens"][token] + weights["positions"][t] for t, token in enumerate(ids)]
    for layer in range(num_layers):
        own = {name: weights[f"{layer}.{name}"] for name in ("qkv", "out", "up", "down")}
        stream = [
            _finish(own, hidden, attended)
            for hidden, attended in zip(stream, _attend(own["qkv"], stream, num_heads), strict=True)
        ]
    logits = torch.stack([_norm(hidden) @ weights["head"].T for hidden in stream])
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


def _norm(hidden):
    centred = hidden - hidden.mean()
    return centred / (centred.square().mean() + 1e-6).sqrt()


def _attend(qkv, stream, num_heads):
    size = len(stream[0]) // num_heads
    query, key, value = torch.stack([_norm(hidden) @ qkv for hidden in stream]).chunk(3, dim=1)
    attended = []
    for t in range(len(stream)):
        heads = []
        for head in range(num_heads):
            own = slice(head * size, (head + 1) * size)
            scores = key[: t + 1, own] @ query[t, own] / math.sqrt(size)
            weight = scores.exp() / scores.exp().sum()
            heads.append(weight @ value[: t + 1, own])
        attended.append(torch.cat(heads))
    return attended


def _finish(own, hidden, attended):
    hidden = hidden + attended @ own["out"]
    wide = _norm(hidden) @ own["up"]
    cubic = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return hidden + (0.5 * wide * (1 + cubic.tanh())) @ own["down"]
