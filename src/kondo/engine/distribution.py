"""A policy by `torch.distributions`: discrete actions, or continuous ones and their modes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from kondo.core.base_gate import Unit
from kondo.engine.densities import log_prob_at_mode
from kondo.engine.policy import LogProb, Policy, given_modules

_ONE = 0.02
"""How far from 1 a sum of probabilities may be, in half precision too."""


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
        observations, actions = self._pair(rows)
        return _one_per_row(self._distribution(observations).log_prob(actions), actions)

    def screen(self, rows: tuple[Any, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Return log pi(a|s), [n]; for a density also log pi(mode|s), [n]."""
        observations, actions = self._pair(rows)
        found = self._distribution(observations)
        log_probs = _one_per_row(found.log_prob(actions), actions)
        if _is_discrete(found):
            return log_probs
        at_mode = log_prob_at_mode(found)
        unbounded = ~at_mode.isfinite()
        if bool(unbounded.any()):
            raise ValueError(
                f"distribution(observations) must have a finite density at its mode, and "
                f"{type(found).__name__} has none in row {int(unbounded.nonzero()[0])} "
                f"({int(unbounded.sum())} in all) of the {len(at_mode)} rows of this forward; "
                f"bound its parameters, as in concentration = 1 + softplus(...), or give "
                f"kondo.backward screen=(log_probs, mode_log_probs) with another reference."
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
        observations, actions = self._pair(batch)
        with torch.no_grad():
            found = self._distribution(observations)
            if not found.has_enumerate_support:
                return
            every = found.enumerate_support()
            if every.shape[1:] != actions.shape:  # its actions are coded otherwise: one-hot, say
                return
            total = found.log_prob(every).double().exp().sum(0)
        worst = total.flatten()[(total - 1).abs().argmax()]
        if not abs(float(worst) - 1) <= _ONE:
            yield (
                f"Probabilities of {type(found).__name__} sum to {float(worst):.3g} over all "
                f"actions, and must sum to 1: its log_prob is no log-probability."
            )

    def _pair(self, rows: Any) -> tuple[Any, Tensor]:
        """Return observations and actions."""
        observations, actions = rows
        return observations, actions

    def _distribution(self, observations: Any) -> Distribution:
        found = self.distribution(observations)
        if not isinstance(found, Distribution):
            raise ValueError(
                f"distribution(observations) must return a torch.distributions.Distribution, got "
                f"{type(found).__name__}."
            )
        return found


def _one_per_row(log_probs: Tensor, actions: Tensor) -> Tensor:
    if log_probs.shape != actions.shape[:1]:
        raise ValueError(
            f"distribution(observations).log_prob(actions) must have shape "
            f"{list(actions.shape[:1])}, one value per row, got {list(log_probs.shape)}; where an "
            f"action has several numbers, wrap the distribution in "
            f"torch.distributions.Independent(distribution, 1)."
        )
    return log_probs


def _is_discrete(distribution: Distribution) -> bool:
    try:
        support = distribution.support
    except NotImplementedError:  # a distribution that does not say: its log-probs may exceed 0
        return False
    return bool(getattr(support, "is_discrete", False))
