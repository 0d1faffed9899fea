"""Weights of whole rows, as factors of the gradients of their log-probs. Imports no verl.

Every term of verl's loss that depends on the policy does so through log-probs and entropies of
tokens. So a factor on their gradients weighs the policy loss, the KL and the entropy bonus alike.
The loss's value stays as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OUTPUTS = ("log_probs", "entropy")


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied; exactly 0 where the factor is 0."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        # Not a plain product: 0 times an infinite gradient of a filler is NaN.
        return torch.where(factor == 0, 0.0, grads[0] * factor), None


def scale_gradient(values: Tensor, factor: Tensor) -> Tensor:
    """Return `values`; in the backward their gradient is multiplied by `factor`.

    Args:
        values: [M] float, differentiated.
        factor: [M] float, not differentiated.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> scale_gradient(x, torch.tensor([3.0, 0.0])).sum().backward()
        >>> x.grad
        tensor([3., 0.])
    """
    scaled: Tensor = _ScaledGradient.apply(values, factor.to(values.dtype))  # type: ignore[no-untyped-call]
    return scaled


def weigh_outputs(outputs: Mapping[str, Any], weight: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Return verl's model outputs with gradients weighed by row.

    Args:
        outputs: log-probs, and entropies if there are any, each [tokens of all rows], or jagged
            with one row per sequence.
        weight: [n] float.
        lengths: [n] int64, tokens of each row.
    """
    factor = weight.repeat_interleave(lengths)
    weighed = dict(outputs)
    for name in OUTPUTS:
        if weighed.get(name) is not None:
            weighed[name] = _scale(weighed[name], factor)
    return weighed


def _scale(output: Any, factor: Tensor) -> Tensor:
    if not output.is_nested:
        return scale_gradient(output, factor)
    scaled = scale_gradient(output.values(), factor)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(scaled, offsets=output.offsets())
    return nested
