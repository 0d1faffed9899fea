"""Losses of the policy alone: REINFORCE and the Delightful Policy Gradient."""

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, expand_rows, require
from kondo.core.delight import delight
from kondo.core.ratios import sequence_sum


def pg(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return the REINFORCE loss, -U * log pi(a|s).

    Gradient: -U * grad log pi.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.pg(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.0]))
        tensor([ 0.5000, -2.0000])

    Reference: Williams 1992, https://doi.org/10.1007/BF00992696
    """
    log_probs, advantages = pair(log_probs, advantages)
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
    # Before the upcast: how far rounding may lift a log-prob above 0 depends on its dtype.
    chi = delight(log_probs, advantages, mode_log_probs=mode_log_probs)
    gate = dg_weight(chi, eta=eta)
    log_probs, advantages = pair(log_probs, advantages)
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
    chi = delight(log_probs, advantages)
    log_probs, advantages = pair(log_probs, advantages)
    check_sequences(sequence_index, log_probs)
    gate = dg_weight(sequence_sum(chi, sequence_index), eta=eta)
    return of_sequences(-gate * advantages, log_probs, sequence_index)


vars(sequence_dg)["needs_sequence_index"] = True


def dg_weight(chi: Tensor, *, eta: float = 1.0) -> Tensor:
    """Return DG's weight of each unit, sigmoid(chi / eta), for a loss that somebody else computes.

    Args:
        chi: float, delight by `kondo.delight`, or its sum over a sequence; not differentiated.
        eta: temperature > 0.

    Example:
        >>> import torch, kondo
        >>> kondo.losses.dg_weight(torch.tensor([0.0, 3.0]))
        tensor([0.5000, 0.9526])
    """
    require(eta > 0, f"eta must be > 0, got {eta}.")
    return torch.sigmoid(chi.detach() / eta)


def pair(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Check both, detach the advantages and broadcast them over tokens."""
    log_probs = at_least_float32(check_float("log_probs", log_probs))
    advantages = at_least_float32(check_float("advantages", advantages).detach())
    return log_probs, expand_rows("advantages", advantages, log_probs.shape)


def of_sequences(factor: Tensor, log_probs: Tensor, sequence_index: Tensor | None) -> Tensor:
    """Return factor * log pi, 0 for elements of no sequence."""
    if sequence_index is None:
        return factor * log_probs
    inside = sequence_index >= 0
    # Both: a factor of NaN would leave through the gradient, a log-prob through the loss.
    return torch.where(inside, torch.where(inside, factor, 0.0) * log_probs, 0.0)


def check_sequences(sequence_index: Tensor | None, log_probs: Tensor) -> None:
    """Raise a ValueError unless it is known which sequence each element belongs to."""
    require(
        sequence_index is not None or log_probs.ndim == 2,
        f"sequence_index must say which sequence each element belongs to, got None for log_probs "
        f"of shape {list(log_probs.shape)}; give it, give log_probs [N, T] with one sequence per "
        f"row, or use is_pg or dg for single decisions.",
    )
    if sequence_index is not None and (
        sequence_index.shape != log_probs.shape or sequence_index.dtype != torch.int64
    ):
        raise ValueError(
            f"sequence_index must be int64 of the shape of log_probs, {list(log_probs.shape)}, got "
            f"{sequence_index.dtype} of shape {list(sequence_index.shape)}; give one number per "
            f"element."
        )
