"""Policy-gradient losses per unit, unreduced: the caller masks, weights and divides.

Every function takes log_probs [N] or [N, T] and returns the same shape. `sequence_is_pg` and
`sequence_dg` weigh whole sequences; in all others a unit's loss depends on that unit alone. Only
`log_probs` is differentiated; advantages, other log-probs and weights are detached inside. Half
precision is upcast to float32. Advantages may be [N] for [N, T] log-probs.
"""

import math

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, expand_rows
from kondo.core.delight import delight
from kondo.core.ratios import capped_ratio, sequence_ratio, weighted
from kondo.core.sequences import sequence_sum


def _pair(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Check both, detach the advantages and broadcast them over tokens."""
    log_probs = at_least_float32(check_float("log_probs", log_probs))
    advantages = at_least_float32(check_float("advantages", advantages).detach())
    return log_probs, expand_rows("advantages", advantages, log_probs.shape)


def _other(name: str, value: Tensor, log_probs: Tensor) -> Tensor:
    """Check and detach log-probs of another policy."""
    value = at_least_float32(check_float(name, value).detach())
    if value.shape != log_probs.shape:
        raise ValueError(
            f"{name} must have the shape of log_probs, {list(log_probs.shape)}, got "
            f"{list(value.shape)}; give one value per unit."
        )
    return value


def pg(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return the REINFORCE loss, -U * log pi(a|s).

    Gradient: -U * grad log pi.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.pg(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.0]))
        tensor([ 0.5000, -2.0000])

    Reference: Williams 1992, https://doi.org/10.1007/BF00992696
    """
    log_probs, advantages = _pair(log_probs, advantages)
    return -advantages * log_probs


def dg(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    eta: float = 1.0,
    mode_log_probs: Tensor | None = None,
) -> Tensor:
    """Return the Delightful Policy Gradient loss, -w * U * log pi(a|s), w = sigmoid(chi / eta).

    Gradient: -sigmoid(U * l / eta) * U * grad log pi; the gate w is not differentiated.

    Args:
        log_probs: [N] or [N, T] float, differentiated.
        advantages: like log_probs or [N] float, centred only.
        eta: temperature > 0; towards infinity the loss tends to pg / 2.
        mode_log_probs: like log_probs; for densities, see `kondo.surprisal`.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.dg(torch.tensor([-1.0]), torch.tensor([0.0]) + 2.0)  # 2 sigmoid(2)
        tensor([1.7616])

    Reference: https://arxiv.org/abs/2603.14608, Algorithm 1
    """
    _positive("eta", eta)
    # Before the upcast: how far rounding may lift a log-prob above 0 depends on its dtype.
    chi = delight(log_probs, advantages, mode_log_probs=mode_log_probs)
    gate = torch.sigmoid(chi / eta)
    log_probs, advantages = _pair(log_probs, advantages)
    return -gate * advantages * log_probs


def sequence_dg(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    sequence_index: Tensor | None = None,
    eta: float = 1.0,
) -> Tensor:
    """Return DG with one weight per sequence, -w * U * log pi, w = sigmoid(sum of chi / eta).

    The sum is over the tokens of the sequence: its delight. Gradient: -w U grad log pi; w is not
    differentiated. It needs no log-probs of whoever acted. In `dg` the weight is the token's own;
    docs/how-to/off-policy.md says when to use either.

    Args:
        log_probs: [N, T] or [K] float, differentiated.
        advantages: like log_probs, or [N] for [N, T]; centred only.
        sequence_index: as for `sequence_is_pg`.
        eta: temperature > 0.

    Example:
        >>> import torch, kondo
        >>> log_probs = torch.tensor([[-1.0, -2.0]])
        >>> -kondo.losses.sequence_dg(log_probs, torch.ones(1)) / log_probs  # sigmoid(3)
        tensor([[0.9526, 0.9526]])

    Reference: by token, https://arxiv.org/abs/2603.14608, Algorithm 1
    """
    _positive("eta", eta)
    chi = delight(log_probs, advantages)
    log_probs, advantages = _pair(log_probs, advantages)
    _check_sequences(sequence_index, log_probs)
    gate = torch.sigmoid(sequence_sum(chi, sequence_index) / eta)
    return _terms(-gate * advantages, log_probs, sequence_index)


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
    _positive("clip", clip)
    _not_negative("beta", beta)
    log_probs, advantages = _pair(log_probs, advantages)
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
    _positive("gamma", gamma)
    _not_negative("beta", beta)
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}; 0.5 weighs both sides equally.")
    log_probs, advantages = _pair(log_probs, advantages)
    share = 1.0, 1.0
    if positive_share is not None:
        if not 0.0 < positive_share < 1.0:
            raise ValueError(
                f"positive_share must lie in (0, 1), got {positive_share}; a batch of one sign "
                f"has no other side to average: leave it None."
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
    _positive("max_weight", most)
    log_probs, advantages = _pair(log_probs, advantages)
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
            `kondo.backward` gives it to losses with a parameter of this name; one of your own that
            calls this one must take it and pass it on where rows are packed.
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
    _positive("max_weight", max_weight)
    log_probs, advantages = _pair(log_probs, advantages)
    behaviour_log_probs = _other("behaviour_log_probs", behaviour_log_probs, log_probs)
    _check_sequences(sequence_index, log_probs)
    ratio = sequence_ratio(log_probs, behaviour_log_probs, sequence_index, max_weight=max_weight)
    return _terms(-weighted(ratio, advantages), log_probs, sequence_index)


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
    _positive("beta", beta)
    _positive("max_weight", max_weight)
    log_probs, advantages = _pair(log_probs, advantages)
    return -torch.exp(advantages / beta).clamp_max(max_weight) * log_probs


def _terms(factor: Tensor, log_probs: Tensor, sequence_index: Tensor | None) -> Tensor:
    """Return factor * log pi, 0 for elements of no sequence."""
    if sequence_index is None:
        return factor * log_probs
    inside = sequence_index >= 0
    # Both: a factor of NaN would leave through the gradient, a log-prob through the loss.
    return torch.where(inside, torch.where(inside, factor, 0.0) * log_probs, 0.0)


def _check_sequences(sequence_index: Tensor | None, log_probs: Tensor) -> None:
    """Raise a ValueError unless it is known which sequence each element belongs to."""
    if sequence_index is None:
        if log_probs.ndim != 2:
            raise ValueError(
                f"sequence_index must say which sequence each element belongs to, got None for "
                f"log_probs of shape {list(log_probs.shape)}; give it, give log_probs [N, T] with "
                f"one sequence per row, or use is_pg or dg for single decisions."
            )
        return
    if sequence_index.shape != log_probs.shape or sequence_index.dtype != torch.int64:
        raise ValueError(
            f"sequence_index must be int64 of the shape of log_probs, {list(log_probs.shape)}, got "
            f"{sequence_index.dtype} of shape {list(sequence_index.shape)}; give one number per "
            f"element."
        )


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}.")


def _not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must be >= 0, got {value}.")
