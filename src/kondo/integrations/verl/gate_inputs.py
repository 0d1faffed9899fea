"""What a gate reads of verl's batch: log-probs, a mask and advantages. Imports no verl.

N rows of the batch, one per trajectory; T tokens of the longest response.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import kondo

# Of these, the advantage is a multiple of the reward less its group's mean: 0 where all rewards of
# a group are equal.
CENTRED_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "gpg")


class GateRows(NamedTuple):
    """The batch, padded at the right."""

    mask: Tensor
    """bool [N, T]: tokens that count in the loss. Nothing of a row that verl added as padding."""
    log_probs: Tensor
    """[N, T], of the policy that verl calls old; zeros where the gate reads none."""
    advantages: Tensor
    """[N, T], those of the loss."""
    rewards: Tensor
    """[N], sums of token rewards, with verl's KL penalty in them if there is one."""
    importance: Tensor | None = None
    """[N, T], verl's weights for a rollout policy that differs; None if there are none."""
    ref_log_probs: Tensor | None = None
    """[N, T], of the reference policy, where the loss has a KL term and the gate must know it."""


def centred_rewards(rewards: Tensor, alone: Tensor, keys: Sequence[str]) -> Tensor:
    """Return rewards less the mean of the same prompt's, [N].

    An agent may return several rows in one session. As in verl, the last one's reward is that of
    the session, means are over sessions, and all rows of a session have the same result. A prompt
    with one session has no group: verl's advantage stands for it.

    Args:
        rewards: [N] float.
        alone: [N] float, what rows of a prompt with one session get.
        keys: verl's, N of them: prompt_session_output.
    """
    split = [key.rsplit("_", 2) for key in keys]
    sessions = [(prompt, session) for prompt, session, _ in split]
    last: dict[tuple[str, str], int] = {}
    for row, session in enumerate(sessions):
        if session not in last or int(split[last[session]][2]) < int(split[row][2]):
            last[session] = row
    place = {session: index for index, session in enumerate(last)}
    prompts: dict[str, int] = {}
    groups = torch.tensor([prompts.setdefault(prompt, len(prompts)) for prompt, _ in last])
    centred = kondo.advantage.group_mean(rewards[torch.tensor(list(last.values()))], groups)
    of_row = torch.tensor([place[session] for session in sessions])
    single = torch.bincount(groups)[groups[of_row]] == 1
    return torch.where(single, alone, centred[of_row])


def gate_advantages(
    rows: GateRows,
    keys: Sequence[str],
    *,
    unbiased: bool,
    estimator: str,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
) -> Tensor:
    """Return the advantages that the gate looks at, [N] or [N, T].

    They are rewards centred by prompt, whatever the loss divides them by, where verl's estimator
    centres by prompt too; else the loss's own. An unbiased gate needs what enters the loss: it must
    be able to keep whatever has a gradient. That is the factor of grad log pi in minus the loss, at
    a ratio of 1: A w - kl_coef k, with w verl's importance weights and k the slope of its KL term.

    Args:
        rows: the batch.
        keys: verl's.
        unbiased: whether the gate is an unbiased one.
        estimator: verl's `algorithm.adv_estimator`.
        kl_coef: of the KL term in the loss; 0 if there is none.
        kl_type: verl's name of that term.
    """
    centred = None
    if estimator in CENTRED_ESTIMATORS:
        counted = rows.mask.sum(1).clamp(min=1)
        alone = torch.where(rows.mask, rows.advantages, 0.0).sum(1) / counted
        centred = centred_rewards(rows.rewards.to(alone.dtype), alone, keys)
    if not unbiased:
        return rows.advantages if centred is None else centred
    found = rows.advantages
    if centred is not None:
        # Through rounding, verl's are not quite 0 where all rewards of a group are equal.
        found = torch.where(centred.unsqueeze(1) == 0, 0.0, found)
    if rows.importance is not None:
        found = found * rows.importance
    if kl_coef:
        assert rows.ref_log_probs is not None
        found = found - kl_coef * kl_slope(rows.log_probs - rows.ref_log_probs, kl_type)
    return torch.where(rows.mask, found, 0.0)


def kl_slope(gap: Tensor, kl_type: str) -> Tensor:
    """Return d KL / d log pi of verl's KL estimates, at gap = log pi - log ref; like gap."""
    name = kl_type.removesuffix("+")
    if kl_type.endswith("+") or name in ("mse", "k2"):  # "+": the value of another, the slope of k2
        return gap
    if name in ("kl", "k1"):
        return torch.ones_like(gap)
    if name == "abs":
        return gap.sign()
    if name in ("low_var_kl", "k3"):
        inside = (gap.abs() <= 20) & (torch.exp(-gap) + gap - 1 <= 10)  # verl clamps outside
        return torch.where(inside, 1 - torch.exp(-gap), 0.0)
    raise ValueError(
        f"actor_rollout_ref.actor.kl_loss_type must be one of kl, k1, abs, mse, k2, low_var_kl or "
        f"k3, with or without a plus sign, got {kl_type!r}."
    )
