"""GRPO's losses the obvious way: every row forward and backward, what is skipped masked afterwards.

A micro-batch is a dict: prompt_ids, prompt_mask [b, P], completion_ids, completion_mask [b, T],
advantages [b], keep [b, T]; weight (of the advantage), gate_weight (of all terms), tool_mask, old,
ref [b, T] and correction, the sampler's importance ratio, [b, T] or [b, 1], where there are any;
sampling, the sampler's log-probs, [b, T], NaN for tokens that it did not score.
`tokens`: all that count in an optimizer step, for the losses that divide by them. `micro_tokens`,
[b]: those of the micro-batch that each row is counted in, where that is another than this.
"""

import math

import torch


def log_probs_and_entropy(model, micro, temperature):
    """Log-prob and entropy of the completion tokens, [b, T], through plain logits."""
    ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
    mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits.float() / temperature
    num_prompt = micro["prompt_ids"].shape[1]
    logs = logits[:, num_prompt - 1 : -1].log_softmax(-1)
    taken = logs.gather(-1, micro["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return taken, -(logs.exp() * logs).sum(-1)


def counted(micro):
    """Tokens that count, [b, T] float."""
    mask = micro["completion_mask"]
    return (mask * micro["tool_mask"] if "tool_mask" in micro else mask).float()


def sequence_weights(log_probs, micro, cap):
    """min(product over a row of pi / mu, cap), [b, 1], by row and token; mu sampled the row."""
    found = []
    for row, counts in enumerate(counted(micro).tolist()):
        behaviour = micro.get("sampling", micro.get("old"))[row].tolist()
        product = 1.0
        for ours, theirs, count in zip(log_probs[row].tolist(), behaviour, counts, strict=True):
            known = count and not math.isnan(theirs)
            product *= math.exp(ours - theirs) if known else 1.0
        found.append(min(product, cap))
    return torch.tensor(found).unsqueeze(1)


def token_losses(kind, log_probs, micro, *, level="token", epsilon=0.2, beta=0.0, cap=None):
    """Policy loss and KL penalty of each token, [b, T]; with a cap, by sequence weights."""
    mask = counted(micro)
    if cap is not None:
        weights = sequence_weights(log_probs.detach(), micro, cap)
        # At a ratio of 1, whose gradient is that of the log-prob.
        one = (log_probs - log_probs.detach()).exp()
        loss = -weights * micro["advantages"].unsqueeze(1) * micro.get("weight", 1.0) * one
        gap = micro["ref"] - log_probs if beta else torch.zeros_like(log_probs)
        return loss + beta * (gap.exp() - gap - 1)
    old = micro.get("old")
    old = log_probs.detach() if old is None else old
    log_ratio = log_probs - old
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.expand_as(log_probs)
    ratio = log_ratio.exp()
    advantages = micro["advantages"].unsqueeze(1)
    if "weight" in micro:
        advantages = advantages * micro["weight"]
    if kind == "cispo":
        loss = -ratio.clamp(max=epsilon).detach() * advantages * log_probs
    elif kind == "sapo":
        heat = torch.where(advantages > 0, 1.0, 1.05)
        loss = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
    elif kind == "vespo":
        total = ((log_probs - old).detach() * mask).sum(1, keepdim=True)
        power = torch.where(advantages >= 0, 2.0, 3.0)
        decay = torch.where(advantages >= 0, 3.0, 2.0)
        loss = -(decay + power * total - decay * total.exp()).exp() * advantages * log_probs
    else:
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if "correction" in micro and kind != "vespo":
        loss = loss * micro["correction"]
    if beta:
        gap = micro["ref"] - log_probs
        loss = loss + beta * (gap.exp() - gap - 1) * ratio
    return loss


def gated_loss(
    kind,
    model,
    micros,
    *,
    max_length,
    temperature=1.0,
    entropy_coef=0.0,
    one_entropy=True,
    **options,
):
    """One optimizer step's loss: numerators over kept tokens, denominators over all.

    `one_entropy`: the entropy is a mean over each micro-batch, whatever the loss divides by.
    """
    total = 0.0
    for micro in micros:
        log_probs, entropy = log_probs_and_entropy(model, micro, temperature)
        mask = counted(micro)
        kept = micro["keep"] * mask
        weight = micro.get("gate_weight", torch.ones_like(mask))
        loss = token_losses(kind, log_probs, micro, **options) * weight
        loss = torch.where(kept > 0, loss, 0.0)
        rows = mask.shape[0] * len(micros)
        tokens = micro.get("micro_tokens", mask.sum()).clamp(min=1)
        if kind in ("grpo", "sapo"):
            total = total + (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows
        elif kind == "bnpo":
            total = total + (loss.sum(1) / tokens).sum() / len(micros)
        elif kind == "dr_grpo":
            total = total + loss.sum() / (rows * max_length)
        elif kind == "luspo":
            total = total + loss.sum() / rows
        else:
            total = total + loss.sum() / micro["tokens"]
        bonus = entropy_coef * (entropy * kept * weight).sum(1)
        if one_entropy or kind not in ("cispo", "dapo", "vespo"):
            total = total - (bonus / tokens).sum() / len(micros)
        else:
            total = total - bonus.sum() / micro["tokens"]
    return total


def gradient_sizes(model, micro, unit, *, temperature=1.0, beta=0.0):
    """|factor of grad log pi| (1 - pi) of each token, [b, T], or its norm over each row, [b]."""
    with torch.no_grad():
        log_probs, _ = log_probs_and_entropy(model, micro, temperature)
    log_probs.requires_grad_()
    mask = counted(micro)
    losses = token_losses("grpo", log_probs, {**micro, "old": log_probs.detach()}, beta=beta)
    (factors,) = torch.autograd.grad((losses * mask).sum(), log_probs)
    sizes = factors.abs() * (1 - log_probs.detach().exp())
    return sizes if unit == "token" else sizes.square().sum(1).sqrt()
