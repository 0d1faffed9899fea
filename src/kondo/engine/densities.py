"""The density of a distribution at its mode, the reference of surprisal for continuous actions.

torch.distributions knows most modes. It has NaN, or a wrong one, where a density is constant or
highest at the end of its support: those are below, infinite in rows where no bound exists.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Dirichlet,
    Distribution,
    FisherSnedecor,
    Independent,
    Kumaraswamy,
    Uniform,
    Weibull,
)

# The methods of torch's distributions have no types.
# mypy: disallow-untyped-calls=False, warn-return-any=False


def log_prob_at_mode(distribution: Distribution) -> Tensor:
    """Return the logarithm of the highest density, one per element; infinite or NaN without one."""
    if isinstance(distribution, Independent):
        inner = log_prob_at_mode(distribution.base_dist)
        summed = distribution.reinterpreted_batch_ndims
        return inner.flatten(inner.ndim - summed).sum(-1) if summed else inner
    # A subclass may have another density.
    known = _AT_MODE.get(type(distribution))
    if known is not None:
        return known(distribution)
    try:
        mode = distribution.mode
    except NotImplementedError:
        raise ValueError(
            f"distribution(observations) must have a mode where actions are continuous, and "
            f"{type(distribution).__name__} has none; give kondo.backward "
            f"screen=(log_probs, mode_log_probs), for example those of the distribution before its "
            f"transform."
        ) from None
    try:
        return distribution.log_prob(mode)
    except ValueError as error:
        raise ValueError(
            f"distribution(observations) must have its mode inside its support, and that of "
            f"{type(distribution).__name__} is not, in some row: {error} Give kondo.backward "
            f"screen=(log_probs, mode_log_probs) with another reference."
        ) from error


def _of_uniform(distribution: Uniform) -> Tensor:
    return -distribution.entropy()


def _of_beta(distribution: Beta) -> Tensor:
    shapes = (distribution.concentration1, distribution.concentration0)
    return _of_dirichlet(Dirichlet(torch.stack(shapes, -1)))


def _of_dirichlet(distribution: Dirichlet) -> Tensor:
    shapes = distribution.concentration
    above = (shapes - 1).clamp(min=0)
    total = above.sum(-1, keepdim=True)
    # All shapes 1: constant, so that any place will do.
    mode = torch.where(total > 0, above / total, 1 / shapes.shape[-1])
    return _bounded((shapes >= 1).all(-1), distribution.log_prob(mode))


def _of_kumaraswamy(distribution: Kumaraswamy) -> Tensor:
    """a b x^(a - 1) (1 - x^a)^(b - 1), highest at x^a = (a - 1) / (ab - 1)."""
    a, b = distribution.concentration1, distribution.concentration0
    power = torch.where(a * b > 1, (a - 1) / (a * b - 1), 0.5)
    rise, fall = torch.xlogy((a - 1) / a, power), torch.xlogy(b - 1, 1 - power)
    return _bounded((a >= 1) & (b >= 1), a.log() + b.log() + rise + fall)


def _of_weibull(distribution: Weibull) -> Tensor:
    """k / s y^(k - 1) exp(-y^k) with y = x / s, highest at y^k = (k - 1) / k."""
    shape = distribution.concentration
    power = (shape - 1) / shape
    at_mode = (shape / distribution.scale).log() + torch.xlogy(power, power) - power
    return _bounded(shape >= 1, at_mode)


def _of_fisher_snedecor(distribution: FisherSnedecor) -> Tensor:
    """Highest at 0, of density 1, with two degrees of freedom."""
    inside = distribution.df1 > 2
    at_mode = distribution.log_prob(torch.where(inside, distribution.mode, 1.0))
    return _bounded(distribution.df1 >= 2, torch.where(inside, at_mode, 0.0))


def _bounded(where: Tensor, at_mode: Tensor) -> Tensor:
    return torch.where(where, at_mode, math.inf)


_AT_MODE: dict[type[Distribution], Callable[[Any], Tensor]] = {
    Beta: _of_beta,
    Dirichlet: _of_dirichlet,
    FisherSnedecor: _of_fisher_snedecor,
    Kumaraswamy: _of_kumaraswamy,
    Uniform: _of_uniform,
    Weibull: _of_weibull,
}
