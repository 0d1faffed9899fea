"""What a gate chose: tensors, and what is read from the device when somebody asks for it.

A NaN or an infinity never leaves a sum finite. So a few sums are read, and only where one is broken
does anything look closer, and name the unit.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import expand_rows, first_unit
from kondo.core.base_gate import Choice, Signal, Unit
from kondo.core.delight import check_excess, excess
from kondo.core.diagnostics import diagnostics
from kondo.core.unit_values import known_of, value_name


class Counts(NamedTuple):
    """How much counts and how much is kept; over leading dimensions, of all choices together.

    Units and elements are those that count, rows are all; a kept row has a kept element.
    """

    units: int
    units_kept: int
    elements: int
    elements_kept: int
    rows: int
    rows_kept: int
    hidden_nan: int = 0
    """Elements with a NaN that the mask hides."""
    rows_screened: int = 0
    """Rows that entered a screening forward; the screen tells."""
    surprised: int = 0
    """Elements that count whose log-probs are known."""
    price: float = -math.inf
    """NaN for several choices, and so is the rate."""
    rate: float = 0.0
    surprisal: float = math.nan
    """Sum over elements whose log-probs are known."""
    advantage: float = 0.0
    """Sum over elements that count, as is that of absolute values."""
    abs_advantage: float = 0.0

    @property
    def entropy(self) -> float:
        """Mean surprisal: on-policy, an estimate of the policy's entropy per element."""
        return self.surprisal / self.surprised if self.surprised else math.nan

    def denominator(self, asked: str | float) -> float:
        """Return what the sum of losses is divided by; see `kondo.Options`."""
        counted = {"full": self.elements, "kept": self.elements_kept}
        return max(1.0, float(counted[asked])) if isinstance(asked, str) else float(asked)


class Elements(NamedTuple):
    """A selection for every log-prob: what belongs to a sequence belongs to each of its tokens.

    Bool, float and bool like log_probs; a weight is 0 where it is not kept.
    """

    keep: Tensor
    weight: Tensor
    mask: Tensor


