"""What a gate chose: tensors, and what is read from the device when somebody asks for it."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kondo.core.base_gate import Choice, Signal, Unit, value_name
from kondo.core.diagnostics import diagnostics


class Counts(NamedTuple):
    """How much counts and how much is kept; over leading dimensions, of all choices together."""

    units: int
    """That count."""
    units_kept: int
    elements: int
    """That count."""
    elements_kept: int
    rows: int
    rows_kept: int
    """Rows with a kept element."""
    hidden_nan: int
    """Elements with a NaN that the mask hides."""
    rows_screened: int
    """Rows that entered a screening forward; the screen tells."""
    surprised: int
    """Elements that count whose log-probs are known."""
    price: float
    """NaN for several choices."""
    rate: float
    """NaN for several choices."""
    surprisal: float
    """Sum over these elements; NaN where none are known."""
    advantage: float = 0.0
    """Sum over elements that count."""
    abs_advantage: float = 0.0
    """Sum of absolute values, likewise."""

    @property
    def entropy(self) -> float:
        """Mean surprisal: on-policy, an estimate of the policy's entropy per element."""
        return self.surprisal / self.surprised if self.surprised else math.nan

    def denominator(self, asked: str | float) -> float:
        """Return what the sum of losses is divided by; see `kondo.Options`."""
        counted = {"full": self.elements, "kept": self.elements_kept}
        return max(1.0, float(counted[asked])) if isinstance(asked, str) else float(asked)


class Elements(NamedTuple):
    """A selection for every log-prob: what belongs to a sequence belongs to each of its tokens."""

    keep: Tensor
    """bool like log_probs."""
    weight: Tensor
    """float like log_probs: factor of each element's loss; 0 where not kept."""
    mask: Tensor
    """bool like log_probs: the element counts."""


class Selection:
    """What `kondo.select` returns. M units, [..., N] or, for unit "token", [..., N, T].

    Tensors are on the device of the log-probs, and nothing is read from it before `rows` or
    `counts` is asked for. That is also where a fault found on a GPU is raised.

    Attributes:
        values: [..., M] float, the gate's signal.
        mask: [..., M] bool: the unit counts.
        keep: [..., M] bool.
        weight: [..., M] float, factor of the unit's loss; 0 where it is not kept.
        probability: [..., M] float, chance that the unit was kept; 0 or 1 where nothing was drawn.
        price: [...] float64, in the signal's units.
        rate: [...] float64, kept units / units that count.
        elements: keep, weight and mask of every log-prob.
        rows: int64, rows with a kept element, ascending: [R], read from the device; or, with a
            capacity of K, [..., K] and not read: other rows, of weight 0, fill it up.
        counts: see `Counts`; read from the device once.
    """

    def __init__(
        self,
        values: Tensor,
        mask: Tensor,
        choice: Choice,
        *,
        element_mask: Tensor,
        unit: Unit,
        signal: Signal,
        read: Callable[[Tensor], Counts],
        capacity: int | None = None,
    ):
        self.values, self.mask, self.choice = values, mask, choice
        self.keep, self.weight, self.price, self.rate, self.probability = choice
        self.element_mask, self.unit, self._signal = element_mask, unit, signal
        self._read, self._capacity = read, capacity

    def read(self) -> Counts:
        """Read the device now: what a CUDA graph wrote since, if it was replayed.

        Raises:
            ValueError: NaN in a unit that counts, a choice that cannot be right, or more kept rows
                than the capacity.
        """
        return self._read(self.kept_rows)

    @functools.cached_property
    def counts(self) -> Counts:
        """How much counts and is kept; see `read`."""
        return self.read()

    @property
    def kept_rows(self) -> Tensor:
        """bool [..., N]: rows with a kept element."""
        # A sequence that counts has an element that counts, so its unit is kept where its row is.
        return self.keep.any(dim=-1) if self.unit == "token" else self.keep

    @functools.cached_property
    def rows(self) -> Tensor:
        """Rows with a kept element; see the class."""
        kept = self.kept_rows
        if self._capacity is not None:
            order = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
            return order[..., : self._capacity]
        number = self.counts.rows_kept
        if kept.ndim != 1:
            raise ValueError(
                f"capacity must be given for rows of several choices, which keep different numbers "
                f"of them, got None and keep of shape {list(self.keep.shape)}."
            )
        return kept.nonzero_static(size=number).squeeze(1)

    @functools.cached_property
    def elements(self) -> Elements:
        """Keep, weight and mask of every log-prob."""
        mask = self.element_mask
        if self.unit != "sequence":
            return Elements(self.keep, self.weight, mask)
        return Elements(self.keep.unsqueeze(-1) & mask, self.weight.unsqueeze(-1) * mask, mask)

    def diagnostics(self, eta: float = 1.0) -> dict[str, float]:
        """Return `kondo.diagnostics` of these values and this one choice.

        Args:
            eta: temperature at which the gate is judged.
        """
        if self.price.ndim:
            raise ValueError(
                f"diagnostics must be of one choice, got {list(self.price.shape)} of them; give "
                f"kondo.diagnostics the values and the choice of one."
            )
        name = value_name(self._signal)
        return diagnostics(self.values, self.choice, mask=self.mask, eta=eta, name=name)


class KeptRows(NamedTuple):
    """What a compaction gathers. N rows, T tokens (absent for unit "sample"); like log_probs."""

    rows: Tensor
    """[R] int64, ascending: rows with a kept element."""
    keep: Tensor
    """bool: the element is kept."""
    weight: Tensor | None
    """float, factor of each element's loss; 0 where not kept. None: 1 where kept."""
    mask: Tensor
    """bool: the element counts."""
    whole: bool = False
    """Every element of every row is kept with weight 1; keep and mask have one value per row."""
    by_row: bool = False
    """A kept row is kept in all its elements that count."""
    host_rows: Tensor | None = None
    """`rows` on the CPU, where they are known there."""
