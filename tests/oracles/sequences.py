"""Capped importance weights of whole sequences, with plain numbers and loops."""

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


def sequence_loss(log_probs, advantages, behaviour, mask, cap, keep, denominator):
    """-sum over kept tokens of weight * U * log pi / denominator, on the whole batch."""
    weights = sequence_weights(log_probs, behaviour, mask, cap).to(log_probs.dtype)
    terms = -(weights * advantages)[:, None] * torch.where(keep, log_probs, 0.0)
    return terms.sum() / denominator
