"""What a step knows of a policy: a function brings log-probs of rows, a `Policy` also brings which
elements count, the unit, how kept rows are compacted, and what a row costs.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.core.base_gate import Unit
from kondo.engine.differentiate import MicroBatch
from kondo.engine.selection import KeptRows

LogProb = Callable[[Any], Tensor]
"""Rows -> [n] or [n, T] log-probs of the taken actions."""


class Policy:
    """A policy that knows more of its rows than their log-probs. Subclasses define `log_prob`.

    Example:
        >>> import torch, kondo
        >>> class Bernoulli(kondo.Policy):
        ...     def __init__(self):
        ...         self.net = torch.nn.Linear(4, 1)
        ...     def modules(self):
        ...         return [self.net]
        ...     def log_prob(self, rows):
        ...         states, actions = rows
        ...         return -torch.nn.functional.softplus(-actions * self.net(states).squeeze(1))
        >>> batch = torch.randn(100, 4), torch.ones(100)
        >>> kondo.backward(Bernoulli(), batch, torch.randn(100), gate=kondo.Gate(rate=0.1)).kept
        10
    """

    unit: Unit = "sample"
    """What is gated unless the caller says so."""
    screen_rows: Literal["all", "promising"] = "all"
    """Which rows a screen looks at unless the caller says so."""
    plain: bool = True
    """Whether the number of micro-batches follows from the number of rows and `micro_batch`."""
    screen: Callable[[Any], Tensor | tuple[Tensor, Tensor]] | None = None
    """What a screening forward calls, rows -> log-probs, or for densities a pair of those and of
    log-probs at the mode; None for `log_prob`."""

    def log_prob(self, rows: Any) -> Tensor:
        """Return log pi(a|s) of the taken actions, [n] or [n, T], differentiable."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob(rows).")

    def modules(self) -> Sequence[nn.Module]:
        """Return the modules that are in evaluation mode during a screen, and that ranks train."""
        return ()

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

    def faults(self, batch: Any, log_prob: LogProb) -> Iterator[str]:
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
        kept: KeptRows,
        *,
        loss_inputs: dict[str, Tensor],
        size: int | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield the kept rows, `size` at a time, in batch order; no copy where all are kept."""
        keep = None if kept.whole else kept.keep
        parts = (batch, advantages, loss_inputs, keep, kept.weight)
        num_kept = kept.rows.numel()
        step = size or num_kept
        everything = num_kept == kept.keep.shape[0]
        for start in range(0, num_kept, step):
            stop = min(start + step, num_kept)
            index = slice(start, stop) if everything else kept.rows[start:stop]
            taken = parts if everything and step >= num_kept else rows.take(parts, index)
            num_tokens = 0 if kept.whole else kept.mask[index].sum()
            yield MicroBatch._make((*taken, stop - start, num_tokens, False, None))

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many forwards a screen of the batch's `size` rows makes."""
        return -(-size // (chunk or size)) if size else 0

    def row_costs(self, batch: Any, kept: KeptRows) -> Tensor:
        """Return what each kept row costs, [R] int64 on the CPU: elements that count."""
        mask = kept.mask
        counted = mask if mask.ndim == 1 else mask.sum(dim=1)
        return counted.index_select(0, kept.rows).long().cpu()

    def cheapest_row(self, batch: Any) -> int:
        """Return a row that costs little to run where a rank has nothing to train."""
        return 0

    def one_element(self, batch: Any, like: Tensor) -> Tensor:
        """Return a bool tensor like `like`, [1, ...], that is True at one element to read."""
        first = torch.zeros_like(like)
        first.view(-1)[0] = True
        return first


def policy_of(given: Any, name: str = "policy") -> tuple[Policy, LogProb]:
    """Return what a step knows of a policy, and what it calls for log-probs.

    Looks at the object itself, at the owner of a bound method, and inside DDP.
    """
    owner = given.__self__ if inspect.ismethod(given) else given
    if isinstance(owner, Policy):
        return owner, owner.log_prob if given is owner else given
    for candidate in (owner, getattr(owner, "module", None)):
        known = getattr(candidate, "kondo_policy", None)
        if isinstance(known, Policy):  # of a module whose forward gives its log-probs
            wrapped = given if isinstance(given, nn.Module) else candidate
            return known, wrapped if isinstance(wrapped, nn.Module) else known.log_prob
    if not callable(given):
        raise ValueError(
            f"{name} must be callable on rows, a kondo.DistributionPolicy or a kondo.lm.CausalLM, "
            f"got {type(given).__name__}."
        )
    return Policy(), given  # a plain function brings log-probs alone


def given_modules(given: Any) -> list[nn.Module]:
    """Return the module that a callable is, or that its method belongs to; [] for a function."""
    while isinstance(given, functools.partial):
        given = given.func
    owner = given.__self__ if inspect.ismethod(given) else given
    return [owner] if isinstance(owner, nn.Module) else []


def modules_of(policy: Policy, log_prob: Any) -> list[nn.Module]:
    """Return the modules of a policy: its forward's, or those that it names itself."""
    return given_modules(log_prob) or list(policy.modules())


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all that they consist of, each once."""
    return list({part: None for module in modules for part in module.modules()})


@contextmanager
def evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules, with all that they consist of, into evaluation mode; put back what was not."""
    training = [part for module in modules for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def devices_of(modules: Iterable[nn.Module], batch: Any) -> set[torch.device]:
    """Return where the work happens: the devices of the rows and of the modules' parameters."""
    firsts = (next(module.parameters(), None) for module in modules)
    return rows.devices(batch) | {first.device for first in firsts if first is not None}
