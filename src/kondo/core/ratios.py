"""Sums over sequences, and importance ratios pi / mu, capped and not differentiated.

A sequence is a row of [N, T], or the flat elements that an index gives the same number.
"""

import math

import torch
from torch import Tensor


def sequence_sum(values: Tensor, sequence_index: Tensor | None = None) -> Tensor:
    """Return, for each element, the sum over its sequence. Nothing is read from the device.

    Args:
        values: [N, T] or [K] float.
        sequence_index: int64 like values: the sequence of each element, from 0 and below the number
            of elements; negative for elements of no sequence. None: rows of [N, T].

    Returns:
        Like values; 0 for elements of no sequence, which may be NaN.

    Example:
        >>> import torch
        >>> sequence_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 1, -1]))
        tensor([3., 3., 4., 0.])
        >>> sequence_sum(torch.tensor([[1.0, 2.0]]))
        tensor([[3., 3.]])
    """
    if sequence_index is None:
        return values.sum(dim=1, keepdim=True).expand_as(values)
    inside, size = sequence_index >= 0, values.numel()
    # As many slots as elements, whatever the number of sequences; the last is for no sequence.
    slot = torch.where(inside, sequence_index, size).reshape(-1)
    total = values.new_zeros(size + 1).index_add(0, slot, values.reshape(-1))
    return torch.where(inside, total.index_select(0, slot).view_as(values), 0.0)


def capped_ratio(log_ratio: Tensor, max_weight: float) -> Tensor:
    """Return min(exp(log_ratio), max_weight); finite where max_weight is.

    Example:
        >>> import torch
        >>> capped_ratio(torch.tensor([0.0, 1000.0]), 2.0)
        tensor([1., 2.])
    """
    return log_ratio.clamp_max(math.log(max_weight)).exp()


def weighted(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return ratio * advantages, 0 where the advantage is, even if the ratio is infinite.

    Example:
        >>> import torch
        >>> weighted(torch.tensor([2.0, torch.inf]), torch.tensor([-1.0, 0.0]))
        tensor([-2.,  0.])
    """
    return torch.where(advantages == 0, 0.0, ratio * advantages)


def sequence_ratio(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    sequence_index: Tensor | None = None,
    *,
    max_weight: float,
) -> Tensor:
    """Return min(product over a sequence of pi / mu, max_weight), for each of its elements.

    Not differentiated, and nothing is read from the device.

    Args:
        log_probs: [N, T] or [K] float.
        behaviour_log_probs: like log_probs; of the policy that acted.
        sequence_index: int64 like log_probs: the sequence of each element, from 0 and below the
            number of elements; negative for elements of no sequence. None: rows of [N, T].
        max_weight: where ratios are capped, > 0; infinite for no cap.

    Returns:
        Like log_probs; 0 for elements of no sequence.

    Example:
        >>> import torch
        >>> pi, mu = torch.tensor([0.5, 0.5, 0.9]).log(), torch.tensor([0.25, 0.4, 0.9]).log()
        >>> sequence_ratio(pi, mu, torch.tensor([0, 0, 1]), max_weight=9.0)  # 2 * 1.25, and 1
        tensor([2.5000, 2.5000, 1.0000])
    """
    log_ratio = log_probs.detach() - behaviour_log_probs.detach()
    ratio = capped_ratio(sequence_sum(log_ratio, sequence_index), max_weight)
    return ratio if sequence_index is None else torch.where(sequence_index >= 0, ratio, 0.0)