class Units(NamedTuple):
    """What a gate chooses from, and what it was made of."""

    faults: Any
    """[6] float64, `sums`; a list where they are read, None before somebody asks."""
    elements: Tensor | None
    """`counted`, where they are on another device than the log-probs; else None."""
    values: Tensor
    mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    valid: Tensor
    """bool like log_probs: the element counts."""
    unit: Unit
    signal: Signal
    masked: bool = True
    """Whether some element may not count."""

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions: one choice each."""
        return self.values.shape[: -2 if self.unit == "token" else -1]

    def counted(self) -> Tensor:
        """Return the elements of each unit that count, int64 or bool like values."""
        if self.elements is not None:
            return self.elements
        return self.valid.sum(dim=-1) if self.unit == "sequence" else self.valid

    def sums(self) -> Tensor:
        """Return what tells whether something is wrong, [6] float64, without a read.

        Sums of log-probs and of advantages, which NaN does not leave finite, an excess over 0, and
        the sums of surprisals, advantages and absolute advantages that count.
        """
        spread = expand_rows("advantages", self.advantages, self.log_probs.shape)
        known = torch.where(self.valid, self.log_probs, 0.0)
        centred = torch.where(self.valid, spread, 0.0)
        summed = (self.log_probs, self.advantages, known, centred, centred.abs())
        sums = [part.sum(dtype=torch.float64) for part in summed]
        # Our own signals need log-probs that are at most 0; others may be given densities.
        ours = known_of(self.signal).unchecked is not None
        above = excess(known).double() if ours else torch.zeros_like(sums[0])
        return torch.stack([*sums[:2], above, -sums[2], *sums[3:]])

    def refuse(self, faults: list[float]) -> int:
        """Refuse NaN and infinity that count; return the number of NaN that the mask hides."""
        log_prob, advantage, above = faults[:3]
        log_probs, valid = self.log_probs, self.valid
        if above > 0:
            check_excess(torch.where(valid, log_probs, 0.0))
        if not math.isnan(log_prob) and math.isfinite(advantage):
            return 0
        spread = expand_rows("advantages", self.advantages, log_probs.shape)
        rule = "log_prob must not hold NaN in a unit that counts"
        _refuse(rule, log_probs, log_probs.isnan() & valid, "fix it or mask the unit.")
        rule = "advantages must not hold NaN or infinity in a unit that counts"
        _refuse(rule, spread, ~spread.isfinite() & valid, "fix it or mask the unit.")
        return int(((log_probs.isnan() | spread.isnan()) & ~valid).sum())

    def refuse_values(self) -> None:
        """Refuse a value of NaN in a unit that counts."""
        rule = "signal must not return NaN for a unit that counts"
        broken = self.values.isnan() & self.mask
        _refuse(rule, self.values, broken, "return 0 where a unit is worth nothing.")


def _refuse(rule: str, part: Tensor, broken: Tensor, advice: str) -> None:
    """Raise a ValueError that names the first unit at which `part` breaks a rule, if any does."""
    if bool(broken.any()):
        raise ValueError(
            f"{rule}, got {part[broken][0].item()} in {first_unit(broken)} "
            f"({int(broken.sum())} in all); {advice}"
        )


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

    def __init__(self, units: Units, choice: Choice, capacity: int | None = None):
        self.values, self.mask, self.choice = units.values, units.mask, choice
        self.keep, self.weight, self.price, self.rate, self.probability = choice
        self._units, self._capacity = units, capacity

    def read(self) -> Counts:
        """Read the device now: what a CUDA graph wrote since, if it was replayed.

        Raises:
            ValueError: NaN in a unit that counts, a choice that cannot be right, or more kept rows
                than the capacity.
        """
        units, keep, mask, values = self._units, self.keep, self.mask, self.values
        kept_rows, capacity = self.kept_rows, self._capacity
        faults = units.sums() if units.faults is None else units.faults
        # On masks, a > b is "a and not b" in one kernel.
        masks = torch.stack([keep > mask, values.isnan() & mask, mask, keep])
        outside, unknown, counted, kept = masks.flatten(1).sum(1)
        kept_parts = (torch.where(keep, part, 0.0) for part in (values, self.weight))
        worth = [part.sum(dtype=torch.float64) for part in kept_parts]
        each = units.counted()
        elements = torch.stack([each, each * keep]).flatten(1).sum(1)
        rows = kept if kept_rows is keep else kept_rows.sum()
        most = rows if capacity is None else kept_rows.sum(-1).max()
        numbers = [outside, unknown, *worth, counted, kept, *elements, rows, most]
        numbers += [] if units.lead else [self.price, self.rate]
        if keep.is_cuda:
            # float64 holds every count below 2^53.
            together = torch.stack([number.to(keep.device).double() for number in numbers])
            known = [together] if isinstance(faults, list) else [faults, together]
            read: list[float] = torch.cat(known).tolist()
            if not isinstance(faults, list):
                faults, read = read[:6], read[6:]
        else:  # nothing to wait for
            read = [float(number) for number in numbers]
            faults = faults if isinstance(faults, list) else faults.tolist()
        hidden_nan = units.refuse(faults)
        found = [int(number) for number in read[4:10]]
        if capacity is not None and found[5] > capacity:
            raise ValueError(
                f"capacity must be at least the number of rows that are kept, got {capacity}, and "
                f"{found[5]} of {kept_rows.shape[-1]} rows kept; rows that did not fit are missing."
            )
        if any(read[:2]) or not all(math.isfinite(number) for number in read[2:4]):
            self._refuse_choice()
        price, rate = read[10:] or (math.nan, math.nan)
        return Counts(
            units=found[0],
            units_kept=found[1],
            elements=found[2],
            elements_kept=found[3],
            rows=kept_rows.numel(),
            rows_kept=found[4],
            hidden_nan=hidden_nan,
            surprised=found[2],
            price=price,
            rate=rate,
            surprisal=faults[3],
            advantage=faults[4],
            abs_advantage=faults[5],
        )

    def _refuse_choice(self) -> None:
        keep, values, mask, weight = self.keep, self.values, self.mask, self.weight
        rule = "gate must not keep units that the mask leaves out"
        _refuse(rule, keep, keep & ~mask, "multiply its keep by the mask.")
        self._units.refuse_values()
        _refuse(
            "the gate's signal must be finite in kept units",  # infinity may be skipped
            values,
            keep & ~values.isfinite(),
            "the policy gives this action probability zero, so its gradient is not finite. Mask "
            "it, or use the log-probs of the policy that took it.",
        )
        rule = "gate must return finite weights for kept units"
        _refuse(rule, weight, keep & ~weight.isfinite(), "a probability of 0 must not be kept.")

    @functools.cached_property
    def counts(self) -> Counts:
        """How much counts and is kept; see `read`."""
        return self.read()

    @property
    def kept_rows(self) -> Tensor:
        """bool [..., N]: rows with a kept element."""
        # A sequence that counts has an element that counts, so its unit is kept where its row is.
        return self.keep.any(dim=-1) if self._units.unit == "token" else self.keep

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
        mask = self._units.valid
        if self._units.unit != "sequence":
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
        name = value_name(self._units.signal)
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
