"""Adam of P members in stacked parameters, each with its learning rate and gradient norm.

    g <- g * min(1, max_norm / |g|)
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    theta <- theta - rate * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

PyTorch's fused Adam does it, with a group of parameters for neighbours of one rate; t is counted on
the device, so that a step can be replayed from a CUDA graph.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kondo_lab.models.networks import Parameters

CLIP_EPSILON = 1e-6
"""Added to a norm before it divides, as by `torch.nn.utils.clip_grad_norm_`."""


class StackedAdam:
    """Adam of P members.

    Args:
        parameters: [P, ...] each; written in place.
        rates: [P], the learning rates.
        decay_steps: [P]: a rate falls linearly, to 0 after so many steps; 0 leaves it as it is.
        max_norm: a member's gradient is scaled down to this global norm; infinite leaves it.

    Example:
        >>> import torch
        >>> from kondo_lab.training.optimiser import StackedAdam
        >>> weights = {"w": torch.zeros(2, 3)}
        >>> StackedAdam(weights, [0.1, 0.2]).step({"w": torch.ones(2, 3)})
        >>> weights["w"][:, 0]
        tensor([-0.1000, -0.2000])
    """

    def __init__(
        self,
        parameters: Parameters,
        rates: Sequence[float],
        *,
        decay_steps: Sequence[int] = (),
        max_norm: float = math.inf,
    ):
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}; infinite does not clip.")
        self.max_norm = max_norm
        device = next(iter(parameters.values())).device
        pace = list(zip(rates, decay_steps or [0] * len(rates), strict=True))
        self._neighbours = list(equal_neighbours(pace))
        self.adam = torch.optim.Adam(
            [
                {
                    "params": [value.detach()[members] for value in parameters.values()],
                    # A number that changes lives on the device.
                    "lr": torch.tensor(rate, device=device) if steps else rate,
                }
                for members, (rate, steps) in self._neighbours
            ],
            fused=True,
            capturable=device.type == "cuda",
        )

    @torch.no_grad()
    def step(self, gradients: Parameters, step: Tensor | int = 1) -> Tensor | None:
        """Move the members, at a step counted from 1.

        Returns:
            Their gradients' global norms [P] before clipping; None where nothing is clipped.
        """
        norms = None
        if not math.isinf(self.max_norm):
            each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
            norms = torch.linalg.vector_norm(torch.stack(each, dim=1), dim=1)
            shrink = (self.max_norm / (norms + CLIP_EPSILON)).clamp(max=1.0)
            gradients = {
                name: value * beside(shrink, value).to(value.dtype)
                for name, value in gradients.items()
            }
        for (members, (rate, steps)), group in zip(
            self._neighbours, self.adam.param_groups, strict=True
        ):
            if steps:
                left = 1 - (torch.as_tensor(step, device=group["lr"].device) - 1) / steps
                group["lr"].copy_(rate * left.clamp(min=0))
            for parameter, gradient in zip(group["params"], gradients.values(), strict=True):
                # The fused kernel takes both to lie alike in memory, and does not look.
                parameter.grad = gradient[members].contiguous()
        self.adam.step()
        return norms

    def set_rate(self, rate: Tensor) -> None:
        """Give all members one rate, 0-d on the device, which may change at every step."""
        for group in self.adam.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, but the parameters."""
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a CUDA graph must be recorded again."""
        self.adam.load_state_dict(state)


def beside(values: Tensor, other: Tensor) -> Tensor:
    """Return values of members, [P] or [P, 1], shaped to stand beside another tensor [P, ...]."""
    return values.view(-1, *[1] * (other.dim() - 1))


def equal_neighbours(keys: Sequence[Any]) -> Iterator[tuple[slice, Any]]:
    """Yield the slices of equal neighbours, and what they are."""
    start = 0
    for key, same in itertools.groupby(keys):
        stop = start + len(list(same))
        yield slice(start, stop), key
        start = stop
