"""One decision for the units of all ranks.

    delight of each rank -> all of them, in the order of the ranks -> gate -> slice of each rank

Every rank calls the same gate on the same units, so keep, price, ties and the gate's running state
are those of one process with all rows, and the same on all ranks. Beyond `exact_units` a quantile
sketch of each rank's delight travels instead, and sets the price.
"""

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kondo.core._checks import first_unit
from kondo.core.contract import Choice as GateOutput
from kondo.core.gates import Gate
from kondo.core.rules import GOLDEN, count_for, lottery, mix_bits
from kondo.engine.select import GateLike
from kondo.lm.budget import BudgetGate
from kondo.lm.rows import TokenRows
from kondo.ranks.ranks import Ranks
from kondo.ranks.report import RankClock
from kondo.ranks.tokens import TokenMasks

# Up to this many units are decided on the CPU, as gates do themselves.
_FEW_UNITS = 65_536

# Values a sketch keeps per level: the rank of its quantiles is off by about 0.05% of all units.
_SKETCH_SIZE = 4096


class GlobalGate:
    """A gate for one step of one rank that decides about the units of all ranks.

    Args:
        gate: what decides; the same, in the same state, on all ranks. A `BudgetGate` is bound to
            the rows of all ranks here.
        batch: this rank's rows.
        ranks: the group.
        clock: counts the time spent talking.
        exact_units: up to this many units, over all ranks, every delight travels.
    """

    def __init__(
        self, gate: GateLike, batch: Any, ranks: Ranks, clock: RankClock, *, exact_units: int
    ):
        self._gate, self._ranks, self._clock = gate, ranks, clock
        self._masks = _masks(gate, batch)
        self._exact_units = exact_units
        self.delight: Tensor
        """What the decision was about: all ranks' units, or this rank's beyond `exact_units`."""
        self.mask: Tensor
        self.decision: GateOutput
        self.num_kept = 0
        """Units kept by all ranks, as this rank has it."""
        self.digest = 0
        """Which units these are, as one number; 0 where every rank decided for its own alone."""
        self.of_advantages = getattr(gate, "of_advantages", False)

    @torch.no_grad()
    def __call__(
        self, delight: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> GateOutput:
        """Return this rank's part of the decision; price and rate are those of all ranks."""
        _check_nan(delight, mask)
        num_rows, width = delight.shape[0], delight.shape[1] if delight.ndim == 2 else 1
        with self._clock.stage("wait"):
            double = delight.dtype == torch.float64
            told = self._ranks.say(num_rows, width, double, self._masks.shape[1])
        shapes = [(rows, columns) for rows, columns, *_ in told]
        dtype = torch.float64 if any(double for *_, double, _ in told) else torch.float32
        delight = delight.to(dtype)
        if sum(rows * columns for rows, columns in shapes) > self._exact_units:
            return self._by_sketch(delight, mask, shapes)
        with self._clock.stage("coordinate"):
            self.delight, self.mask = self._all_units(delight, mask, shapes)
            gate = self._bound([(rows, columns) for rows, *_, columns in told])
        with self._same_draws(generator, self.delight.device) as shared:
            self.decision = gate(self.delight, self.mask, shared)
        for name in ("keep", "weight", "probability"):
            if getattr(self.decision, name).shape != self.delight.shape:
                raise ValueError(
                    f"gate must return {name} with one value per unit of all ranks, "
                    f"{list(self.delight.shape)}, got {list(getattr(self.decision, name).shape)}; "
                    f"a gate that is bound to the rows of one rank cannot decide for all."
                )
        self.num_kept = int(self.decision.keep.sum())
        kept = self.decision.keep.flatten().nonzero()
        self.digest = int(mix_bits((kept + 1) * GOLDEN).sum())
        start = sum(rows for rows, _ in shapes[: self._ranks.rank])

        def own(values: Tensor) -> Tensor:
            part = values[start : start + num_rows].to(delight.device)
            return part if part.ndim == 1 else part[:, :width]

        keep, weight, price, rate, probability = self.decision
        return GateOutput(own(keep), own(weight), price, rate, own(probability))

    def _all_units(
        self, delight: Tensor, mask: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Gather every rank's units, shorter rows filled up with units that do not count."""
        # NaN marks what does not count: one tensor travels instead of two.
        own = torch.where(mask, delight, torch.nan)
        units = self._rows_of_all(own, shapes, padding=torch.nan)
        if units.numel() <= _FEW_UNITS:
            units = units.cpu()
        counts = ~units.isnan()
        return torch.where(counts, units, 0.0), counts

    def _rows_of_all(
        self, values: Tensor, shapes: Sequence[tuple[int, int]], *, padding: float
    ) -> Tensor:
        """Gather [N] or [N, T] of every rank, one after another, as wide as the widest."""
        sizes = [rows * columns for rows, columns in shapes]
        parts = self._ranks.gather(values.flatten(), sizes)
        if values.ndim == 1:
            return torch.cat(parts)
        widest = max(columns for _, columns in shapes)
        return torch.cat(
            [
                torch.nn.functional.pad(
                    part.view(rows, columns), (0, widest - columns), value=padding
                )
                for part, (rows, columns) in zip(parts, shapes, strict=True)
            ]
        )

    def _bound(self, shapes: Sequence[tuple[int, int]]) -> GateLike:
        """Return the gate, bound to the rows of all ranks if it is one that has to be."""
        if not isinstance(self._gate, BudgetGate):
            return self._gate
        packed = self._rows_of_all(self._masks, shapes, padding=0)
        return self._gate.for_rows(TokenMasks.unpacked(packed))

    @contextmanager
    def _same_draws(
        self, generator: torch.Generator | None, device: torch.device
    ) -> Iterator[torch.Generator | None]:
        """Give every rank rank 0's generator; afterwards those that were given have moved on."""
        if not _draws(self._gate):
            yield generator
            return
        source = generator or _default_generator(device)
        shared = torch.Generator(source.device)
        with self._clock.stage("coordinate"):
            shared.set_state(self._ranks.broadcast(source.get_state()))
        yield shared
        if generator is not None or self._ranks.rank == 0:
            source.set_state(shared.get_state())

    def _by_sketch(
        self, delight: Tensor, mask: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> GateOutput:
        """Decide from the price that a sketch of all ranks' delight gives; see `sketch_price`."""
        rate = _check_sketchable(self._gate, self._exact_units)
        self.delight, self.mask = delight, mask
        if rate is None:  # a fixed price: nothing has to travel but counts
            decision = self._gate(delight, mask)
            keep, price = decision.keep, float(decision.price)
        else:
            keep, price = self._keep_by_sketch(delight, mask, rate, shapes)
            _count_call(self._gate)
        with self._clock.stage("coordinate"):
            told = self._ranks.say(int(keep.sum()), int(mask.sum()))
        self.num_kept, counted = (sum(column) for column in zip(*told, strict=True))
        chance = keep.to(delight.dtype)
        share = self.num_kept / counted if counted else 0.0
        numbers = torch.tensor([price, share], dtype=torch.float64)
        self.decision = GateOutput(keep, chance, numbers[0], numbers[1], chance)
        return self.decision

    def _keep_by_sketch(
        self, delight: Tensor, mask: Tensor, rate: float, shapes: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, float]:
        worth = mask & (delight != 0)
        with self._clock.stage("coordinate"):
            told = self._ranks.say(int(mask.sum()), int(worth.sum()))
            counted, buyable = (sum(column) for column in zip(*told, strict=True))
            if buyable == 0:
                return worth, math.inf
            count = min(count_for(rate, counted), buyable)
            price = sketch_price(self._ranks, delight[worth], count / buyable)
            above, tied = worth & (delight > price), worth & (delight == price)
            told = self._ranks.say(int(above.sum()), int(tied.sum()))
        over, level = (sum(column) for column in zip(*told, strict=True))
        # Discrete rewards put many units exactly at the price: a share of them, by their place.
        share = (count - over) / level if level else 0.0
        start = sum(rows * columns for rows, columns in shapes[: self._ranks.rank])
        place = start + torch.arange(delight.numel(), device=delight.device)
        lot = lottery(place, salt=delight.new_tensor(price)).double().view(delight.shape)
        return above | (tied & (lot / 2.0**64 + 0.5 < share)), price


def sketch_price(ranks: Ranks, delight: Tensor, share: float) -> float:
    """Return the price above which about `share` of all ranks' delight lies.

    Each rank sketches its own (KLL of Apache DataSketches); sketches merge into that of the union.

    Args:
        ranks: the group.
        delight: [M_r] float of this rank, no NaN.
        share: in (0, 1].
    """
    own = torch.frombuffer(bytearray(sketch(delight)), dtype=torch.uint8)
    lengths = [length for (length,) in ranks.say(own.numel())]
    everyone = ranks.gather(own, lengths)
    price = torch.zeros(1, dtype=torch.float64)
    if ranks.rank == 0:  # merging draws random bits: one rank does it for all
        price[0] = merged_price([bytes(part.tolist()) for part in everyone], share)
    return float(ranks.broadcast(price))


def sketch(delight: Tensor) -> bytes:
    """Return a mergeable sketch of delight, [M] float: a few KB however many there are.

    Example:
        >>> import torch
        >>> parts = [sketch(torch.arange(0.0, 50.0)), sketch(torch.arange(50.0, 100.0))]
        >>> merged_price(parts, share=0.1)
        90.0
    """
    made = _datasketches().kll_doubles_sketch(_SKETCH_SIZE)
    made.update(delight.detach().double().cpu().numpy())
    return bytes(made.serialize())


def merged_price(sketches: Sequence[bytes], share: float) -> float:
    """Return the lowest delight among the highest `share` of all that was sketched."""
    kll = _datasketches().kll_doubles_sketch
    union = kll(_SKETCH_SIZE)
    for one in sketches:
        union.merge(kll.deserialize(one))
    count = max(1, round(share * union.n))
    return float(union.get_quantile((union.n - count) / union.n, False))


def _datasketches() -> Any:
    try:
        return importlib.import_module("datasketches")
    except ImportError as error:
        raise ImportError(
            "more units than exact_units need a quantile sketch: pip install 'kondo[sketch]', or "
            "raise exact_units to gather every delight."
        ) from error


def _masks(gate: GateLike, batch: Any) -> Tensor:
    """Return what a `BudgetGate` must know of the rows, [N, S] uint8; for others [0, 0]."""
    if not isinstance(gate, BudgetGate):
        return torch.zeros(0, 0, dtype=torch.uint8)
    if not isinstance(batch, TokenRows) or gate._cost is not None:
        raise ValueError(
            "gate must be a BudgetGate that is not bound to rows, for a batch of TokenRows: it is "
            "bound to the rows of all ranks here. Leave for_rows(...) out."
        )
    return TokenMasks(batch.attention_mask, batch.completion_mask).packed()


def _check_sketchable(gate: GateLike, exact_units: int) -> float | None:
    """Return the rate of a gate that one price decides; None where its price is fixed."""
    if isinstance(gate, Gate):
        plain = not (gate.temperature or gate.reserve or gate.negative_quota or gate.normalise)
        if plain and not gate.window:
            return gate.rate
    raise ValueError(
        f"gate must be Gate(rate=...) or Gate(price=...) without further options for more than "
        f"exact_units ({exact_units}) units, where a sketch sets one price for all ranks; got "
        f"{gate!r}. Raise exact_units to gather every delight."
    )


def _count_call(gate: GateLike) -> None:
    assert isinstance(gate, Gate)
    state = gate.state_dict()
    gate.load_state_dict(state | {"calls": state["calls"] + 1})


def _draws(gate: GateLike) -> bool:
    """Return whether a gate may draw: ours says so, of others nobody knows."""
    if not isinstance(gate, Gate):
        return True
    return (gate.temperature > 0 and not gate.soft) or gate.reserve > 0


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _check_nan(delight: Tensor, mask: Tensor) -> None:
    broken = delight.isnan() & mask
    if bool(broken.any()):
        raise ValueError(
            f"priority must not return NaN for a unit that counts, got it in {first_unit(broken)} "
            f"of this rank ({int(broken.sum())} in all)."
        )
