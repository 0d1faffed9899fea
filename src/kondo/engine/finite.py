"""Refuse what is not finite in kept units before it reaches `.grad`.

A NaN or an infinity never leaves a sum finite. So the sums of everything that must be finite are
read together, once for each micro-batch, and only a broken one is looked at closely.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo import rows
from kondo.arguments import first_unit
from kondo.engine.compact import MicroBatch
from kondo.engine.selection import KeptRows


class Gated(NamedTuple):
    """One micro-batch after its forward. n rows, T tokens, as in `MicroBatch`."""

    raw: Tensor
    """[n] or [n, T]: log-probs as the policy gave them."""
    log_probs: Tensor
    """Like raw, 0 where not kept."""
    losses: Tensor
    """Like raw, weighted, 0 where not kept."""
    keep: Tensor | None
    """bool like raw; None where every element is kept."""


class FiniteCheck:
    """What a gated step refuses: NaN or infinity in log-probs and loss inputs of kept units.

    The loss inputs of all kept rows are looked at with the first micro-batch, so that a broken one
    is refused before anything is added to `.grad`.

    Args:
        loss_inputs: of the step, each [N, ...]. Those with one value per element or per row are
            judged where they are kept. Which numbers of another shape the loss uses is not known:
            where there is one, the loss is judged.
        kept: what was kept.
        in_order: micro-batches hold the kept rows in their order; messages then name
            units of the batch.
    """

    def __init__(self, loss_inputs: dict[str, Tensor], kept: KeptRows, *, in_order: bool):
        floats = {name: part for name, part in loss_inputs.items() if part.is_floating_point()}
        self._known = {name: part for name, part in floats.items() if _fits(part, kept.keep)}
        self._other = [name for name in floats if name not in self._known]
        self._kept = kept
        self._in_order = in_order
        self._first = True
        self._start = self._stop = 0  # of the rows of this micro-batch

    def look(self, gated: Gated, micro: MicroBatch) -> bool:
        """Raise a ValueError for a kept unit that is not finite; one device sync.

        Returns:
            Whether an element that is not kept has a log-prob that is not finite.
        """
        must = {"log_prob(rows)": gated.log_probs.detach()}
        if self._other:
            must["loss"] = gated.losses.detach()
        self._start, self._stop = self._stop, self._stop + micro.num_rows
        given = self._kept_inputs() if self._first else {}
        self._first = False
        parts = [gated.raw.detach(), *must.values(), *given.values()]
        home = gated.raw.device
        sums = torch.stack([part.sum(dtype=torch.float64).to(home) for part in parts]).tolist()
        if not all(math.isfinite(number) for number in sums[1:]):
            self._refuse_inputs(given)
            self._refuse(must)
        return gated.keep is not None and not math.isfinite(sums[0])

    def _kept_inputs(self) -> dict[str, Tensor]:
        """Return the loss inputs of the kept rows, 0 in elements that are not kept."""
        if not self._known:
            return {}
        taken: tuple[dict[str, Tensor], Tensor] = (self._known, self._kept.keep)
        if self._kept.rows.numel() < self._kept.keep.shape[0]:
            taken = rows.take(taken, self._kept.rows)
        known, keep = taken
        return {name: _where_kept(part, keep) for name, part in known.items()}

    def _refuse_inputs(self, given: dict[str, Tensor]) -> None:
        """Raise a ValueError that names the first loss input, and its unit of the batch."""
        for name, part in given.items():
            broken = ~part.isfinite()
            if bool(broken.any()):
                unit = _unit_of(broken, self._kept.rows)
                raise ValueError(
                    f"loss_inputs[{name!r}] must be finite in kept units, got "
                    f"{part[broken][0].item()} in {unit} ({int(broken.sum())} in all); nothing was "
                    f"differentiated. Fix it or mask the unit."
                )

    def _refuse(self, must: dict[str, Tensor]) -> None:
        """Raise a ValueError that names what is not finite, and its unit."""
        advice = {
            "log_prob(rows)": "Look for NaN weights, or for actions of probability zero, and mask "
            "those.",
            "loss": f"Look at loss_inputs {self._other}, or for a ratio that overflows.",
        }
        for name, part in must.items():
            broken = ~part.isfinite()
            if bool(broken.any()):
                raise ValueError(
                    f"{name} must be finite in kept units, got {int(broken.sum())} that are not, "
                    f"first {self._name(broken)}; nothing of this micro-batch was "
                    f"differentiated. {advice[name]}"
                )

    def _name(self, where: Tensor) -> str:
        """Name the first unit of a micro-batch: in the batch, where that is known."""
        if not self._in_order:
            return f"{first_unit(where)} of this micro-batch"
        return _unit_of(where, self._kept.rows[self._start : self._stop])

    @contextmanager
    def refuse_leaks(self, gated: Gated) -> Iterator[None]:
        """Raise a ValueError after a backward in which NaN came out of what is not kept.

        An element that is not kept has a gradient of 0, and 0 * NaN inside the policy is NaN. Its
        log-prob does not say whether that happens, nor does the gradient of the log-probs: the
        gradients of what is trained do. They are looked at only where `look` found such an element.
        The error comes after the backward, because other ranks may be waiting in it.

        Args:
            gated: the micro-batch that is differentiated inside the context.
        """
        found: list[Tensor] = []
        handles = [
            leaf.register_hook(lambda gradient: found.append(_has_nan(gradient)))
            for leaf in leaves_of(gated.raw)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        home = gated.raw.device
        if found and bool(torch.stack([each.to(home) for each in found]).any()):
            assert gated.keep is not None
            broken = ~gated.raw.detach().isfinite() & ~gated.keep
            raise ValueError(
                f"log_prob(rows) must have a finite gradient, got NaN, and a log-prob that is not "
                f"finite in {self._name(broken)}, which is not kept but stands in a row that is: "
                f"0 * NaN is NaN inside the policy. Clear .grad, which may hold NaN, and give the "
                f"policy finite inputs at elements that are masked."
            )


def _fits(value: Tensor, keep: Tensor) -> bool:
    """Return whether it has one value per element, or one per row."""
    return value.shape in (keep.shape, keep.shape[:1], (keep.shape[0], 1))


def _where_kept(value: Tensor, keep: Tensor) -> Tensor:
    """Return 0 in elements that are not kept; one value per row is kept with its row."""
    if value.shape != keep.shape:
        return value
    return torch.where(keep.to(value.device), value, 0.0)


def _unit_of(where: Tensor, index: Tensor) -> str:
    """Name the first True position of some rows, by what these rows are called elsewhere."""
    row, *rest = where.nonzero()[0].tolist()
    position = [int(index[row]), *rest]
    return f"unit {position[0] if len(position) == 1 else tuple(position)}"


def leaves_of(output: Tensor) -> list[Any]:
    """Return the tensors whose `.grad` a backward from `output` adds to."""
    found = []
    seen = {output.grad_fn}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # a node that accumulates
            found.append(node.variable)
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        stack.extend(new)
    return found


def _has_nan(gradient: Tensor) -> Tensor:
    """Return whether it holds NaN, 0-d bool; nothing is read."""
    local: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.is_sparse:
        local = local.coalesce().values()
    nan: Tensor = local.isnan().any()
    return nan
