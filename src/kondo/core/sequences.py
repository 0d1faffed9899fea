"""Sums over the elements of a sequence: rows of [N, T], or flat elements with an index."""

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
