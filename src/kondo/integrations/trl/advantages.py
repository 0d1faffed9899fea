"""Rewards -> the advantages that a gate looks at, with the signs of those in TRL's loss.

    sum_then_normalize    R = sum_k w_k r_k                            U = R - mean of its group
    normalize_then_sum    z_k = (r_k - mean_k) / (std_k + 1e-4)        U = sum_k w_k z_k

mean_k and std_k are those of reward function k over a group. TRL divides U further, by a standard
deviation of R over the group or the batch, or of U over the batch, and subtracts the batch's mean
of U, which is 0. Delight needs the advantage's own scale, so gates see U without that. The standard
deviations inside z_k stay: they say how much each reward function counts, and so the sign of U.
"""

from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

import kondo

# TRL's, in the denominator of z_k.
_EPSILON = 1e-4


def weighted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k w_k r_k, [N]; NaN where no reward function applied.

    Args:
        rewards: [N, K] float, NaN where a reward function did not apply.
        weights: [K] float.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def centred_rewards(rewards: Tensor, weights: Tensor, *, groups: int, aggregation: str) -> Tensor:
    """Return U, [N]: exactly 0 where the rewards of a group are equal, or none applied.

    Args:
        rewards: [N, K] float, NaN where a reward function did not apply.
        weights: [K] float.
        groups: completions of a prompt, which follow each other.
        aggregation: TRL's `multi_objective_aggregation`.

    Example:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> weights = torch.tensor([2.0, 1.0])
        >>> centred_rewards(rewards, weights, groups=2, aggregation="sum_then_normalize")
        tensor([-4.,  4.])
        >>> centred_rewards(rewards, weights, groups=2, aggregation="normalize_then_sum").sign()
        tensor([ 1., -1.])
    """
    if aggregation == "sum_then_normalize":
        total = weighted_rewards(rewards, weights)
        return kondo.advantage.group_mean(total, groups, skip_nan=True)
    centred = kondo.advantage.group_mean(rewards.T, groups, skip_nan=True).T
    spread = nanstd(rewards.view(-1, groups, rewards.shape[1]), dim=1)
    # A reward function that scored fewer than two of a group has no standard deviation. TRL leaves
    # it out there.
    scaled = (centred / (spread.repeat_interleave(groups, dim=0) + _EPSILON)).nan_to_num(nan=0.0)
    return (scaled * weights.to(rewards.device)).sum(dim=1)


def loss_advantages(
    output: dict[str, Any], centred: Tensor, log_probs: Tensor | None, args: Any
) -> Tensor:
    """Return the factor of grad log pi in minus TRL's loss, at a ratio of 1: [n] or [n, T].

    Without KL that is TRL's advantage A. With it, it is A - beta k: TRL's KL is exp(-d) + d - 1
    with d = log pi - log ref, so that k is 1 - exp(-d); or d, where TRL multiplies the KL by the
    ratio (`use_bias_correction_kl`).

    Args:
        output: TRL's inputs.
        centred: [n] float, by `centred_rewards`.
        log_probs: [n, T] float, of the policy; None if there are none.
        args: TRL's config.
    """
    advantages: Tensor = output["advantages"]
    # Through rounding, TRL's are not quite 0 where all rewards of a group are equal.
    advantages = torch.where(centred == 0, 0.0, advantages)
    if args.beta == 0.0:
        return advantages
    assert log_probs is not None  # `check_gate` refuses a KL that the gate could not see
    gap = log_probs - output["ref_per_token_logps"]
    slope = gap if args.use_bias_correction_kl else 1 - torch.exp(-gap)
    factors: Tensor = advantages.unsqueeze(1) - args.beta * slope
    return factors
