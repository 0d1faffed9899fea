"""What is measured of every step of text members, averaged or summed between two logged steps.

Entropy is per token, in nats; mixed groups is the share of prompts whose completions differ in
reward; delight is that of whole completions, U times -log pi(completion). The kept delight share is
sum of weight * delight / sum of delight over the tokens whose delight is above 0; a step without
any counts with 0. The effective sample size is that of `effective_share`. With frictions all of it
is of what the learner gets, and the entropy is that of the actors. Differentiated are, of each row
with a kept token, the prompt and the completion up to its last kept token.
"""

import torch
from torch import Tensor

from kondo import advantage, delight
from kondo_lab.training.decisions import Decision
from kondo_lab.training.gates import unchecked
from kondo_lab.training.programs import Program, Rolled, take_rows

QUANTILES = {"delight q05": 0.05, "delight q50": 0.5, "delight q95": 0.95}
TOTALS = ("tokens generated", "tokens differentiated")
"""Metrics that are sums since the start; all others are means since the last logged step."""
_TINY = 1e-300


def of_experience(rolled: Rolled, group: int) -> dict[str, Tensor]:
    """Return metric -> [P] of completions and their rewards, `group` of them per prompt."""
    rewards, tokens = rolled["rewards"], rolled["mask"].sum(dim=(1, 2))
    groups = rewards.view(len(rewards), -1, group)
    return {
        "train reward": rewards.mean(dim=1),
        "mixed groups": (groups.amax(dim=2) != groups.amin(dim=2)).double().mean(dim=1),
        "completion length": tokens.double() / rewards.shape[1],
        "entropy": rolled["entropy"],
    }


def of_delight(rolled: Rolled, group: int) -> dict[str, Tensor]:
    """Return quantiles of the completions' delight."""
    ranked = token_delight(rolled, group).sum(dim=2).sort(dim=1).values
    last = ranked.shape[1] - 1
    return {name: ranked[:, round(share * last)] for name, share in QUANTILES.items()}


def of_decision(
    program: Program, rolled: Rolled, decision: Decision, by_token: Tensor, rows: Tensor | None
) -> dict[str, Tensor]:
    """Return metric -> [p] of what was decided; `by_token` is dL / d log pi of the trained rows."""
    mask = rolled["mask"]
    keep = mask if decision.keep is None else decision.keep & mask
    weight = mask if decision.weight is None else decision.weight * mask
    worth = token_delight(rolled, program.group).clamp(min=0).double()
    place = torch.arange(1, keep.shape[2] + 1, device=keep.device)
    last = torch.where(keep, place, 0).amax(dim=2)
    dragged = last + program.prompt_length * (last > 0)
    through = (weight * worth).sum(dim=(1, 2))
    return {
        "kept rows": (last > 0).sum(dim=1),
        "kept tokens": keep.sum(dim=(1, 2)),
        "kept delight share": through / worth.sum(dim=(1, 2)).clamp(min=_TINY),
        "effective sample size": effective_share(by_token, decision.advantages, mask, rows),
        "tokens differentiated": dragged.sum(dim=1),
    }


def effective_share(
    by_token: Tensor, advantages: Tensor, mask: Tensor, rows: Tensor | None
) -> Tensor:
    """Return (sum w)^2 / (n * sum w^2), [P]: how many tokens count as much as n equal ones would.

    w is a token's weight, |dL / d log pi| / |U|, and n the number of tokens whose U is not 0, those
    that are not trained included. 1 where all weigh the same; 0 where none has a weight.

    Args:
        by_token: dL / d log pi, [P, N, T], or [P, K, T] of the trained rows.
        advantages: U, [P, N, 1].
        mask: bool [P, N, T].
        rows: [P, K], the trained rows; None for all.
    """
    each = advantages.abs().double()
    count = ((each > 0) & mask).sum(dim=(1, 2))
    if rows is not None:
        each = take_rows(each, rows)
    weight = torch.where(each > 0, by_token.abs().double() / each.clamp(min=_TINY), 0.0)
    total, squares = weight.sum(dim=(1, 2)), weight.square().sum(dim=(1, 2))
    return total.square() / (squares * count).clamp(min=_TINY)


def token_delight(rolled: Rolled, group: int) -> Tensor:
    """Return the delight of every token, [P, N, T]."""
    centred = advantage.group_mean(rolled["rewards"], group).unsqueeze(2)
    return unchecked(delight)(rolled["log_probs"], centred.expand_as(rolled["log_probs"]))
