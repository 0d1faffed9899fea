"""How large a gradient may be: a bound that follows the gradients that were accepted.

    own rows -> floor;   norms of accepted steps -> running mean;   both -> bound

One rollout of absurd but finite numbers has an absurd gradient. Its square enters the second
moments of Adam and stays there for thousands of steps, or for good where it overflows.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FACTOR = 1e2
"""A gradient may be this many times as large as the scale: wide, so that honest ones pass."""
PATIENCE = 10
"""After so many steps in a row of which nothing was accepted, the bound is 10 times as high."""

_MEMORY = 0.99  # of the running mean, per step
_MAX_WIDTH = 60  # tenfold so many times, every bound is above the largest float32


class GradientScale:
    """The scale of accepted gradients, and the largest norm that is accepted.

    bound = min(FACTOR * max(floor, mean) * 10^(refusals // PATIENCE), sqrt(largest number))

    `mean` is the running mean of accepted norms. The floor keeps the bound up where gradients are
    nearly 0 for a while, as before a first success. Without either there is no scale, and the
    square root alone is the bound: squares of accepted gradients are finite, and so are Adam's
    moments. If nothing at all is accepted, step after step, the bound rises: a scale that has
    really grown is not locked out for good.

    Args:
        floor: norm of a gradient that is known to be sound; 0 if there is none.
        parameters: what is trained; their dtypes say what the largest number is.

    Example:
        >>> import torch
        >>> scale = GradientScale(2.0, [torch.zeros(3)])
        >>> scale.bound
        200.0
        >>> scale.accept(50.0)
        >>> scale.bound
        5000.0
    """

    def __init__(self, floor: float, parameters: Iterable[Tensor]):
        self._limit = min(math.sqrt(torch.finfo(each.dtype).max) for each in parameters)
        self._floor = floor if floor <= self._limit else 0.0  # also 0 for NaN
        self._mean = 0.0
        self._refusals = 0  # steps in a row of which nothing was accepted

    @property
    def bound(self) -> float:
        """The largest norm that is accepted."""
        scale = max(self._floor, self._mean)
        if not scale:
            return self._limit
        width = 10.0 ** min(self._refusals // PATIENCE, _MAX_WIDTH)
        return min(FACTOR * scale * width, self._limit)

    def accept(self, norm: float) -> None:
        """Take down the norm of a step that is made."""
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * norm if self._mean else norm
        self._refusals = 0

    def refuse(self) -> None:
        """Take down a step that is not made because every gradient was too large."""
        self._refusals += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"floor": self._floor, "mean": self._mean, "refusals": self._refusals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        floor, mean, refusals = (state[name] for name in ("floor", "mean", "refusals"))
        if not (0 <= floor < math.inf and 0 <= mean < math.inf and refusals >= 0):
            raise ValueError(
                f"gradient_scale must have a finite floor and mean >= 0 and refusals >= 0, got "
                f"{state}; start anew without resume."
            )
        self._floor, self._mean, self._refusals = floor, mean, refusals


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all gradients, NaN or infinite only if one of them is.

    Summed in float64: squares of a float32 do not overflow there.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2)
        >>> weight.grad = torch.tensor([3e38, 0.0])
        >>> f"{gradient_norm([weight]):.2g}"
        '3e+38'
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no number is NaN or infinite; tensors of whole numbers are left out."""
    floats = (each.detach() for each in tensors if each.is_floating_point() and each.numel())
    # The largest of them: unlike isfinite, nothing of their size is made.
    largest = [torch.linalg.vector_norm(each, ord=math.inf) for each in floats]
    return all(math.isfinite(float(each)) for each in largest)
