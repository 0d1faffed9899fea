"""Losses that compare the policy with the one that acted."""

import math

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, require
from kondo.core.losses.on_policy import check_sequences, of_sequences, pair
from kondo.core.ratios import capped_ratio, sequence_ratio, weighted


def ppo(
    log_probs: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    *,
    clip: float = 0.2,
    beta: float = 0.0,
) -> Tensor:
    """Return the clipped surrogate loss, -min(r U, clip(r, 1 - c, 1 + c) U), plus a KL term.

    r = pi(a|s) / mu(a|s), mu the policy of `old_log_probs`. The KL term is the single-sample
    estimate of KL(mu || pi) that the papers' baseline adds, beta * (log mu - log pi).
    Gradient: -r U grad log pi where the first branch is the minimum, else 0; and -beta grad log pi.

    Args:
        log_probs: [N] or [N, T] float, differentiated.
        advantages: like log_probs or [N] float.
        old_log_probs: like log_probs.
        clip: c > 0; infinite means no clipping.
        beta: weight of the KL term, >= 0.

    Example:
        >>> import torch, kondo
        >>> log_probs = torch.tensor([-1.0, -1.0])
        >>> kondo.losses.ppo(log_probs, torch.tensor([1.0, -1.0]), log_probs - 1.0)  # r = e
        tensor([-1.2000,  2.7183])

    Reference: https://arxiv.org/abs/1707.06347, equation 7
    """
    require(clip > 0, f"clip must be > 0, got {clip}.")
    require(beta >= 0, f"beta must be >= 0, got {beta}.")
    log_probs, advantages = pair(log_probs, advantages)
    old_log_probs = _other("old_log_probs", old_log_probs, log_probs)
    ratio = torch.exp(log_probs - old_log_probs)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -surrogate + beta * (old_log_probs - log_probs)


