"""One small transformer, token by token, from its equations; torch alone."""

import math

import torch


def log_softmax(
    weights,
    ids,
    *,
    num_layers,
    num_heads,
    activation="gelu",
    final_norm=True,
    rows_of_head="[V, D]",
):
    """Return log pi(next token | tokens so far) after each of ids [T], [T, V].

    weights: name -> [in, out] of a layer; tokens and positions [rows, D], the head as said; factors
    of norms [1, D], where there are any.
    """
    stream = [weights["tokens"][token] + weights["positions"][t] for t, token in enumerate(ids)]
    for layer in range(num_layers):
        start = f"{layer}."
        own = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
        stream = [
            _finish(own, hidden, attended, activation)
            for hidden, attended in zip(stream, _attend(own, stream, num_heads), strict=True)
        ]
    head = weights["head"].T if rows_of_head == "[V, D]" else weights["head"]
    logits = torch.stack([(_norm(hidden) if final_norm else hidden) @ head for hidden in stream])
    return logits - logits.exp().sum(dim=-1, keepdim=True).log()


def _norm(hidden, factors=1.0):
    centred = hidden - hidden.mean()
    return factors * centred / (centred.square().mean() + 1e-6).sqrt()


def _attend(own, stream, num_heads):
    size = len(stream[0]) // num_heads
    factors = own.get("attention_norm", torch.ones(1, len(stream[0])))[0]
    mixed = torch.stack([_norm(hidden, factors) @ own["qkv"] for hidden in stream])
    query, key, value = mixed.chunk(3, dim=1)
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


def _finish(own, hidden, attended, activation):
    hidden = hidden + attended @ own["out"]
    factors = own.get("ff_norm", torch.ones(1, len(hidden)))[0]
    wide = _norm(hidden, factors) @ own["up"]
    if activation == "relu":
        return hidden + wide.clamp(min=0) @ own["down"]
    cubic = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return hidden + (0.5 * wide * (1 + cubic.tanh())) @ own["down"]
