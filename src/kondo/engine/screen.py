"""Stage 1, screen: log-probs of the units that can matter, without a graph.

screen=None      no-grad forward of log_prob in chunks      costs F
screen=tensor    log-probs already known (the rollout's)    costs nothing
screen=callable  a draft: any cheaper log_prob              costs the draft's forward

No forward is made where the gate's signal does not read log-probs. Modules that were given are in
evaluation mode meanwhile; a plain function runs as it is.

A density can exceed 1. Where a screen gives a pair (log_probs, mode_log_probs), the gate sees
log pi(a) - log pi(mode) <= 0; see `from_mode`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import check_float
from kondo.core.base_gate import needs_log_probs
from kondo.engine.policy import LogProb, Policy, Screen, evaluation, modules_of, policy_of
from kondo.engine.selection import Counts

if TYPE_CHECKING:
    from kondo.engine.group import Group
    from kondo.engine.inputs import Inputs

Forward = Callable[..., Tensor]
"""(some rows of the batch, count=True) -> their log-probs, by forwards without a graph."""


class Screened(NamedTuple):
    """What a screen found."""

    log_probs: Tensor
    """[N] or [N, T]; 0 in rows that were not screened, so that their delight is 0."""
    rows: Tensor | None
    """[N] bool: screened rows; None for all."""
    num_rows: int
    """Rows that entered a forward."""
    at_mode: Tensor | None
    """Log-densities at the mode that log_probs are measured from, in their shape and 0 where they
    are 0; None for log-probs of discrete actions."""
    known: bool = True
    """Whether these are log-probs, rather than stand-ins that nobody looks at."""
    elements: int | None = None
    """Elements that count in the screened rows; None for all."""

    @property
    def density(self) -> bool:
        """Whether log_probs are densities, measured from the mode."""
        return self.at_mode is not None

    def counts(self, counts: Counts, mask: Tensor) -> Counts:
        """Return the counts of a selection with what the screen knows; mask is like log_probs."""
        counts = counts._replace(rows_screened=self.num_rows)
        if self.elements is not None:
            counts = counts._replace(surprised=self.elements)
        if not self.known:
            return counts._replace(surprisal=math.nan)
        if self.at_mode is None:
            return counts
        # -log pi(a) = (log pi(mode) - log pi(a)) - log pi(mode): the first is a gate's surprisal.
        at_mode = torch.where(mask, self.at_mode.to(mask.device), 0.0).sum(dtype=torch.float64)
        return counts._replace(surprisal=counts.surprisal - float(at_mode))


def screen(inputs: "Inputs", group: "Group") -> Screened:
    """Return log-probs of every unit that can matter to the gate, without a graph.

    The kept set is that of a screen of all rows. With many ranks the counts are those of all of
    them, and every rank makes the same number of forwards.
    """
    assert inputs.gate is not None
    known, batch = inputs.rows.screen, inputs.rows.batch
    given = known is not None
    if known is None and not needs_log_probs(inputs.gate.signal):
        known = unseen(inputs)
        if group.total(int(known is None))[0]:  # one rank cannot tell: all of them screen
            known = None
    if isinstance(known, Tensor):
        log_probs = known
        if inputs.rows.size:
            log_probs = screen_log_probs(inputs.log_prob, batch, screen=known)
        return Screened(log_probs.to(inputs.device), None, 0, inputs.at_mode, known=given)
    run = Forwards(inputs)
    if inputs.screens_promising:
        from kondo.engine.promising import screen_promising  # built on this module

        found = screen_promising(inputs, group, run)
        if found is not None:
            return found
    log_probs = required(group.forwards(run, batch, run.calls(batch), inputs.spare))
    return Screened(log_probs.to(inputs.device), None, run.rows, run.at_mode)


class Forwards:
    """Screens some rows of the batch, counts them, and says whether it found densities."""

    def __init__(self, inputs: "Inputs"):
        given = inputs.rows.screen
        draft = inputs.policy.screen if given is None else given
        self._log_prob, self._modules = inputs.log_prob, inputs.modules
        self._draft = None if draft is None else partial(self._checked, draft, inputs.policy)
        self._policy = inputs.policy
        if given is not None:
            self._policy, log_prob = policy_of(given, "screen")
            self._modules = [*self._modules, *modules_of(self._policy, log_prob)]
        self._chunk = inputs.screen_chunk
        self.rows = 0
        self._modes: list[Tensor] = []  # of each forward; without values where it was a filler

    def __call__(self, some: Any, *, count: bool = True) -> Tensor:
        """Return the log-probs of some rows; `count` says whether they are the batch's own."""
        self.rows += rows.num_rows(some) if count else 0
        before = len(self._modes)
        found = screen_log_probs(
            self._log_prob, some, screen=self._draft, chunk=self._chunk, modules=self._modules
        )
        if not count:
            self._modes[before:] = [modes[:0] for modes in self._modes[before:]]
        return found

    @property
    def density(self) -> bool:
        """Whether these are densities."""
        return bool(self._modes)

    @property
    def at_mode(self) -> Tensor | None:
        """Log-densities at the mode of all rows that were screened, in the order of forwards."""
        return torch.cat(self._modes) if self._modes else None

    def calls(self, some: Any) -> int:
        """Return how many forwards these rows take."""
        return self._policy.screen_calls(some, rows.leaves(some)[0].shape[0], self._chunk)

    def _checked(self, draft: Screen, policy: Policy, some: Any) -> Any:
        log_probs, at_mode = from_mode(draft(some), "screen(rows)")
        if at_mode is not None:
            self._modes.append(at_mode)
        if isinstance(log_probs, Tensor):  # anything else is refused by the screen
            policy.check_log_probs(log_probs, some)
        return log_probs


