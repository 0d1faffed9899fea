"""Rewards -> advantages: U = R - b, centred only.

Each function is one baseline b. Delight needs the advantage's own scale and its zero, so nothing
here divides by a standard deviation except `normalise_by_std`, which says why it must not feed
delight. Nothing is differentiated: every result is detached, float32 or float64.
"""

import math

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, first_unit


def _rewards(rewards: Tensor) -> Tensor:
    """Check and detach rewards, [N]."""
    rewards = at_least_float32(check_float("rewards", rewards).detach())
    if rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(
            f"rewards must have shape [N] with N >= 1, got {list(rewards.shape)}; "
            f"give one reward per sample."
        )
    return rewards


def zero(rewards: Tensor) -> Tensor:
    """Return U = R: no baseline.

    Args:
        rewards: [N] float.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.zero(torch.tensor([1.0, 0.0]))
        tensor([1., 0.])
    """
    return _rewards(rewards).clone()


def constant(rewards: Tensor, *, baseline: float = 0.5) -> Tensor:
    """Return U = R - b for a constant b.

    Args:
        rewards: [N] float.
        baseline: b; 0.5 is the papers' choice for rewards in {0, 1}.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.constant(torch.tensor([1.0, 0.0]))
        tensor([ 0.5000, -0.5000])
    """
    return _rewards(rewards) - baseline


def expected_confidence(rewards: Tensor, action_probs: Tensor) -> Tensor:
    """Return U = R - sum_a pi(a|s)^2, the papers' MNIST baseline.

    The sum is the reward the policy would expect if its own probabilities were right. It needs no
    label.

    Args:
        rewards: [N] float.
        action_probs: [N, K] float, the policy's probabilities; rows sum to 1.

    Example:
        >>> import torch, kondo
        >>> probs = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> kondo.advantage.expected_confidence(torch.tensor([1.0, 1.0]), probs)
        tensor([0.5000, 0.0000])

    Reference: https://arxiv.org/abs/2603.20526
    """
    rewards = _rewards(rewards)
    action_probs = at_least_float32(check_float("action_probs", action_probs).detach())
    if action_probs.ndim != 2 or action_probs.shape[0] != rewards.shape[0]:
        raise ValueError(
            f"action_probs must have shape [{rewards.shape[0]}, K], got "
            f"{list(action_probs.shape)}; give every action's probability for each sample."
        )
    row_sums = action_probs.sum(dim=-1)
    if bool(((row_sums - 1).abs() > 0.05).any()):
        raise ValueError(
            f"action_probs must sum to 1 in each row, got sums from {float(row_sums.min()):.4g} to "
            f"{float(row_sums.max()):.4g}; apply softmax to logits first."
        )
    return rewards - action_probs.square().sum(dim=-1)


def oracle(rewards: Tensor, expected_rewards: Tensor) -> Tensor:
    """Return U = R - E[R|s] for a known expectation (for a label y: pi(y|s)).

    Args:
        rewards: [N] float.
        expected_rewards: [N] float.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.oracle(torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.9]))
        tensor([ 0.1000, -0.9000])
    """
    rewards = _rewards(rewards)
    expected_rewards = at_least_float32(check_float("expected_rewards", expected_rewards).detach())
    if expected_rewards.shape != rewards.shape:
        raise ValueError(
            f"expected_rewards must have the shape of rewards, {list(rewards.shape)}, got "
            f"{list(expected_rewards.shape)}; give one expectation per sample."
        )
    return rewards - expected_rewards


def batch_mean(rewards: Tensor) -> Tensor:
    """Return U = R - mean(R) over the batch.

    Args:
        rewards: [N] float.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.batch_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    rewards = _rewards(rewards)
    rewards = rewards - rewards.min()  # equal rewards: exactly 0, as in _group_totals
    return rewards - rewards.mean()


def group_mean(rewards: Tensor, groups: Tensor | int, *, skip_nan: bool = False) -> Tensor:
    """Return U = R - mean(R of the same group): several samples of one prompt form a group.

    Exactly 0 where all rewards of a group are equal. With a group size nothing is read from the
    device, and leading dimensions are separate batches.

    Args:
        rewards: [N] float; [..., N] where `groups` is a size.
        groups: [N] integer group of each sample, or an int: the size of consecutive groups.
        skip_nan: leave a NaN reward (no reward function applied) out of the mean and give it an
            advantage of 0. With a group size.

    Raises:
        ValueError: an infinite reward, with `skip_nan`.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.group_mean(torch.tensor([1.0, 0.0, 3.0, 3.0]), 2)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
        >>> kondo.advantage.group_mean(torch.tensor([1.0, 0.0, 0.1, torch.nan]), 2, skip_nan=True)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    if not isinstance(groups, int):
        if skip_nan:
            raise ValueError("skip_nan needs groups as a size, got a tensor; give an int.")
        rewards, totals, sizes = _group_totals(_rewards(rewards), groups)
        return rewards - totals / sizes
    by_group = _by_group(rewards, groups)
    if not skip_nan:
        above = by_group - by_group.amin(-1, keepdim=True)
        return (above - above.mean(-1, keepdim=True)).flatten(-2)
    if bool(by_group.isinf().any()):
        where = by_group.isinf().flatten(-2)
        raise ValueError(
            f"rewards must be finite or NaN, got an infinite one in {first_unit(where)}; clip it "
            f"in the reward function, or return None for a sample without a reward."
        )
    above = by_group - by_group.nan_to_num(nan=math.inf).amin(-1, keepdim=True)
    return (above - above.nanmean(-1, keepdim=True)).nan_to_num(nan=0.0).flatten(-2)


