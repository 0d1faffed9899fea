"""What a contender trains on: decisions of P members at once, and their losses.

N = G prompts x A answers rows, T completion tokens. Nothing is read back from the device, so that a
step can be captured in a CUDA graph.

    rewards -> advantages U -> value per unit -> gate -> weight per token -> loss

    L = 1/D * sum over tokens of  weight * loss(log pi(token), U),  D: tokens of the batch, or kept

`loop` makes the same choices with the same gates through the product.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kondo import BaseGate, Choice, Gate, UnbiasedGate, adapters, advantage, sampling, signals
from kondo.lm import BudgetGate
from kondo_lab.models.sampler import Sampled
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.contenders import Contender, PartialDelight, entropy
from kondo_lab.training.gates import DrawnVarianceGate, kept_first, unchecked
from kondo_lab.training.losses import inputs_of

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards; TRL's."""


class Batch(NamedTuple):
    """What P members decide and train on: N rows, T completion tokens."""

    sampled: Sampled
    rewards: Tensor
    """[P, N] float, the answers to one prompt side by side."""
    draws: Draws
    """Of these members, for random choices and for ties between equal rewards."""
    step: int | Tensor
    """Of the draws."""
    group: int
    """A, answers per prompt."""


class Chosen(NamedTuple):
    """What a contender trains on. P members, N rows, T completion tokens."""

    advantages: Tensor
    """[P, N], U of the loss."""
    weight: Tensor
    """[P, N, T], factor of each token's loss; 0 where it is not trained."""
    rows: Tensor | None
    """[P, K] int64, the kept rows first, where their number is fixed by the rate: at most K are
    kept, and the others among them have weight 0. None where it is not, or all rows are trained."""
    tokens_kept: Tensor
    """[P] int64, tokens with a loss."""
    tokens_differentiated: Tensor
    """[P] int64, tokens that must enter a training forward: of each row with a kept token those up
    to its last one, its prompt included, padding not."""
    rows_kept: Tensor
    """[P] int64, rows with a kept token."""


def decide(contender: Contender, batch: Batch, log_probs: Tensor | None = None) -> Chosen:
    """Return what every member trains on, all of them by the same contender's rule.

    Nothing is differentiated, and no number is asked of the device. A kept row drags its prompt
    into the forward: prompts are counted in tokens_differentiated and in the costs of a budget.

    Args:
        contender: the rule.
        batch: of P members.
        log_probs: [P, N, T] float to decide by, of an exact forward; by default the sampler's.
    """
    sampled, rewards, _, _, group = batch
    log_probs = sampled.log_probs if log_probs is None else log_probs
    _check_inputs(log_probs, batch)
    gate, mask, prompt_length = contender.gate, sampled.mask, sampled.prompts.shape[-1]
    advantages = loss_advantages(contender, rewards, group)
    if gate is None:
        return _chosen(advantages, mask, mask.to(log_probs.dtype), None, prompt_length)
    values = values_of(contender, gate, batch, log_probs)
    if contender.unit == "sequence":
        choice = choose_rows(gate, values, batch)
        keep, weight = choice.keep.unsqueeze(2) & mask, choice.weight.unsqueeze(2) * mask
        if isinstance(gate, DrawnVarianceGate) and gate.group is not None:
            advantages = loss_advantages(contender, rewards, group, among=choice.keep)
    else:
        keep, weight = _choose_tokens(gate, values, mask, prompt_length)
    count = fixed_rows(contender, rewards.shape[1], group)
    rows = None if count is None else kept_first(keep.any(dim=2))[:, :count]
    return _chosen(advantages, keep, weight, rows, prompt_length)


