"""Log-probs, entropy and gradients from all logits at once, in float64."""

import torch


def logits(hidden, weight, bias=None, soft_cap=None, scale=1.0, temperature=1.0):
    """Return [K, V]: linear, then scale, then soft cap, then temperature."""
    found = hidden.double() @ weight.double().T
    if bias is not None:
        found = found + bias.double()
    found = found * scale
    if soft_cap is not None:
        found = soft_cap * torch.tanh(found / soft_cap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().reshape(-1, 1)
    return found / temperature


def token_log_probs(hidden, weight, targets, **options):
    every = logits(hidden, weight, **options).log_softmax(dim=1)
    return every.gather(1, targets.unsqueeze(1)).squeeze(1)


def token_entropy(hidden, weight, **options):
    log_probs = logits(hidden, weight, **options).log_softmax(dim=1)
    probs = log_probs.exp()
    return -torch.where(probs > 0, probs * log_probs, 0.0).sum(dim=1)


def gradients(hidden, weight, targets, upstream, *, bias=None, **options):
    """Return the gradients of sum(upstream * log-probs): of hidden, weight and, if given, bias."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    if bias is not None:
        options["bias"] = bias.detach().double().requires_grad_()
        leaves.append(options["bias"])
    found = token_log_probs(leaves[0], leaves[1], targets, **options)
    return torch.autograd.grad((upstream.double() * found).sum(), leaves)