def leave_one_out(rewards: Tensor, groups: Tensor | int) -> Tensor:
    """Return U_i = R_i - mean(R of the group's other samples): unbiased, as in RLOO.

    Args:
        rewards: [N] float.
        groups: [N] integer group of each sample, or an int: the size of consecutive groups.
            Every group needs at least two samples.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.leave_one_out(torch.tensor([1.0, 0.0, 0.0]), 3)
        tensor([ 1.0000, -0.5000, -0.5000])

    Reference: https://arxiv.org/abs/2402.14740
    """
    if isinstance(groups, int):
        groups = torch.arange(len(_rewards(rewards)), device=rewards.device) // _size(
            rewards, groups
        )
    rewards, totals, sizes = _group_totals(_rewards(rewards), groups)
    if bool((sizes < 2).any()):
        raise ValueError(
            "groups must hold at least two samples each for leave_one_out, got a group of one; "
            "draw more samples per prompt or use group_mean."
        )
    return rewards - (totals - rewards) / (sizes - 1)


def normalise_by_std(advantages: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Divide advantages by their standard deviation, U / (std(U) + epsilon). Not for delight.

    Warning: never compute delight from the result. Division ties delight's scale to how alike the
    batch's rewards are: the lone success in a group of eight gets an advantage of 2.5 whatever
    the reward was worth, delight reaches 25, and the gate saturates on group homogeneity instead
    of on surprise. Give `kondo.delight` the centred advantage; use this one in the loss only, if
    the trainer you match does so.

    Args:
        advantages: [N] or [N, T] float; not differentiated.
        epsilon: added to the standard deviation.

    Example:
        >>> import torch, kondo
        >>> kondo.advantage.normalise_by_std(torch.tensor([1.0, -1.0]))
        tensor([ 0.7071, -0.7071])
    """
    advantages = at_least_float32(check_float("advantages", advantages).detach())
    if advantages.numel() < 2:
        raise ValueError(
            f"advantages must hold at least two values, got {advantages.numel()}; "
            f"a single value has no standard deviation."
        )
    return advantages / (advantages.std() + epsilon)


def _by_group(rewards: Tensor, size: int) -> Tensor:
    """Check and detach rewards, and split [..., N] into consecutive groups, [..., G, size]."""
    rewards = at_least_float32(check_float("rewards", rewards).detach())
    if rewards.ndim == 0 or rewards.numel() == 0:
        _rewards(rewards)
    return rewards.reshape(*rewards.shape[:-1], -1, _size(rewards, size))


def _size(rewards: Tensor, size: int) -> int:
    if size < 1 or rewards.shape[-1] % size:
        raise ValueError(
            f"groups as a size must divide the number of rewards, {rewards.shape[-1]}, got "
            f"{size}; give a divisor, or a tensor with each sample's group."
        )
    return size


def _group_totals(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's reward above its group's lowest, their group total, and group size.

    Measured from the lowest, equal rewards sum to exactly 0: a group without a difference has an
    advantage of exactly 0 and costs nothing, where n * R / n would miss R by rounding.
    """
    if not isinstance(groups, Tensor):
        raise ValueError(
            f"groups must be an integer tensor or an int, got {type(groups).__name__}; wrap it "
            f"with torch.as_tensor(...)."
        )
    if groups.shape != rewards.shape or groups.is_floating_point() or groups.dtype == torch.bool:
        raise ValueError(
            f"groups must be an integer tensor of shape {list(rewards.shape)}, got {groups.dtype} "
            f"{list(groups.shape)}; give each sample's group."
        )
    _, member = torch.unique(groups, return_inverse=True)
    sizes = torch.bincount(member).to(rewards.dtype)
    lowest = torch.zeros_like(sizes).scatter_reduce_(0, member, rewards, "amin", include_self=False)
    rewards = rewards - lowest[member]
    totals = torch.zeros_like(sizes).index_add_(0, member, rewards)
    return rewards, totals[member], sizes[member]
