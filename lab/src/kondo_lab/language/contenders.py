"""Contenders: ways to spend a learner step on sampled answers, and what each would train on.

P members decide at once: N = G prompts x A answers rows, T completion tokens. Nothing is read back
from the device, so that a step can be captured in a CUDA graph.

    rewards -> advantages U -> priority per unit -> gate -> weight per token -> loss

    L = 1/D * sum over tokens of  weight * loss(log pi(token), U),  D: tokens of the batch, or kept

All contenders sum over tokens and divide by a number of tokens, so that they differ in what they
choose and in their loss, and in nothing else. `loop` makes the same choices through the product,
with `kondo.Gate` and `kondo.lm.backward`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kondo.core import losses
from kondo.core.rules import count_for
from kondo_lab.draws import Draws
from kondo_lab.language.selection import buy, most_variance, top
from kondo_lab.population import choice_old as choice

LossName = Literal["pg", "grpo"]
GateName = Literal["dense", "soft", "top", "filter", "variance", "budget"]
PriorityName = Literal[
    "delight", "abs_delight", "advantage", "abs_advantage", "surprisal", "entropy", "uniform"
]

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards; TRL's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to update a language model on N answers. The defaults are dense PG.

    | gate       | trains on                                                                    |
    |------------|------------------------------------------------------------------------------|
    | `dense`    | everything, weight 1                                                         |
    | `soft`     | everything, weight sigmoid(delight / eta): DG                                |
    | `top`      | the round(rate * units) units of highest priority, as `kondo.Gate(rate=...)` |
    | `filter`   | answers to prompts whose rewards differ: U is not 0                          |
    | `variance` | the round(rate * rows) rows whose rewards vary most: PODS; see `scope`       |
    | `budget`   | what buys most delight for rate * all tokens, as `kondo.lm.budget`           |

    Example:
        >>> from kondo_lab.language.contenders import Contender
        >>> Contender(name="DG-K 3%", gate="top", rate=0.03).priority
        'delight'
    """

    name: str
    """As in the figures' legends."""
    loss: LossName = "pg"
    """Either "pg", -U log pi, U the reward minus its group's mean; or "grpo", PPO's clipped loss,
    its U also divided by the group's standard deviation. Delight is that of the undivided U."""
    gate: GateName = "dense"
    priority: PriorityName = "delight"
    """Of the `top` gate: what units are ranked by."""
    unit: Literal["sequence", "token"] = "sequence"
    """What is gated. A sequence's delight and surprisal are the sums of its tokens'; its advantage
    is its own."""
    rate: float = 1.0
    """Share of the units kept; of the `budget` gate, tokens differentiated / all, prompts included
    in both."""
    eta: float = 1.0
    """Temperature of the `soft` gate."""
    denominator: Literal["full", "kept"] = "full"
    """D: the tokens of the whole batch, as for dense, or the kept ones."""
    screen: Literal["free", "exact"] = "free"
    """Whose log-probs are decided by: the sampler's, or those of a forward without a graph."""
    clip: float = 0.2
    """Of the clipped loss."""
    scope: Literal["batch", "group"] = "batch"
    """Of the `variance` gate. "group" is PODS as published: of each prompt's A answers the
    round(rate * A) whose rewards vary most, at least two, and U from these alone. "batch" is for
    rates at which that is less than two: of all N rows those whose rewards, less their group's
    mean, vary most, and U from the whole group. Rewards of 0 and 1 give half successes and half
    failures, as far as there are any. Rows with U = 0 have no gradient, and are not paid for."""

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {self.rate}; 0.03 keeps 3%.")
        if not self.eta > 0:
            raise ValueError(f"eta must be > 0, got {self.eta}; a hard gate is gate='top'.")
        if not self.clip > 0:
            raise ValueError(f"clip must be > 0, got {self.clip}; infinite means no clipping.")
        if self.rate < 1 and self.gate in ("dense", "soft", "filter"):
            raise ValueError(
                f"rate must be 1 for gate {self.gate!r}, which has no rate, got {self.rate}; use "
                f"'top', 'variance' or 'budget'."
            )
        if self.priority != "delight" and self.gate != "top":
            raise ValueError(
                f"priority must be 'delight' for gate {self.gate!r}, which ranks by nothing else, "
                f"got {self.priority!r}; use gate='top'."
            )
        if self.priority == "entropy" and self.unit != "token":
            raise ValueError(
                "unit must be 'token' for the priority 'entropy', which is a token's, got "
                "'sequence'."
            )
        if self.gate in ("filter", "variance") and self.unit != "sequence":
            raise ValueError(
                f"unit must be 'sequence' for gate {self.gate!r}: rewards are those of whole "
                f"answers; got {self.unit!r}."
            )
        if self.scope != "batch" and self.gate != "variance":
            raise ValueError(
                f"scope must be 'batch' for gate {self.gate!r}, got {self.scope!r}; only "
                f"'variance' chooses within groups."
            )


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
    to its last one, its prompt included (see `decide`), padding not."""
    rows_kept: Tensor
    """[P] int64, rows with a kept token."""


def decide(
    contender: Contender,
    log_probs: Tensor,
    rewards: Tensor,
    mask: Tensor,
    draws: Draws,
    step: int | Tensor,
    group: int,
    entropies: Tensor | None = None,
    *,
    prompt_length: int,
) -> Chosen:
    """Return what every member trains on, all of them by the same contender's rule.

    Nothing is differentiated, and no number is asked of the device.

    Args:
        contender: the rule.
        log_probs: [P, N, T] float, the screen's: the sampler's own, or of an exact forward.
        rewards: [P, N] float, the answers to one prompt side by side.
        mask: [P, N, T] bool, a sampled token; a row's come first, END included.
        draws: of these members, for random choices and for ties between equal rewards.
        step: of the draws.
        group: A, answers per prompt.
        entropies: [P, N, T] float of the distribution each token was drawn from; the priority
            "entropy" needs them.
        prompt_length: prompt tokens of every row, which a kept row drags into the forward: counted
            in tokens_differentiated and in the costs of the budget.
    """
    _check_inputs(contender, log_probs, rewards, mask, group, entropies)
    centred = centred_advantages(rewards, group)
    advantages = loss_advantages(contender, rewards, group)
    if contender.gate == "soft":
        chi = _units(contender, choice.delight(_known(log_probs, mask), centred.unsqueeze(2)))
        soft = torch.sigmoid(chi / contender.eta)
        soft = soft.unsqueeze(2) if contender.unit == "sequence" else soft
        return _chosen(advantages, mask, soft * mask, None, prompt_length)
    if contender.gate == "variance":
        rows_kept = vary_most(contender, rewards, draws, step, group)
        if contender.scope == "group":
            advantages = loss_advantages(contender, rewards, group, among=rows_kept)
        keep = rows_kept.unsqueeze(2) & mask
    else:
        keep = _keep(
            contender, log_probs, centred, mask, draws, step, entropies, prompt_length=prompt_length
        )
    count = fixed_rows(contender, rewards.shape[1], group)
    rows = None if count is None else choice.kept_first(keep.any(dim=2))[:, :count]
    return _chosen(advantages, keep, keep.to(log_probs.dtype), rows, prompt_length)


def loss(
    contender: Contender,
    new_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    chosen: Chosen,
    mask: Tensor,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Return each member's loss, [P], differentiable with respect to new_log_probs alone.

    Args:
        contender: the rule.
        new_log_probs: [P, N, T] float, or [P, C, T] of some rows.
        behaviour_log_probs: [P, N, T] float of the policy that sampled; "pg" does not look at them.
        chosen: by `decide`.
        mask: [P, N, T] bool.
        rows: [P, C] int64, the rows that new_log_probs stand for, e.g. chosen.rows; None for all.
            They must hold every row with a kept token.
    """
    weight, advantages, old = chosen.weight, chosen.advantages, behaviour_log_probs
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
    if contender.loss == "pg":
        terms = losses.pg(new, advantages.flatten())
    else:
        old = torch.where(trained, old, 0.0).flatten(0, 1)
        terms = losses.ppo(new, advantages.flatten(), old, clip=contender.clip)
    counted = mask.sum(dim=(1, 2)) if contender.denominator == "full" else chosen.tokens_kept
    return (weight * terms.view_as(weight)).sum(dim=(1, 2)) / counted.clamp(min=1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [P, C, ...] of the rows [P, C] in values [P, N, ...]."""
    index = rows.view(*rows.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*rows.shape, *values.shape[2:]))


def fixed_rows(contender: Contender, num_rows: int, group: int) -> int | None:
    """Return how many rows suffice for a training forward; None where only all of them do."""
    if contender.gate == "top" and contender.unit == "sequence" and contender.rate < 1:
        return count_for(contender.rate, num_rows)
    if contender.gate == "variance":
        if contender.scope == "batch":
            return count_for(contender.rate, num_rows)
        return num_rows // group * _per_group(contender, group)
    return None


def centred_advantages(rewards: Tensor, group: int) -> Tensor:
    """Return U = R - mean(R of the same prompt's answers), [P, N]: `kondo.advantage.group_mean`."""
    by_prompt = rewards.reshape(len(rewards), -1, group)
    # Measured from the lowest, equal rewards leave exactly nothing.
    above = by_prompt - by_prompt.amin(dim=2, keepdim=True)
    return (above - above.mean(dim=2, keepdim=True)).flatten(1)


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
        centred = centred_advantages(rewards, group)
        if contender.loss == "pg":
            return centred
        centred = centred.reshape(len(rewards), -1, group)
        return (centred / (centred.std(dim=2, keepdim=True) + STD_EPSILON)).flatten(1)
    by_prompt, kept = (values.reshape(len(rewards), -1, group) for values in (rewards, among))
    number = kept.sum(dim=2, keepdim=True)
    mean = torch.where(kept, by_prompt, 0.0).sum(dim=2, keepdim=True) / number.clamp(min=1)
    centred = torch.where(kept, by_prompt - mean, 0.0)
    if contender.loss == "grpo":
        variance = centred.square().sum(dim=2, keepdim=True) / (number - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return centred.flatten(1)


def vary_most(
    contender: Contender, rewards: Tensor, draws: Draws, step: int | Tensor, group: int
) -> Tensor:
    """Return the rows of the `variance` gate, [P, N] bool; see `Contender.scope`."""
    num_rows = rewards.shape[1]
    ties = draws.uniform("variance", step, num_rows)
    centred = centred_advantages(rewards, group)
    if contender.scope == "batch":
        parts, count = 1, count_for(contender.rate, num_rows)
    else:
        parts, count = num_rows // group, _per_group(contender, group)
    values, lots = (each.reshape(len(rewards), parts, -1) for each in (centred, ties))
    return most_variance(values, count, lots).flatten(1) & (centred != 0)


def _per_group(contender: Contender, group: int) -> int:
    count = round(contender.rate * group)
    if count < 2:
        raise ValueError(
            f"rate must buy at least two answers of every group of {group} for scope 'group', got "
            f"{contender.rate}; one answer has no variance: use scope='batch'."
        )
    return count


def _keep(
    contender: Contender,
    log_probs: Tensor,
    centred: Tensor,
    mask: Tensor,
    draws: Draws,
    step: int | Tensor,
    entropies: Tensor | None,
    *,
    prompt_length: int,
) -> Tensor:
    """Return the kept tokens of the gates that look at no reward but through U, [P, N, T] bool."""
    match contender.gate:
        case "dense":
            return mask
        case "filter":
            return (centred != 0).unsqueeze(2) & mask
        case "budget":
            chi = choice.delight(_known(log_probs, mask), centred.unsqueeze(2))
            return buy(_units(contender, chi), mask, contender.rate, prompt_length)
    priority = _priority(contender, log_probs, centred, mask, draws, step, entropies)
    if contender.unit == "sequence":
        return top(priority, mask.any(dim=2), contender.rate).unsqueeze(2) & mask
    # Ties fall as in `kondo.Gate` on whole rows, prompts included.
    _, num_rows, length = mask.shape
    corner = torch.arange(num_rows, device=mask.device).unsqueeze(1) * (prompt_length + length)
    position = corner + prompt_length + torch.arange(length, device=mask.device)
    kept = top(priority.flatten(1), mask.flatten(1), contender.rate, position=position.flatten())
    return kept.view_as(mask)


def _priority(
    contender: Contender,
    log_probs: Tensor,
    centred: Tensor,
    mask: Tensor,
    draws: Draws,
    step: int | Tensor,
    entropies: Tensor | None,
) -> Tensor:
    """Return [P, N], or [P, N, T] for tokens."""
    known = _known(log_probs, mask)
    spread = centred if contender.unit == "sequence" else centred.unsqueeze(2).expand_as(known)
    match contender.priority:
        case "delight":
            return _units(contender, choice.delight(known, centred.unsqueeze(2)))
        case "abs_delight":
            return _units(contender, choice.delight(known, centred.unsqueeze(2)).abs())
        case "surprisal":
            return _units(contender, (-known).clamp_min(0))
        case "advantage":
            return spread
        case "abs_advantage":
            return spread.abs()
        case "uniform":
            return draws.uniform("priority", step, *spread.shape[1:])
        case "entropy":
            assert entropies is not None  # checked at the entry
            return entropies


def _units(contender: Contender, per_token: Tensor) -> Tensor:
    """Return a token's value as it is, [P, N, T], or the sum over a sequence's, [P, N]."""
    return per_token.sum(dim=2) if contender.unit == "sequence" else per_token


def _known(log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, log_probs.detach(), 0.0)


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


def _check_inputs(
    contender: Contender,
    log_probs: Tensor,
    rewards: Tensor,
    mask: Tensor,
    group: int,
    entropies: Tensor | None,
) -> None:
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
    if contender.priority == "entropy" and (
        entropies is None or entropies.shape != log_probs.shape
    ):
        got = "None" if entropies is None else list(entropies.shape)
        raise ValueError(
            f"entropies must have the shape of log_probs, {list(log_probs.shape)}, for the "
            f"priority 'entropy', got {got}; ask the sampler for them."
        )


def contenders(
    *,
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3),
    etas: tuple[float, ...] = (0.1, 1.0, 10.0),
) -> list[Contender]:
    """Return the study's contenders, each once, dense ones first.

    Where a method has a loss of its own in the literature it has it here: PODS, top-entropy tokens
    and the zero-advantage filter are GRPO's; what is compared with DG-K at an equal rate has
    DG-K's, plain PG. PODS averages over what it keeps, as published.

    Example:
        >>> from kondo_lab.language.contenders import contenders
        >>> [each.name for each in contenders(rates=(0.03,), etas=(1.0,))][:5]
        ['PG', 'GRPO', 'DG, eta 1', 'zero-advantage filter', 'DG-K 3%']
    """
    found = [
        Contender(name="PG"),
        Contender(name="GRPO", loss="grpo"),
        *(Contender(name=f"DG, eta {eta:g}", gate="soft", unit="token", eta=eta) for eta in etas),
        Contender(name="zero-advantage filter", loss="grpo", gate="filter"),
    ]
    for rate in rates:
        found += at_rate(rate)
    return found


def at_rate(rate: float) -> list[Contender]:
    """Return the contenders that keep a share `rate`."""
    share = f"{100 * rate:g}%"
    kept = Contender(name=f"DG-K {share}", gate="top", rate=rate)

    def other(name: str, **changes: Any) -> Contender:
        return dataclasses.replace(kept, name=f"{name} {share}", **changes)

    return [
        kept,
        other("DG-K exact", screen="exact"),
        other("DG-K tokens", unit="token"),
        other("DG-K tokens exact", unit="token", screen="exact"),
        other("DG-K cost", gate="budget", unit="token"),
        other("|delight|", priority="abs_delight"),
        other("random", priority="uniform"),
        other("PODS", gate="variance", loss="grpo", denominator="kept"),
        other("entropy tokens", priority="entropy", unit="token", loss="grpo"),
        other("surprisal", priority="surprisal"),
        other("advantage", priority="advantage"),
    ]
