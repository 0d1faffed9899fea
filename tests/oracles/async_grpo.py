"""TRL's asynchronous GRPO loss the obvious way: every sample alone, what is skipped weighted 0."""

import torch


def log_probs(model, ids, temperature=1.0):
    """Log-prob of every token after the first, [T - 1]."""
    logits = model(input_ids=torch.as_tensor(ids)[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.as_tensor(ids)[1:, None])[:, 0]


def loss(model, micros, epsilon=0.2):
    """Mean over micro-batches of (weighted clipped losses) / (tokens of all samples).

    `micros`: lists of (sample, weight); a sample is a dict of input_ids, completion_mask,
    old_log_probs, [T] arrays, and advantage.
    """
    total = 0.0
    for micro in micros:
        tokens = sum(float(sample["completion_mask"][1:].sum()) for sample, _ in micro)
        for sample, weight in micro:
            ours = log_probs(model, sample["input_ids"])
            ratio = (ours - torch.as_tensor(sample["old_log_probs"][1:])).exp()
            advantage, mask = sample["advantage"], torch.as_tensor(sample["completion_mask"][1:])
            clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
            each = -torch.minimum(ratio * advantage, clipped * advantage) * mask
            total = total + weight * each.sum() / tokens / len(micros)
    return total
