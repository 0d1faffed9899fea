"""A policy by `torch.distributions`: discrete actions, or continuous ones and their modes."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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

from kondo.core.base_gate import Unit
from kondo.engine.policy import LogProb, Policy, given_modules

# The methods of torch's distributions have no types.
# mypy: disallow-untyped-calls=False, warn-return-any=False

# How far from 1 a sum of probabilities may be, in half precision too.
_ONE = 0.02
_INSTEAD = "give kondo.backward screen=(log_probs, mode_log_probs)"


class DistributionPolicy(Policy):
    """A policy that is a distribution over actions, for a batch (observations, actions).

    Discrete actions:    a gate sees  log pi(a|s)                     <= 0
    Continuous actions:  a gate sees  log pi(a|s) - log pi(mode|s)    <= 0

    A density can exceed 1, so its logarithm alone can be positive. Measured from the mode it cannot
    be, and delight and every other signal work as for discrete actions. The loss is given
    log pi(a|s) in both cases.

    Args:
        distribution: observations -> a `torch.distributions.Distribution` with one action per row:
            its batch shape is [n]. A module that returns one is fine. Observations are any nest of
            tensors with n rows. The density at the mode must be finite.

    Example:
        >>> import torch, kondo
        >>> from torch.distributions import Independent, Normal
        >>> mean, log_std = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.zeros(2))
        >>> policy = kondo.DistributionPolicy(
        ...     lambda observations: Independent(Normal(mean(observations), log_std.exp()), 1)
        ... )
        >>> batch = torch.randn(100, 4), torch.randn(100, 2)
        >>> kondo.backward(policy, batch, torch.randn(100), gate=kondo.Gate(rate=0.1)).kept
        10
    """

    def __init__(self, distribution: Callable[[Any], Distribution]):
        if not callable(distribution):
            raise ValueError(
                f"distribution must be callable on observations and return a "
                f"torch.distributions.Distribution, got {type(distribution).__name__}."
            )
        self.distribution = distribution

    def modules(self) -> Sequence[nn.Module]:
        """Return the module that gives the distribution, where it is one, or a method of one."""
        return given_modules(self.distribution)

    def log_prob(self, rows: tuple[Any, Tensor]) -> Tensor:
        """Return log pi(a|s) of rows (observations, actions), [n], differentiable."""
        return self._log_prob(rows)[1]

    def screen(self, rows: tuple[Any, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Return log pi(a|s), [n]; for a density also log pi(mode|s), [n]."""
        found, log_probs = self._log_prob(rows)
        try:
            discrete = bool(getattr(found.support, "is_discrete", False))
        except NotImplementedError:  # a distribution that does not say: its log-probs may exceed 0
            discrete = False
        if discrete:
            return log_probs
        at_mode = log_prob_at_mode(found)
        unbounded = ~at_mode.isfinite()
        if bool(unbounded.any()):
            raise ValueError(
                f"distribution(observations) must have a finite density at its mode, and "
                f"{type(found).__name__} has none in row {int(unbounded.nonzero()[0])} "
                f"({int(unbounded.sum())} in all) of the {len(at_mode)} rows of this forward; "
                f"bound its parameters, as in concentration = 1 + softplus(...), or {_INSTEAD} "
                f"with another reference."
            )
        return log_probs, at_mode

    def check(
        self,
        batch: Any,
        advantages: Tensor,
        screen: Any,
        loss_inputs: dict[str, Tensor],
        unit: Unit,
    ) -> None:
        """Raise a ValueError unless the batch is a pair and samples are gated."""
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ValueError(
                f"batch must be a pair (observations, actions) for a DistributionPolicy, got "
                f"{type(batch).__name__}; give a function rows -> log-probs for other batches."
            )
        if unit != "sample":
            raise ValueError(
                f'unit must be "sample" for a DistributionPolicy, which has one action per row, '
                f"got {unit!r}; give a function rows -> log-probs [n, T] for several."
            )

    def faults(self, batch: Any, log_prob: LogProb) -> Iterator[str]:
        """Yield that probabilities of all actions do not sum to 1, where they can be asked for."""
        with torch.no_grad():
            found, _ = self._log_prob(batch)
            if not found.has_enumerate_support:
                return
            every = found.enumerate_support()
            if every.shape[1:] != batch[1].shape:  # its actions are coded otherwise: one-hot, say
                return
            total = found.log_prob(every).double().exp().sum(0)
        worst = total.flatten()[(total - 1).abs().argmax()]
        if not abs(float(worst) - 1) <= _ONE:
            yield (
                f"Probabilities of {type(found).__name__} sum to {float(worst):.3g} over all "
                f"actions, and must sum to 1: its log_prob is no log-probability."
            )

    def _log_prob(self, rows: tuple[Any, Tensor]) -> tuple[Distribution, Tensor]:
        observations, actions = rows
        found = self.distribution(observations)
        if not isinstance(found, Distribution):
            raise ValueError(
                f"distribution(observations) must return a torch.distributions.Distribution, got "
                f"{type(found).__name__}."
            )
        log_probs = found.log_prob(actions)
        if log_probs.shape != actions.shape[:1]:
            raise ValueError(
                f"distribution(observations).log_prob(actions) must have shape "
                f"{list(actions.shape[:1])}, one value per row, got {list(log_probs.shape)}; where "
                f"an action has several numbers, wrap the distribution in "
                f"torch.distributions.Independent(distribution, 1)."
            )
        return found, log_probs


def log_prob_at_mode(distribution: Distribution) -> Tensor:
    """Return the logarithm of the highest density, one per element; infinite or NaN without one.

    torch.distributions knows most modes. It has NaN, or a wrong one, where a density is constant or
    highest at the end of its support: those are below.
    """
    if isinstance(distribution, Independent):
        inner = log_prob_at_mode(distribution.base_dist)
        summed = distribution.reinterpreted_batch_ndims
        return inner.flatten(inner.ndim - summed).sum(-1) if summed else inner
    # A subclass may have another density.
    known = _AT_MODE.get(type(distribution))
    if known is not None:
        return known(distribution)
    name = type(distribution).__name__
    try:
        return distribution.log_prob(distribution.mode)
    except NotImplementedError:
        raise ValueError(
            f"distribution(observations) must have a mode where actions are continuous, and {name} "
            f"has none; {_INSTEAD}, for example those of the distribution before its transform."
        ) from None
    except ValueError as error:
        raise ValueError(
            f"distribution(observations) must have its mode inside its support, and that of {name} "
            f"is not, in some row: {error} Or {_INSTEAD} with another reference."
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