def required(log_probs: Tensor | None) -> Tensor:
    """Return the log-probs of forwards; some rank has a row."""
    assert log_probs is not None
    return log_probs


def unseen(inputs: "Inputs") -> Tensor | None:
    """Return zeros in the shape of log-probs that nobody looks at; None where it is not known."""
    advantages, size = inputs.rows.advantages, inputs.rows.size
    given = [p.shape for p in (advantages, inputs.rows.mask) if isinstance(p, Tensor)]
    if inputs.unit == "sample":
        return advantages.new_zeros(size) if all(len(shape) == 1 for shape in given) else None
    # One column stands for a value per row, whatever their tokens.
    widths = [shape[1] for shape in given if len(shape) == 2 and shape[1] > 1]
    return advantages.new_zeros(size, widths[0]) if widths else None


def screen_log_probs(
    log_prob: LogProb,
    batch: Any,
    *,
    screen: Tensor | LogProb | None = None,
    chunk: int | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> Tensor:
    """Return detached log-probs of all rows, [N] or [N, T].

    Args:
        log_prob: rows -> [n] or [n, T].
        batch: any nest of tensors with N rows.
        screen: None, log-probs that already exist, or a draft like log_prob.
        chunk: rows per no-grad forward; all at once if None.
        modules: those that are in evaluation mode meanwhile; by default what was given is one, or a
            method of one or of a policy.
    """
    size = rows.num_rows(batch)
    if isinstance(screen, Tensor):
        known = check_float("screen", screen).detach()
        return _check_log_probs("screen", known, size)
    name = "log_prob" if screen is None else "screen"
    model = log_prob if screen is None else screen
    if not callable(model):
        raise ValueError(
            f"{name} must be callable on rows{'' if screen is None else ', a tensor or None'}, got "
            f"{type(model).__name__}."
        )
    if modules is None:
        modules = modules_of(policy_of(model, name)[0], model)
    parts = []
    with torch.no_grad(), evaluation(modules):
        for start in range(0, size, chunk or size):
            piece = slice(start, min(start + (chunk or size), size))
            whole = piece == slice(0, size)
            part = check_float(f"{name}(rows)", model(batch if whole else rows.take(batch, piece)))
            parts.append(_check_log_probs(f"{name}(rows)", part, piece.stop - piece.start))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_mode(given: Any, name: str = "screen") -> tuple[Any, Tensor | None]:
    """Return log-probs, and the log-densities at the mode that they are measured from, if any.

    Args:
        given: log-probs, or a pair (log_probs, mode_log_probs) of one shape.
        name: of the argument, for messages.
    """
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2 or not all(isinstance(part, Tensor) for part in given):
        kinds = [type(part).__name__ for part in given]
        raise ValueError(
            f"{name} must be log-probs or a pair (log_probs, mode_log_probs), got {kinds}."
        )
    log_probs, modes = (check_float(name, part).detach() for part in given)
    if log_probs.shape != modes.shape:
        raise ValueError(
            f"{name} must hold log_probs and mode_log_probs of one shape, got "
            f"{list(log_probs.shape)} and {list(modes.shape)}; give the mode's log-density for "
            f"every taken action."
        )
    modes = modes.to(log_probs.device)
    return log_probs - modes, modes


def _check_log_probs(name: str, log_probs: Tensor, size: int) -> Tensor:
    if log_probs.ndim not in (1, 2) or log_probs.shape[0] != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, got "
            f"{list(log_probs.shape)}; return the log-prob of each taken action, not of all."
        )
    return log_probs
