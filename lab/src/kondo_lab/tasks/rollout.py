"""What a task gives to the training loop."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kondo import Unit


class Rollout(NamedTuple):
    """One batch of experience: N samples, each one row and one reward."""

    rows: dict[str, Tensor]
    """What the policy's log_prob takes, N rows."""
    log_probs: Tensor
    """[N] or [N, T]: those the policy sampled with, hence exact for its current weights."""
    rewards: Tensor
    """[N] float in [0, 1]."""
    advantages: Tensor
    """[N] float, centred only."""


class Task(Protocol):
    """A source of experience for one kind of policy, with its own generators."""

    unit: Unit
    """What a gate keeps or skips here."""

    def rollout(self, policy: Any) -> Rollout:
        """Draw inputs, let the policy act, return rewards and advantages."""

    def held_out_error(self, policy: Any) -> float | None:
        """Return the error of the policy's greedy actions on held-out inputs, if there are any."""