def loss(
    contender: Contender,
    new_log_probs: Tensor,
    sampled: Sampled,
    chosen: Chosen,
    *,
    rows: Tensor | None = None,
    unknown: Tensor | None = None,
) -> Tensor:
    """Return each member's loss, [P], differentiable with respect to new_log_probs alone.

    A loss gets what it names among its parameters: old_log_probs or behaviour_log_probs, [n, T] of
    whoever sampled; mask, bool [n, T], what is trained; and members, P, whose rows stand one after
    the other. A row is one answer; outside the mask both kinds of log-probs are 0, so ratios are 1.

    Args:
        contender: the rule.
        new_log_probs: [P, N, T] float, or [P, C, T] of some rows.
        sampled: with the log-probs of the policy that sampled; PG does not look at them.
        chosen: by `decide`.
        rows: [P, C] int64, the rows that new_log_probs stand for, e.g. chosen.rows; None for all.
            They must hold every row with a kept token.
        unknown: bool [P], for whom sampled log-probs are not known: the new ones stand in.
    """
    weight, advantages, old = chosen.weight, chosen.advantages, sampled.log_probs
    if rows is not None:
        weight, advantages, old = (take_rows(part, rows) for part in (weight, advantages, old))
    if new_log_probs.shape != weight.shape:
        raise ValueError(
            f"new_log_probs must have shape {list(weight.shape)}, got {list(new_log_probs.shape)}; "
            f"give rows= if they are those of some rows."
        )
    # What lies outside may be anything, and must not leak.
    trained = weight != 0
    new = torch.where(trained, new_log_probs, 0.0).flatten(0, 1)
    if unknown is not None:
        old = torch.where(unknown[:, None, None], new_log_probs.detach(), old)
    inputs = inputs_of(
        contender.loss,
        dict.fromkeys(
            ("old_log_probs", "behaviour_log_probs"),
            lambda: torch.where(trained, old, 0.0).flatten(0, 1),
        )
        | {
            "mask": lambda: trained.flatten(0, 1),
            "members": lambda: len(weight),
        },
    )
    terms = contender.loss(new, advantages.flatten(), **inputs)
    full = contender.denominator == "full"
    counted = sampled.mask.sum(dim=(1, 2)) if full else chosen.tokens_kept
    return (weight * terms.view_as(weight)).sum(dim=(1, 2)) / counted.clamp(min=1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [P, C, ...] of the rows [P, C] in values [P, N, ...]."""
    index = rows.view(*rows.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*rows.shape, *values.shape[2:]))


def fixed_rows(contender: Contender, num_rows: int, group: int) -> int | None:
    """Return how many rows suffice for a training forward; None where only all of them do."""
    gate = contender.gate
    if isinstance(gate, DrawnVarianceGate) and gate.group is not None:
        return num_rows // group * sampling.count_for(gate.rate, group)
    if contender.kind not in ("top", "variance", "unbiased") or contender.unit == "token":
        return None
    if isinstance(gate, Gate) and adapters.adapter_of(gate).draws:  # each row by a draw of its own
        return None
    return None if math.isnan(contender.rate) else sampling.count_for(contender.rate, num_rows)


def loss_advantages(
    contender: Contender, rewards: Tensor, group: int, *, among: Tensor | None = None
) -> Tensor:
    """Return U of the contender's loss, [P, N]: centred, and for GRPO divided by the group's std.

    Args:
        contender: the rule.
        rewards: [P, N].
        group: A.
        among: [P, N] bool, take mean and std of these rows alone; U is 0 elsewhere.
    """
    if among is None:
        centred = advantage.group_mean(rewards, group)
        if not contender.divided:
            return centred
        centred = centred.reshape(len(rewards), -1, group)
        return (centred / (centred.std(dim=2, keepdim=True) + STD_EPSILON)).flatten(1)
    by_prompt, kept = (values.reshape(len(rewards), -1, group) for values in (rewards, among))
    number = kept.sum(dim=2, keepdim=True)
    mean = torch.where(kept, by_prompt, 0.0).sum(dim=2, keepdim=True) / number.clamp(min=1)
    centred = torch.where(kept, by_prompt - mean, 0.0)
    if contender.divided:
        variance = centred.square().sum(dim=2, keepdim=True) / (number - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return centred.flatten(1)


def choose_rows(gate: BaseGate, values: Tensor, batch: Batch) -> Choice:
    """Return the choice of a gate among whole rows, by what they are worth, [P, N]."""
    sampled, _, draws, step, _ = batch
    if isinstance(gate, BudgetGate):
        gate = gate.for_rows(_with_prompts(sampled.mask, sampled.prompts.shape[-1]))
    drawn = None
    if adapters.adapter_of(gate).draws:
        drawn = draws_of(gate, draws, step, values.shape[1])
    return gate.choose(values, sampled.mask.any(dim=2), drawn)


def draws_of(gate: BaseGate, draws: Draws, step: int | Tensor, num_rows: int) -> Tensor:
    """Return what a gate that draws among rows draws with, [P, N]: one stream per kind of gate."""
    streams = {UnbiasedGate: "unbiased", Gate: "bernoulli"}
    found = (stream for kind, stream in streams.items() if isinstance(gate, kind))
    return draws.uniform(next(found, "variance"), step, num_rows)


def _choose_tokens(
    gate: BaseGate, values: Tensor, mask: Tensor, prompt_length: int
) -> tuple[Tensor, Tensor]:
    """Return keep and weight of tokens, [P, N, T] both, as of rows with their prompts.

    Ties depend on a token's place in the batch, which in the product has prompts.
    """
    whole, inside = (pad(part, (prompt_length, 0)) for part in (values, mask))
    if isinstance(gate, BudgetGate):
        choice = gate.for_rows(_with_prompts(mask, prompt_length)).choose(whole, inside)
    else:
        choice = gate.choose(whole.flatten(1), inside.flatten(1)).reshape(whole.shape)
    return choice.keep[..., prompt_length:], choice.weight[..., prompt_length:]


class _Masks(NamedTuple):
    attention_mask: Tensor
    completion_mask: Tensor


def _with_prompts(mask: Tensor, prompt_length: int) -> _Masks:
    """Return the masks of rows, [P, N, S], that have their prompts before them."""
    real = pad(mask, (prompt_length, 0), value=True)
    return _Masks(real, pad(mask, (prompt_length, 0)))


def values_of(contender: Contender, gate: BaseGate, batch: Batch, log_probs: Tensor) -> Tensor:
    """Return what units are worth: [P, N], or [P, N, T] for tokens."""
    signal, by_row, mask = gate.signal, contender.unit == "sequence", batch.sampled.mask
    if signal is entropy:
        return torch.where(mask, batch.sampled.entropies, 0.0)
    centred = advantage.group_mean(batch.rewards, batch.group)
    if isinstance(signal, PartialDelight):
        return signal.values(log_probs, centred, signal.counts(batch.sampled.completions, mask))
    if signal is signals.uniform:
        shape = (centred if by_row else mask).shape[1:]
        return batch.draws.uniform("priority", batch.step, *shape)
    if by_row and not signals.needs_log_probs(signal):  # a sum over tokens would favour length
        return signal(centred, centred)
    of_rows = signals.known_of(signal).of_sequences if by_row else None
    if of_rows is not None:
        rows = log_probs.detach().flatten(0, 1), centred.flatten()  # members side by side
        of_each: Tensor = of_rows(*rows, mask=mask.flatten(0, 1))
        return of_each.view_as(centred)
    spread = centred.unsqueeze(2).expand_as(log_probs)
    values = unchecked(signal)(log_probs.detach(), spread, mask=mask)
    return values.sum(dim=2) if by_row else values


def _chosen(
    advantages: Tensor, keep: Tensor, weight: Tensor, rows: Tensor | None, prompt_length: int
) -> Chosen:
    place = torch.arange(1, keep.shape[2] + 1, device=keep.device)
    last = torch.where(keep, place, 0).amax(dim=2)
    dragged = last + prompt_length * (last > 0)
    return Chosen(
        advantages=advantages,
        weight=weight,
        rows=rows,
        tokens_kept=keep.sum(dim=(1, 2)),
        tokens_differentiated=dragged.sum(dim=1),
        rows_kept=(last > 0).sum(dim=1),
    )


def _check_inputs(log_probs: Tensor, batch: Batch) -> None:
    mask, rewards, group = batch.sampled.mask, batch.rewards, batch.group
    if log_probs.dim() != 3 or mask.shape != log_probs.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"log_probs and mask must have one shape [P, N, T], mask bool, got "
            f"{list(log_probs.shape)} and {mask.dtype} {list(mask.shape)}."
        )
    if rewards.shape != log_probs.shape[:2]:
        raise ValueError(
            f"rewards must have shape {list(log_probs.shape[:2])}, one per answer, got "
            f"{list(rewards.shape)}."
        )
    if group < 2 or rewards.shape[1] % group:
        raise ValueError(
            f"group must be at least 2 and divide the {rewards.shape[1]} rows, got {group}; it is "
            f"the number of answers to a prompt."
        )
