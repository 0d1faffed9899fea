"""Screen only the rows that can be kept: delight has the sign of the advantage.

A hard gate keeps units of positive delight as long as there are enough of them, so a row without a
positive advantage cannot be kept, and its forward is not worth making either:

    rows with an advantage > 0 -> screen -> enough positive delight? -> yes: the rest stays unknown
                                                                     -> no:  screen the rest too

The kept set is that of a screen of all rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kondo.core._checks import check_mask, expand_rows
from kondo.core.delight import delight
from kondo.engine import rows
from kondo.engine.select import Unit

ScreenSome = Callable[[Any], Tensor]
"""Some rows of the batch -> their log-probs."""


@runtime_checkable
class KnowsPositivesNeeded(Protocol):
    """A gate that can tell when units of positive delight settle its decision."""

    def positives_needed(self, num_valid: int) -> int | None:
        """See `kondo.Gate.positives_needed`."""


class Screened(NamedTuple):
    """What a screen found."""

    log_probs: Tensor
    """[N] or [N, T]; 0 in rows that were not screened, so that their delight is 0."""
    rows: Tensor | None
    """[N] bool: screened rows; None for all."""


def screen_promising(
    screen: ScreenSome,
    batch: Any,
    advantages: Tensor,
    *,
    gate: object,
    unit: Unit,
    mask: Tensor | None,
) -> Screened:
    """Screen rows with a positive advantage, and the others only if they can matter.

    Args:
        screen: some rows of the batch -> log-probs [n] or [n, T].
        batch: any nest of tensors with N rows.
        advantages: [N] or [N, T].
        gate: screens all rows unless it `KnowsPositivesNeeded`, and says a number.
        unit: what is gated.
        mask: [N] or [N, T] bool.
    """
    promising = _promising(advantages, mask)
    index = promising.nonzero().squeeze(1)
    if (
        index.numel() in (0, promising.numel())
        or not isinstance(gate, KnowsPositivesNeeded)
        or gate.positives_needed(1) is None
    ):
        return Screened(screen(batch), None)
    found = screen(rows.take(batch, index))
    log_probs = found.new_zeros(promising.shape[0], *found.shape[1:])
    log_probs = log_probs.index_copy(0, index.to(found.device), found)
    if _settled(log_probs, advantages, gate=gate, unit=unit, mask=mask):
        return Screened(log_probs, promising)
    others = (~promising).nonzero().squeeze(1)
    rest = screen(rows.take(batch, others))
    return Screened(log_probs.index_copy(0, others.to(rest.device), rest), None)


def _promising(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Return [N] bool: rows with a positive advantage that counts."""
    shape = advantages.shape if mask is None or mask.ndim < advantages.ndim else mask.shape
    positive = expand_rows("advantages", advantages, shape) > 0
    counts = check_mask(mask, shape)
    if counts is not None:
        positive = positive & counts.to(positive.device)
    return positive if positive.ndim == 1 else positive.any(dim=1)


def _settled(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: KnowsPositivesNeeded,
    unit: Unit,
    mask: Tensor | None,
) -> bool:
    """Whether there is enough positive delight among the rows screened."""
    valid = check_mask(mask, log_probs.shape)
    if valid is None:
        valid = torch.ones_like(log_probs, dtype=torch.bool)
    valid = valid.to(log_probs.device)
    spread = expand_rows("advantages", advantages.to(log_probs.device), log_probs.shape)
    chi = delight(log_probs, spread, mask=valid)
    if unit == "sequence":
        chi, valid = chi.sum(dim=1), valid.any(dim=1)
    positive, num_valid = torch.stack([(chi > 0).sum(), valid.sum()]).tolist()
    needed = gate.positives_needed(int(num_valid))
    return needed is not None and positive >= needed
