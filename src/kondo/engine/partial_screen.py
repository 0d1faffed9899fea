"""Which rows a step screens: none, those that can be kept, or all.

No forward is made where log-probs are known, or where the gate's signal does not read them. A hard
gate by delight keeps units of positive delight as long as there are enough of them. Delight has the
sign of the advantage, so rows with advantage <= 0 are not scored:

    rows with an advantage > 0 -> screen -> enough positive values? -> yes: the rest stays unknown
                                                                    -> no:  screen the rest too

Where that does not hold, a row whose advantages are all 0 is left out if the signal is 0 there
whatever the log-probs are, as delight is.

The kept set is that of a screen of all rows. With many ranks the counts are those of all of them,
and every rank makes the same number of forwards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kondo.core._checks import check_mask, expand_rows
from kondo.core.contract import attribute_of, needs_log_probs
from kondo.engine import rows
from kondo.engine.inputs import Inputs
from kondo.engine.policy import Policy, policy_of
from kondo.engine.screen import Screen, from_mode, screen_log_probs
from kondo.engine.select import unit_values

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


class ScreenPeers(Protocol):
    """What a screen asks of the ranks; see `kondo.engine.peers`."""

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""

    def forwards(self, run: Forward, some: Any, calls: int) -> Tensor | None:
        """Run some rows, as many forwards as every rank; None where no rank has any."""


def screen(inputs: Inputs, peers: ScreenPeers) -> Screened:
    """Return log-probs of every unit that can matter to the gate, without a graph."""
    assert inputs.gate is not None
    known, batch = inputs.rows.screen, inputs.rows.batch
    given = known is not None
    if known is None and not needs_log_probs(inputs.gate.signal):
        known = _unseen(inputs)
        if peers.total(int(known is None))[0]:  # one rank cannot tell: all of them screen
            known = None
    if isinstance(known, Tensor):
        log_probs = known
        if inputs.rows.size:
            log_probs = screen_log_probs(inputs.policy.log_prob, batch, screen=known)
        return Screened(log_probs.to(inputs.device), None, 0, inputs.at_mode, known=given)
    run = _Forward(inputs)
    if inputs.screens_promising:
        found = _screen_some(inputs, peers, run)
        if found is not None:
            return found
    log_probs = _required(peers.forwards(run, batch, run.calls(batch)))
    return Screened(log_probs.to(inputs.device), None, run.rows, run.at_mode)


def _screen_some(inputs: Inputs, peers: ScreenPeers, run: "_Forward") -> Screened | None:
    """Screen rows with a positive advantage, or with any, and the others only if they can matter.

    Returns:
        None where all rows have to be screened at once: the gate looks at all, or nothing, or
        everything, is promising.
    """
    gate = inputs.gate
    assert gate is not None
    by_sign = gate.positives_needed(1) is not None
    if not by_sign and not attribute_of(gate.signal, "zero_without_advantage", False):
        return None
    promising = _promising(inputs.rows.advantages, inputs.rows.mask, by_sign=by_sign)
    index = promising.nonzero().squeeze(1)
    num_promising, num_rows = peers.total(index.numel(), promising.numel())
    if num_promising in (0, num_rows):
        return _nothing(inputs, peers) if num_promising == 0 and not by_sign else None
    batch = inputs.rows.batch
    some = rows.take(batch, index)
    found = _required(peers.forwards(run, some, run.calls(some)))
    log_probs = _placed(found, index, promising.shape[0])
    # Values of the rest are known, they are 0; or nobody needs them.
    if not by_sign or _settled(inputs, peers, log_probs, run.density):
        return Screened(
            log_probs.to(inputs.device),
            promising if by_sign else None,
            run.rows,
            None if run.at_mode is None else _placed(run.at_mode, index, promising.shape[0]),
            elements=_num_counted(inputs.rows.mask, log_probs, promising),
        )
    others = (~promising).nonzero().squeeze(1)
    rest = rows.take(batch, others)
    missing = _required(peers.forwards(run, rest, run.calls(rest)))
    log_probs = log_probs.index_copy(0, others.to(missing.device), missing)
    order, at_mode = torch.cat([index, others]), run.at_mode
    at_mode = None if at_mode is None else _placed(at_mode, order, len(order))
    return Screened(log_probs.to(inputs.device), None, run.rows, at_mode)


def _placed(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return values of some rows at their places among all, 0 elsewhere."""
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, index.to(values.device), values)


