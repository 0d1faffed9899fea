"""Adam of P members in stacked parameters, each with its learning rate and gradient norm.

    g <- g * min(1, max_norm / |g|)
    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    theta <- theta - rate * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

PyTorch's fused Adam does it, in its functional form, once for the neighbours of one rate; t is
counted on the device, so that a step can be replayed from a CUDA graph.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from kondo_lab.models.networks import Parameters

BETAS, EPSILON = (0.9, 0.999), 1e-8
CLIP_EPSILON = 1e-6
"""Added to a norm before it divides, as by `torch.nn.utils.clip_grad_norm_`."""


class _Neighbours(NamedTuple):
    """Members of one rate, and views of what is theirs."""

    members: slice
    rate: float | Tensor
    """A tensor where it changes."""
    first_rate: float
    decay_steps: int
    theta: list[Tensor]
    first: list[Tensor]
    """m."""
    second: list[Tensor]
    """v."""
    counts: Tensor
    """t, once for every view."""


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
        self._state = {
            kind: {name: torch.zeros_like(value) for name, value in parameters.items()}
            for kind in ("first", "second")
        }
        """m and v."""
        some = next(iter(parameters.values()))
        pace = list(zip(rates, decay_steps or [0] * len(rates), strict=True))
        self._groups: list[_Neighbours] = []
        for members, (rate, steps) in equal_neighbours(pace):
            # A number that changes lives on the device.
            own_rate = torch.tensor(rate, device=some.device) if steps else rate
            theta, first, second = (
                [value.detach()[members] for value in each.values()]
                for each in (parameters, *self._state.values())
            )
            # Every view has a count of its own: the kernel adds 1 to each of a list.
            counts = torch.zeros(len(parameters), device=some.device)
            self._groups.append(
                _Neighbours(members, own_rate, rate, steps, theta, first, second, counts)
            )
        self._capturable = some.device.type == "cuda"

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
        for own in self._groups:
            if own.decay_steps:
                assert isinstance(own.rate, Tensor)
                left = 1 - (torch.as_tensor(step, device=own.rate.device) - 1) / own.decay_steps
                own.rate.copy_(own.first_rate * left.clamp(min=0))
            some = list(gradients.values())
            if len(self._groups) > 1:
                some = [gradient[own.members] for gradient in some]
            adam(
                own.theta,
                # The fused kernel takes all to lie alike in memory, and does not look.
                [gradient.contiguous() for gradient in some],
                own.first,
                own.second,
                [],
                list(own.counts.unbind()),
                fused=True,
                capturable=self._capturable,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=own.rate,
                weight_decay=0.0,
                eps=EPSILON,
                maximize=False,
            )
        return norms

    def set_rate(self, rate: Tensor) -> None:
        """Give all members one rate, 0-d on the device, which may change at every step."""
        self._groups = [own._replace(rate=rate, decay_steps=0) for own in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, but the parameters."""
        return {"steps": [own.counts for own in self._groups]} | self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore, in place, what `state_dict` returned."""
        for group, steps in zip(self._groups, state["steps"], strict=True):
            group.counts.copy_(steps)
        for kind, own in self._state.items():
            for name, value in own.items():
                value.copy_(state[kind][name])


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
