"""What the step knows of a policy: log-probs of rows, and whatever else the policy brings.

A function brings log-probs alone. An object with a method `kondo_policy(log_prob)`, such as
`kondo.lm.CausalLM`, also brings which elements count, the unit, how kept rows are compacted, and
what a row costs. So there is one `kondo.backward` for all of them.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kondo.engine.compact import MicroBatch, micro_batches
from kondo.engine.screen import LogProb, Screen
from kondo.engine.select import Selection, Unit


class Policy:
    """A policy as the step sees it: this class for a plain function, subclasses know more.

    Args:
        log_prob: rows -> [n] or [n, T], differentiable.
    """

    unit: Unit = "sample"
    """What is gated unless the caller says so."""
    screen_rows: Literal["all", "promising"] = "all"
    """Which rows a screen looks at unless the caller says so."""
    plain: bool = True
    """Whether the number of micro-batches follows from the number of rows and `micro_batch`."""
    screen: Screen | None = None
    """What a screening forward calls; None for `log_prob`."""

    def __init__(self, log_prob: LogProb):
        self.log_prob = log_prob

    def check(
        self,
        batch: Any,
        advantages: Tensor,
        screen: Any,
        loss_inputs: dict[str, Tensor],
        unit: Unit,
    ) -> None:
        """Raise a ValueError for arguments that cannot be right for this policy."""

    def check_log_probs(self, log_probs: Tensor, rows: Any) -> None:
        """Raise a ValueError for a draft's log-probs that cannot be those of these rows."""

    def faults(self, batch: Any) -> Iterator[str]:
        """Yield, in words with the remedy, what makes this policy one that rows cannot be dropped
        from, beyond what is tried with any policy; `batch` has a few rows."""
        yield from ()

    def mask(self, batch: Any) -> Tensor | None:
        """Return which elements count, where the batch itself says so."""
        return None

    def num_counted(self, batch: Any) -> int | None:
        """Return how many elements of the policy's own mask count, where the host knows it."""
        return None

    def compact(
        self,
        batch: Any,
        advantages: Tensor,
        selection: Selection,
        *,
        loss_inputs: dict[str, Tensor],
        size: int | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield the kept rows in micro-batches; see `kondo.engine.compact.micro_batches`."""
        return micro_batches(batch, advantages, selection, loss_inputs=loss_inputs, size=size)

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many forwards a screen of the batch's `size` rows makes."""
        return -(-size // (chunk or size)) if size else 0

    def row_costs(self, batch: Any, selection: Selection) -> Tensor:
        """Return what each kept row costs, [R] int64 on the CPU: elements that count."""
        mask = selection.mask
        counted = mask if mask.ndim == 1 else mask.sum(dim=1)
        return counted.index_select(0, selection.rows).long().cpu()

    def cheapest_row(self, batch: Any) -> int:
        """Return a row that costs little to run where a rank has nothing to train."""
        return 0

    def one_element(self, batch: Any, like: Tensor) -> Tensor:
        """Return a bool tensor like `like`, [1, ...], that is True at one element to read."""
        first = torch.zeros_like(like)
        first.view(-1)[0] = True
        return first


def policy_of(given: Any, name: str = "policy") -> Policy:
    """Return what the step knows of a policy: a function, or an object that brings more.

    Looks at the object itself, at the owner of a bound method, and inside DDP.

    Raises:
        ValueError: it is neither.
    """
    owner = given.__self__ if inspect.ismethod(given) else given
    if isinstance(owner, Policy):
        return owner
    for candidate in (owner, getattr(owner, "module", None)):
        make = getattr(candidate, "kondo_policy", None)
        if callable(make):
            # A bound method or an adapter names no other forward; a wrapped module is the forward.
            return _checked(make(given if isinstance(given, torch.nn.Module) else None))
    if not callable(given):
        raise ValueError(
            f"{name} must be callable on rows, a kondo.DistributionPolicy or a kondo.lm.CausalLM, "
            f"got {type(given).__name__}."
        )
    return Policy(given)


def _checked(policy: Any) -> Policy:
    if not isinstance(policy, Policy):
        raise ValueError(
            f"kondo_policy must return a kondo.engine.policy.Policy, got {type(policy).__name__}."
        )
    return policy