def _nothing(inputs: Inputs, peers: ScreenPeers) -> Screened | None:
    """Return a screen of no row, for a batch without an advantage; None if its shape is unknown."""
    unseen = _unseen(inputs)
    if peers.total(int(unseen is None))[0]:
        return None
    assert unseen is not None
    return Screened(unseen.to(inputs.device), None, 0, at_mode=None, known=False)


def _num_counted(mask: Tensor | None, log_probs: Tensor, some: Tensor) -> int:
    """Return how many elements of some rows, [N] bool, count."""
    within = some.to(log_probs.device)
    within = within if log_probs.ndim == 1 else within.unsqueeze(1).expand_as(log_probs)
    counts = check_mask(mask, log_probs.shape)
    return int((within if counts is None else within & counts.to(within.device)).sum())


class _Forward:
    """Screens some rows of the batch, counts them, and says whether it found densities."""

    def __init__(self, inputs: Inputs):
        given = inputs.rows.screen
        draft = inputs.policy.screen if given is None else given
        self._log_prob = inputs.policy.log_prob
        self._draft = None if draft is None else partial(self._checked, draft, inputs.policy)
        self._policy = inputs.policy if given is None else policy_of(given, "screen")
        self._chunk = inputs.screen_chunk
        self.rows = 0
        self._modes: list[Tensor] = []  # of each forward; without values where it was a filler

    def __call__(self, some: Any, *, count: bool = True) -> Tensor:
        self.rows += rows.num_rows(some) if count else 0
        before = len(self._modes)
        found = screen_log_probs(self._log_prob, some, screen=self._draft, chunk=self._chunk)
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


def _required(log_probs: Tensor | None) -> Tensor:
    assert log_probs is not None  # some rank has a row
    return log_probs


def _unseen(inputs: Inputs) -> Tensor | None:
    """Return zeros in the shape of log-probs that nobody looks at; None where it is not known."""
    advantages, size = inputs.rows.advantages, inputs.rows.size
    given = [p.shape for p in (advantages, inputs.rows.mask) if isinstance(p, Tensor)]
    if inputs.unit == "sample":
        return advantages.new_zeros(size) if all(len(shape) == 1 for shape in given) else None
    # One column stands for a value per row, whatever their tokens.
    widths = [shape[1] for shape in given if len(shape) == 2 and shape[1] > 1]
    return advantages.new_zeros(size, widths[0]) if widths else None


def _promising(advantages: Tensor, mask: Tensor | None, *, by_sign: bool) -> Tensor:
    """Return [N] bool: rows with an advantage that counts and is positive, or is not 0."""
    given_shapes = [part.shape for part in (advantages, mask) if part is not None]
    shape = max(given_shapes, key=lambda each: (each.numel(), len(each)))
    spread = expand_rows("advantages", advantages, shape)
    found = spread > 0 if by_sign else spread != 0
    counts = check_mask(mask, shape)
    if counts is not None:
        found = found & counts.to(found.device)
    return found if found.ndim == 1 else found.any(dim=1)


def _settled(inputs: Inputs, peers: ScreenPeers, log_probs: Tensor, density: bool) -> bool:
    """Whether there is enough positive value among the rows screened, over all ranks."""
    assert inputs.gate is not None
    home = log_probs.device
    valid = check_mask(inputs.rows.mask, log_probs.shape)
    valid = torch.ones_like(log_probs, dtype=torch.bool) if valid is None else valid.to(home)
    advantages = inputs.rows.advantages.to(home)
    values, counts = unit_values(
        inputs.gate.signal, log_probs, advantages, valid, inputs.unit, density
    )
    own = torch.stack([((values > 0) & counts).sum(), counts.sum()]).tolist()
    positive, num_valid = peers.total(*(int(number) for number in own))
    needed = inputs.gate.positives_needed(num_valid)
    return needed is not None and positive >= needed
