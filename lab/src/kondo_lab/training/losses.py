"""Losses that `kondo.losses` does not have: of whole answers, of a whole batch, of labels.

    loss(log_probs, advantages, **inputs) -> terms, like log_probs      of sampled actions
    loss(label_log_probs) -> terms                                      of_labels = True

A loss names the inputs that it takes among its parameters, as `kondo.losses.ppo` does:

    old_log_probs     [n, T], of whoever acted
    positive_share    [n, 1], of the whole batch, whatever was kept of it
    whole_rows        whether the T actions of a row are one answer
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kondo import losses, signals

Loss = Callable[..., Tensor]


def inputs_of(loss: Loss, given: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return those of the given inputs that the loss takes; the others are not computed."""
    taken = _taken(loss)
    return {name: make() for name, make in given.items() if name in taken}


@functools.lru_cache(maxsize=256)
def _taken(loss: Loss) -> frozenset[str]:
    return frozenset(inspect.signature(loss).parameters)


def words(loss: Loss) -> str:
    """Return a loss in words: equal for losses that are the same."""
    return repr(loss) if dataclasses.is_dataclass(loss) else signals.name_of(loss)


def short_name(loss: Loss) -> str:
    """Return a loss's name without its options."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return str(getattr(loss, "name", None) or signals.name_of(loss))


@dataclasses.dataclass(frozen=True)
class ImportanceWeighted:
    """min(pi / mu, max_weight) * PG, of actions or of whole answers: `is_pg`, `sequence_is_pg`."""

    max_weight: float = math.inf
    """Where the weight is capped; infinite leaves it exact."""
    name: ClassVar[str] = "is_pg"

    def __post_init__(self) -> None:
        if not self.max_weight > 0:
            raise ValueError(
                f"max_weight must be > 0, got {self.max_weight}; infinite leaves weights exact."
            )

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, old_log_probs: Tensor, whole_rows: bool
    ) -> Tensor:
        """Return the terms; the weight of a whole answer is that of the author's code."""
        loss = losses.sequence_is_pg if whole_rows else losses.is_pg
        return loss(log_probs, advantages, old_log_probs, max_weight=self.max_weight)


@dataclasses.dataclass(frozen=True)
class PreferenceOptimisation:
    """`kondo.losses.pmpo` for many members, whose shares of positive advantages differ."""

    beta: float = 0.0
    """Of the KL term."""
    alpha: float = 0.6
    """Weight of the preferred answers."""
    name: ClassVar[str] = "pmpo"

    def __call__(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        *,
        old_log_probs: Tensor,
        positive_share: Tensor,
    ) -> Tensor:
        """Return the terms."""
        terms = losses.pmpo(log_probs, advantages, alpha=self.alpha)
        terms = terms / torch.where(advantages > 0, positive_share, 1 - positive_share)
        return terms + self.beta * (old_log_probs - log_probs)


@dataclasses.dataclass(frozen=True)
class ExactPG:
    """-pi(label): the expected reward itself, which samples no action."""

    name: ClassVar[str] = "exact_pg"
    of_labels: ClassVar[bool] = True

    def __call__(self, label_log_probs: Tensor) -> Tensor:
        """Return the terms."""
        return -label_log_probs.exp()


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """-log pi(label)."""

    name: ClassVar[str] = "cross_entropy"
    of_labels: ClassVar[bool] = True

    def __call__(self, label_log_probs: Tensor) -> Tensor:
        """Return the terms."""
        return -label_log_probs


def is_of_labels(loss: Loss) -> bool:
    """Return whether a loss looks at labels, not at sampled actions."""
    return bool(getattr(loss, "of_labels", False))
