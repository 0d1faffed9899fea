"""The dense gated loss, written the obvious way: all forward, all backward, masked."""

import torch


def keep_top(delight, mask, rate):
    """Keep round(rate * valid) units of highest delight by sorting a list; no ties expected."""
    flat = delight.double().reshape(-1).tolist()
    valid = [i for i, v in enumerate(mask.reshape(-1).tolist()) if v]
    worth = [i for i in valid if flat[i] != 0]
    count = min(max(1, round(rate * len(valid))), len(worth))
    kept = sorted(worth, key=lambda i: -flat[i])[:count]
    keep = torch.zeros(len(flat), dtype=torch.bool)
    keep[kept] = True
    return keep.reshape(delight.shape)


def unit_delight(log_probs, advantages, mask, unit):
    """Advantage times surprisal per unit, in float64; masked entries are zero."""
    log_probs, advantages = log_probs.detach().double(), advantages.double()
    if log_probs.ndim == 2 and advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(log_probs)
    delight = torch.zeros_like(log_probs)
    delight[mask] = advantages[mask] * -log_probs[mask]
    return delight.sum(1) if unit == "sequence" else delight


def element_keep(log_probs, advantages, mask, unit, rate):
    """Which elements of log_probs a hard rate keeps."""
    unit_mask = mask.any(1) if unit == "sequence" else mask
    keep = keep_top(unit_delight(log_probs, advantages, mask, unit), unit_mask, rate)
    return keep[:, None] & mask if unit == "sequence" else keep


def dense_gated_loss(log_probs, advantages, keep, denominator, weight=None):
    """-sum of weight * U * log pi over kept elements / denominator, on the whole batch."""
    if log_probs.ndim == 2 and advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(log_probs)
    weight = torch.ones_like(log_probs) if weight is None else weight
    return -(weight[keep] * advantages[keep] * log_probs[keep]).sum() / denominator


def gradients(module, loss):
    """Return the gradient of every trained parameter, by name; zeros where there is none."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
