"""Stage 1, screen: log-probs of the units that can matter, without a graph.

screen=None      no-grad forward of log_prob in chunks      costs F
screen=tensor    log-probs already known (the rollout's)    costs nothing
screen=callable  a draft: any cheaper log_prob              costs the draft's forward

No forward is made where the gate's signal does not read log-probs. Modules that were given are in
evaluation mode meanwhile; a plain function runs as it is. Where log-probs come with those at the
mode, as densities do, the gate sees log pi(a) - log pi(mode) <= 0.

A hard gate by delight keeps units of positive delight as long as there are enough of them. Delight
has the sign of the advantage, so rows with advantage <= 0 need not be scored:

    rows with an advantage > 0 -> screen -> enough positive values? -> yes: the rest stays unknown
                                                                    -> no:  screen the rest too

Where that does not hold, a row whose advantages are all 0 is left out if the signal is 0 there
whatever the log-probs are, as delight is.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import check_float, check_mask, expand_rows
from kondo.core.adapters import adapter_of
from kondo.core.unit_values import known_of, needs_log_probs, unit_values
from kondo.engine.differentiate import check_log_probs
from kondo.engine.policy import evaluation, modules_of, policy_of
from kondo.engine.selection import Counts

if TYPE_CHECKING:
    from kondo.engine.inputs import Inputs
    from kondo.engine.step import Group

Forward = Callable[..., Tensor]
"""(some rows of the batch, count=True) -> their log-probs, by forwards without a graph."""

# A forward without a graph stores no activations: its chunks can be this much larger.
_CHUNK_FACTOR = 4


class Screened(NamedTuple):
    """What a screen found."""

    log_probs: Tensor
    """[N] or [N, T]; 0 in rows that were not screened, so that their delight is 0."""
    rows: Tensor | None
    """[N] bool: rows of known value; None for all."""
    num_rows: int
    """Rows that entered a forward."""
    at_mode: Tensor | None
    """Log-densities at the mode that log_probs are measured from, in their shape and 0 where they
    are 0; None for log-probs of discrete actions."""
    elements: int | None = None
    """Elements that count and whose log-probs are known; None for all."""

    def counts(self, counts: Counts, mask: Tensor) -> Counts:
        """Return the counts of a selection with what the screen knows; mask is like log_probs."""
        known = counts.surprised if self.elements is None else self.elements
        counts = counts._replace(rows_screened=self.num_rows, surprised=known)
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
    given, found = inputs.rows.screen, None
    assert inputs.gate is not None
    if isinstance(given, Tensor):
        return Screened(given.to(inputs.device), None, 0, inputs.at_mode)
    if given is None and not needs_log_probs(inputs.gate.signal):
        found = _unseen(inputs, group)
    run = Forwards(inputs)
    if (inputs.options.screen_rows or inputs.policy.screen_rows) == "promising":
        found = found or _screen_promising(inputs, group, run)
    if found is None:
        log_probs = run.by_group(group, inputs.rows.batch)
        found = Screened(log_probs.to(inputs.device), None, run.num_rows, run.at_mode)
    return found


def _unseen(inputs: "Inputs", group: "Group") -> Screened | None:
    """Return zeros in the shape of log-probs that nobody looks at; None where it is not known."""
    advantages, size = inputs.rows.advantages, inputs.rows.size
    given = [p.shape for p in (advantages, inputs.rows.mask) if isinstance(p, Tensor)]
    # One column stands for a value per row, whatever their tokens.
    shapes: list[tuple[int, ...]] = [
        (size, *shape[1:]) for shape in given if len(shape) == 2 and shape[1] > 1
    ]
    if inputs.unit == "sample":
        shapes = [(size,)] if all(len(shape) == 1 for shape in given) else []
    if group.total(int(not shapes))[0]:  # one rank cannot tell: all of them screen
        return None
    return Screened(advantages.new_zeros(shapes[0]).to(inputs.device), None, 0, None, elements=0)


def _screen_promising(inputs: "Inputs", group: "Group", run: "Forwards") -> Screened | None:
    """Screen rows with a positive advantage, or with any, and the others only if they can matter.

    Returns None where all rows have to be screened at once: the gate looks at all, or nothing, or
    everything, is promising.
    """
    gate, advantages, mask = inputs.gate, inputs.rows.advantages, inputs.rows.mask
    assert gate is not None
    by_sign = adapter_of(gate).positives_needed(1) is not None
    if not by_sign and not known_of(gate.signal).zero_without_advantage:
        return None
    given = [part.shape for part in (advantages, mask) if part is not None]
    shape = max(given, key=lambda each: (each.numel(), len(each)))
    spread, counts = expand_rows("advantages", advantages, shape), check_mask(mask, shape)
    promising = spread > 0 if by_sign else spread != 0
    promising = promising if counts is None else promising & counts
    promising = promising if promising.ndim == 1 else promising.any(dim=1)
    index = promising.nonzero().squeeze(1)
    num_promising, num_rows = group.total(index.numel(), promising.numel())
    if num_promising in (0, num_rows):
        return _unseen(inputs, group) if num_promising == 0 and not by_sign else None
    log_probs = run.by_group(group, rows.take(inputs.rows.batch, index))
    home, at_mode, known = log_probs.device, run.at_mode, None
    log_probs = _placed(log_probs, index, promising)
    valid = check_mask(mask, log_probs.shape)
    valid = torch.ones_like(log_probs, dtype=torch.bool) if valid is None else valid.to(home)
    settled = not by_sign  # the values of the rest are known then: they are 0
    if by_sign:  # nobody needs the rest if there is enough positive value, over all ranks
        values, units = unit_values(
            gate.signal, log_probs, advantages.to(home), valid, inputs.unit, at_mode is not None
        )
        own = torch.stack([((values > 0) & units).sum(), units.sum()]).tolist()
        positive, num_units = group.total(*(int(number) for number in own))
        needed = adapter_of(gate).positives_needed(num_units)
        settled = needed is not None and positive >= needed
    if settled:
        within = promising.to(home)
        known = int((valid & (within if valid.ndim == 1 else within.unsqueeze(1))).sum())
    else:
        others = (~promising).nonzero().squeeze(1)
        missing = run.by_group(group, rows.take(inputs.rows.batch, others))
        log_probs = log_probs.index_copy(0, others.to(home), missing)
        index, at_mode = torch.cat([index, others]), run.at_mode
    return Screened(
        log_probs.to(inputs.device),
        promising if settled and by_sign else None,
        run.num_rows,
        None if at_mode is None else _placed(at_mode, index, promising),
        elements=known,
    )


def _placed(values: Tensor, index: Tensor, among: Tensor) -> Tensor:
    """Return values of some rows at their places among all, 0 elsewhere."""
    zeros = values.new_zeros(len(among), *values.shape[1:])
    return zeros.index_copy(0, index.to(values.device), values)


class Forwards:
    """Screens some rows of the batch, counts them, and collects densities at the mode."""

    def __init__(self, inputs: "Inputs"):
        self._inputs, self._modules = inputs, inputs.modules
        self._policy, self._draft = inputs.policy, inputs.policy.screen
        if inputs.rows.screen is not None:
            self._policy, self._draft = policy_of(inputs.rows.screen, "screen")
            self._modules = [*self._modules, *modules_of(self._policy, self._draft)]
        chunk, size = inputs.options.screen_chunk, inputs.micro_batch
        self._chunk = _CHUNK_FACTOR * size if chunk is None and size is not None else chunk
        self.num_rows = 0
        self._modes: list[Tensor] = []  # of each forward; without values where it was a filler

    def by_group(self, group: "Group", some: Any) -> Tensor:
        """Return the log-probs of some rows of this rank, where some rank has a row."""
        size = rows.leaves(some)[0].shape[0]
        calls = self._policy.screen_calls(some, size, self._chunk)
        found = group.forwards(self, some, calls, self._inputs.spare)
        assert found is not None
        return found

    def __call__(self, some: Any, *, count: bool = True) -> Tensor:
        """Return the log-probs of some rows; `count` says whether they are the batch's own."""
        self.num_rows += rows.num_rows(some) if count else 0
        before = len(self._modes)
        drafts = self._draft is not None
        found = screen_log_probs(
            self._measured if drafts else self._inputs.log_prob,
            some,
            modules=self._modules,
            chunk=self._chunk,
            name="screen" if drafts else "log_prob",
        )
        if not count:
            self._modes[before:] = [modes[:0] for modes in self._modes[before:]]
        return found

    @property
    def at_mode(self) -> Tensor | None:
        """Log-densities at the mode of all rows that were screened, in the order of forwards."""
        return torch.cat(self._modes) if self._modes else None

    def _measured(self, some: Any) -> Any:
        """Return what a draft or the policy's own screen says, measured from the mode."""
        assert self._draft is not None
        found = self._draft(some)
        if isinstance(found, tuple | list) and self._policy.screen is None:
            raise ValueError(
                f"screen(rows) must return log-probs, got a {type(found).__name__} of "
                f"{len(found)}; for densities give screen=(log_probs, mode_log_probs), two "
                f"tensors, or a kondo.DistributionPolicy, which brings its modes."
            )
        log_probs, at_mode = from_mode(found, "screen(rows)")
        if at_mode is not None:
            self._modes.append(at_mode)
        if isinstance(log_probs, Tensor):  # anything else is refused by the screen
            self._inputs.policy.check_log_probs(log_probs, some)
        return log_probs


def screen_log_probs(
    log_prob: Callable[[Any], Any],
    batch: Any,
    *,
    modules: Sequence[nn.Module] = (),
    chunk: int | None = None,
    name: str = "log_prob",
) -> Tensor:
    """Return log-probs of all rows, [N] or [N, T], by forwards of `chunk` rows without a graph.

    `modules` are in evaluation mode meanwhile. `name` is that of log_prob, for messages.
    """
    size = rows.num_rows(batch)
    step = chunk or size
    parts = []
    with torch.no_grad(), evaluation(modules):
        for start in range(0, size, step):
            stop = min(start + step, size)
            some = batch if stop - start == size else rows.take(batch, slice(start, stop))
            parts.append(check_log_probs(f"{name}(rows)", log_prob(some), stop - start))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_mode(given: Any, name: str = "screen") -> tuple[Any, Tensor | None]:
    """Return log-probs, and those at the mode that they are measured from, given a pair of both."""
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
