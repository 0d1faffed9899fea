"""Screen only the rows that can be kept.

A hard gate by delight keeps units of positive delight as long as there are enough of them. Delight
has the sign of the advantage, so rows with advantage <= 0 are not scored:

    rows with an advantage > 0 -> screen -> enough positive values? -> yes: the rest stays unknown
                                                                    -> no:  screen the rest too

Where that does not hold, a row whose advantages are all 0 is left out if the signal is 0 there
whatever the log-probs are, as delight is.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kondo import rows
from kondo.arguments import check_mask, expand_rows
from kondo.core.base_gate import attribute_of, unit_values
from kondo.engine.inputs import Inputs
from kondo.engine.screen import Forwards, Screened, required, unseen

if TYPE_CHECKING:
    from kondo.engine.group import Group


def screen_promising(inputs: Inputs, group: "Group", run: Forwards) -> Screened | None:
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
    num_promising, num_rows = group.total(index.numel(), promising.numel())
    if num_promising in (0, num_rows):
        return _nothing(inputs, group) if num_promising == 0 and not by_sign else None
    batch = inputs.rows.batch
    some = rows.take(batch, index)
    found = required(group.forwards(run, some, run.calls(some), inputs.spare))
    log_probs = _placed(found, index, promising.shape[0])
    # Values of the rest are known, they are 0; or nobody needs them.
    if not by_sign or _settled(inputs, group, log_probs, run.density):
        return Screened(
            log_probs.to(inputs.device),
            promising if by_sign else None,
            run.rows,
            None if run.at_mode is None else _placed(run.at_mode, index, promising.shape[0]),
            elements=_num_counted(inputs.rows.mask, log_probs, promising),
        )
    others = (~promising).nonzero().squeeze(1)
    rest = rows.take(batch, others)
    missing = required(group.forwards(run, rest, run.calls(rest), inputs.spare))
    log_probs = log_probs.index_copy(0, others.to(missing.device), missing)
    order, at_mode = torch.cat([index, others]), run.at_mode
    at_mode = None if at_mode is None else _placed(at_mode, order, len(order))
    return Screened(log_probs.to(inputs.device), None, run.rows, at_mode)


def _placed(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return values of some rows at their places among all, 0 elsewhere."""
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, index.to(values.device), values)


def _nothing(inputs: Inputs, group: "Group") -> Screened | None:
    """Return a screen of no row, for a batch without an advantage; None if its shape is unknown."""
    zeros = unseen(inputs)
    if group.total(int(zeros is None))[0]:
        return None
    assert zeros is not None
    return Screened(zeros.to(inputs.device), None, 0, at_mode=None, known=False)


def _num_counted(mask: Tensor | None, log_probs: Tensor, some: Tensor) -> int:
    """Return how many elements of some rows, [N] bool, count."""
    within = some.to(log_probs.device)
    within = within if log_probs.ndim == 1 else within.unsqueeze(1).expand_as(log_probs)
    counts = check_mask(mask, log_probs.shape)
    return int((within if counts is None else within & counts.to(within.device)).sum())


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


def _settled(inputs: Inputs, group: "Group", log_probs: Tensor, density: bool) -> bool:
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
    positive, num_valid = group.total(*(int(number) for number in own))
    needed = inputs.gate.positives_needed(num_valid)
    return needed is not None and positive >= needed