def pmpo(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    alpha: float = 0.5,
    gamma: float = 1e-9,
    positive_share: float | None = None,
    beta: float = 0.0,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """Return the preference loss: -alpha log pi where U > 0, (1 - alpha) log(gamma + pi) elsewhere.

    With `positive_share` s, the fraction of units with U > 0 in the whole batch, the terms are
    divided by s and by 1 - s, so that the mean over the batch is the papers' alpha * mean over
    positives + (1 - alpha) * mean over the rest. It is an argument, not computed here, because a
    micro-batch cannot know it. beta * (log mu - log pi) is added as in `ppo`.
    Gradient: -alpha grad log pi, or (1 - alpha) pi / (gamma + pi) grad log pi.

    Units with U = 0 count as not preferred and have a gradient; a gate skips them all the same.

    Args:
        log_probs: [N] or [N, T] float, differentiated.
        advantages: like log_probs or [N] float; only the sign is used.
        alpha: weight of the preferred units, in [0, 1].
        gamma: positive, bounds the loss of a very unlikely dispreferred action.
        positive_share: in (0, 1), or None for no division.
        beta: weight of the KL term, >= 0; needs old_log_probs.
        old_log_probs: like log_probs, the sampling policy.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.pmpo(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]))
        tensor([ 0.5000, -0.5000])

    Reference: https://arxiv.org/abs/2410.04166
    """
    require(gamma > 0, f"gamma must be > 0, got {gamma}.")
    require(beta >= 0, f"beta must be >= 0, got {beta}.")
    require(
        0.0 <= alpha <= 1.0,
        f"alpha must lie in [0, 1], got {alpha}; 0.5 weighs both sides equally.",
    )
    log_probs, advantages = pair(log_probs, advantages)
    share = 1.0, 1.0
    if positive_share is not None:
        require(
            0.0 < positive_share < 1.0,
            f"positive_share must lie in (0, 1), got {positive_share}; a batch of one sign has no "
            f"other side to average: leave it None.",
        )
        share = positive_share, 1 - positive_share
    preferred = -alpha / share[0] * log_probs
    dispreferred = (1 - alpha) / share[1] * torch.log(gamma + torch.exp(log_probs))
    loss = torch.where(advantages > 0, preferred, dispreferred)
    if beta == 0.0:
        return loss
    if old_log_probs is None:
        raise ValueError("old_log_probs must be given when beta > 0, got None; it anchors the KL.")
    return loss + beta * (_other("old_log_probs", old_log_probs, log_probs) - log_probs)


def is_pg(
    log_probs: Tensor,
    advantages: Tensor,
    behaviour_log_probs: Tensor,
    *,
    max_weight: float | None = None,
) -> Tensor:
    """Return the importance-weighted loss, -rho * U * log pi, rho = pi(a|s) / mu(a|s).

    Gradient: -rho U grad log pi; rho is exact and not differentiated.

    Args:
        log_probs: [N] or [N, T] float, differentiated.
        advantages: like log_probs or [N] float.
        behaviour_log_probs: like log_probs, log mu(a|s) of the policy that acted.
        max_weight: truncate rho at this value; None leaves it exact and unbounded.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.is_pg(torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([-1.0]))
        tensor([1.])

    Reference: truncation, https://arxiv.org/abs/1802.01561, equation 1
    """
    most = math.inf if max_weight is None else max_weight
    require(most > 0, f"max_weight must be > 0, got {most}.")
    log_probs, advantages = pair(log_probs, advantages)
    behaviour_log_probs = _other("behaviour_log_probs", behaviour_log_probs, log_probs)
    ratio = capped_ratio(log_probs.detach() - behaviour_log_probs, most)
    return -weighted(ratio, advantages) * log_probs


def sequence_is_pg(
    log_probs: Tensor,
    advantages: Tensor,
    behaviour_log_probs: Tensor,
    *,
    sequence_index: Tensor | None = None,
    max_weight: float = 2.0,
) -> Tensor:
    """Return -w * U * log pi of each token, w = min(product over its sequence of pi / mu, cap).

    Gradient: -w U grad log pi; w is not differentiated. For answers of a policy that was older,
    quantised or at another temperature: what must be corrected is the chance of the whole answer.

    Args:
        log_probs: [N, T] or [K] float, differentiated.
        advantages: like log_probs, or [N] for [N, T].
        behaviour_log_probs: like log_probs, log mu of the policy that acted.
        sequence_index: int64 like log_probs: the sequence of each element, from 0 and below the
            number of elements; negative for elements of no sequence, whose loss is 0. All elements
            of a sequence must be there. None: each row of [N, T] is one, with every element.
            `kondo.backward` gives it to losses with the attribute `needs_sequence_index = True`:
            one of your own that calls this one must have it, and pass the index on.
        max_weight: the cap; infinite for none.

    Example:
        >>> import torch, kondo
        >>> pi, mu = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.4]]).log()
        >>> -kondo.losses.sequence_is_pg(pi, torch.ones(1), mu) / pi  # 2 * 1.25, capped
        tensor([[2., 2.]])
        >>> batch, advantages = torch.randn(8, 4), torch.randn(8)
        >>> policy, mu = torch.nn.Linear(4, 3), torch.full((8, 3), -1.0)
        >>> kondo.backward(
        ...     lambda rows: -policy(rows).square(),
        ...     batch,
        ...     advantages,
        ...     gate=kondo.UnbiasedGate(rate=0.5),
        ...     unit="sequence",
        ...     loss=kondo.losses.sequence_is_pg,
        ...     loss_inputs={"behaviour_log_probs": mu},
        ... ).rows_trained
        4

    Reference: truncation, https://arxiv.org/abs/1802.01561, equation 1
    """
    require(max_weight > 0, f"max_weight must be > 0, got {max_weight}.")
    log_probs, advantages = pair(log_probs, advantages)
    behaviour_log_probs = _other("behaviour_log_probs", behaviour_log_probs, log_probs)
    check_sequences(sequence_index, log_probs)
    ratio = sequence_ratio(log_probs, behaviour_log_probs, sequence_index, max_weight=max_weight)
    return of_sequences(-weighted(ratio, advantages), log_probs, sequence_index)


vars(sequence_is_pg)["needs_sequence_index"] = True


def awr(
    log_probs: Tensor, advantages: Tensor, *, beta: float = 1.0, max_weight: float = 20.0
) -> Tensor:
    """Return the advantage-weighted regression loss, -min(exp(U / beta), max_weight) * log pi.

    Gradient: -min(exp(U / beta), max_weight) grad log pi. Units with U = 0 have weight 1; a gate
    on delight skips them all the same.

    Args:
        log_probs: [N] or [N, T] float, differentiated.
        advantages: like log_probs or [N] float.
        beta: temperature > 0.
        max_weight: the reference's bound on the weight, 20; infinite for none.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.awr(torch.tensor([-1.0, -1.0]), torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])

    Reference: https://arxiv.org/abs/1910.00177, equation 5
    """
    require(beta > 0, f"beta must be > 0, got {beta}.")
    require(max_weight > 0, f"max_weight must be > 0, got {max_weight}.")
    log_probs, advantages = pair(log_probs, advantages)
    return -torch.exp(advantages / beta).clamp_max(max_weight) * log_probs


def _other(name: str, value: Tensor, log_probs: Tensor) -> Tensor:
    """Check and detach log-probs of another policy."""
    value = at_least_float32(check_float(name, value).detach())
    if value.shape != log_probs.shape:
        raise ValueError(
            f"{name} must have the shape of log_probs, {list(log_probs.shape)}, got "
            f"{list(value.shape)}; give one value per unit."
        )
    return value
