"""Weights of whole sequences, by importance or by delight, with plain numbers and loops."""

import math

import torch


def sequence_weights(log_probs, behaviour, mask, cap):
    """min(product over a row's tokens that count of pi / mu, cap), [N], as constants."""
    found = []
    for ours, theirs, counts in zip(
        log_probs.detach().double().tolist(),
        behaviour.double().tolist(),
        mask.tolist(),
        strict=True,
    ):
        pairs = zip(ours, theirs, counts, strict=True)
        total = sum(our - their for our, their, count in pairs if count)
        found.append(cap if total > math.log(cap) else math.exp(total))
    return torch.tensor(found, dtype=torch.float64)


def delight_weights(log_probs, advantages, mask, eta):
    """sigmoid(sum over a row's tokens that count of -U log pi / eta), [N], as constants.

    Advantages are [N], or [N, T] of each token.
    """
    found = []
    for ours, own, counts in zip(
        log_probs.detach().double().tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        each = own if isinstance(own, list) else [own] * len(ours)
        terms = zip(ours, each, counts, strict=True)
        total = sum(-advantage * our for our, advantage, count in terms if count)
        found.append(1 / (1 + math.exp(-total / eta)))
    return torch.tensor(found, dtype=torch.float64)


def sequence_loss(log_probs, advantages, behaviour, mask, cap, keep, denominator):
    """-sum over kept tokens of weight * U * log pi / denominator, on the whole batch."""
    weights = sequence_weights(log_probs, behaviour, mask, cap).to(log_probs.dtype)
    return weighted_loss(log_probs, advantages, weights, keep, denominator)


def weighted_loss(log_probs, advantages, weights, keep, denominator):
    """The same with given weights, [N]."""
    terms = -(weights * advantages)[:, None] * torch.where(keep, log_probs, 0.0)
    return terms.sum() / denominator
