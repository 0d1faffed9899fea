"""One choice for the units of all ranks.

    values of each rank -> all of them, in the order of the ranks -> gate -> slice of each rank

Every rank calls the same gate on the same units, so keep, price, ties and the gate's running state
are those of one process with all rows, and the same on all ranks. Beyond `exact_units` a quantile
sketch of each rank's values travels instead, and sets the price.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kondo.arguments import first_unit
from kondo.core.base_gate import BaseGate, Choice, Randomness
from kondo.core.sampling import GOLDEN, count_for, lottery, mix_bits
from kondo.ranks.communicator import Ranks
from kondo.stage_clock import StageClock

# Values a sketch keeps per level: the rank of its quantiles is off by about 0.05% of all units.
_SKETCH_SIZE = 4096


class GlobalGate(BaseGate):
    """A gate for one step of one rank that chooses among the units of all ranks.

    Args:
        gate: what chooses; the same, in the same state, on all ranks. What it must know of the rows
            is gathered from all ranks.
        batch: this rank's rows.
        ranks: the group.
        clock: counts the time spent talking.
        exact_units: up to this many units, over all ranks, every value travels.
    """

    on_host = False  # ranks must gather from alike devices, whatever their number of units

    def __init__(
        self, gate: BaseGate, batch: Any, ranks: Ranks, clock: StageClock, *, exact_units: int
    ):
        self._gate, self._ranks, self._clock = gate, ranks, clock
        self._facts = gate.row_facts(batch)
        if self._facts is not None and self._facts.ndim != 2:
            raise ValueError(
                f"gate.row_facts must return [N, K] integers, got {list(self._facts.shape)}; ranks "
                f"gather it along the rows."
            )
        self._exact_units = exact_units
        self.signal = gate.signal
        self.remembers = True  # a rank names its broken input before it waits for the others
        self.gathered = False
        """Whether the values of all ranks came together here."""
        self.num_kept = 0
        """Units kept by all ranks, as this rank has it."""
        self.digest = 0
        """Which units these are, as one number; 0 where every rank chose for its own alone."""
        self.all_units: tuple[Tensor, Tensor, Choice]
        """Values, mask and choice of all ranks where they came together, else of this one."""

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Return this rank's part of the choice; see `choose_all`."""
        return self.choose_all(values, mask, generator)

    @torch.no_grad()
    def choose_all(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Return this rank's part of the choice; price and rate are those of all ranks."""
        assert not isinstance(generator, Tensor)  # made for the units of this rank alone
        _check_nan(values, mask)
        num_rows, width = values.shape[0], values.shape[1] if values.ndim == 2 else 1
        columns = 0 if self._facts is None else self._facts.shape[1]
        with self._clock.stage("wait"):
            double = values.dtype == torch.float64
            told = self._ranks.say(num_rows, width, double, columns)
        shapes = [(rows, columns) for rows, columns, *_ in told]
        values = values.to(
            torch.float64 if any(double for *_, double, _ in told) else torch.float32
        )
        if sum(rows * columns for rows, columns in shapes) > self._exact_units:
            return self._by_sketch(values, mask, shapes, generator)
        with self._clock.stage("coordinate"):
            all_values, all_mask = self._all_units(values, mask, shapes)
            gate = self._bound([(rows, columns) for rows, *_, columns in told])
        with self._same_draws(generator, all_values.device) as shared:
            choice = gate.choose_all(all_values, all_mask, shared)
        self._check_choice(choice, all_values)
        self.gathered, self.all_units = True, (all_values, all_mask, choice)
        place = torch.arange(1, choice.keep.numel() + 1, device=choice.keep.device)
        marks = mix_bits(place * GOLDEN).where(choice.keep.flatten(), 0)
        self.num_kept, self.digest = torch.stack([choice.keep.sum(), marks.sum()]).tolist()
        start = sum(rows for rows, _ in shapes[: self._ranks.rank])

        def own(units: Tensor) -> Tensor:
            part = units[start : start + num_rows].to(values.device)
            return part if part.ndim == 1 else part[:, :width]

        keep, weight, price, rate, probability = choice
        return Choice(own(keep), own(weight), price, rate, own(probability))

    def _check_choice(self, choice: Choice, values: Tensor) -> None:
        for name in ("keep", "weight", "probability"):
            if getattr(choice, name).shape != values.shape:
                raise ValueError(
                    f"gate must return {name} with one value per unit of all ranks, "
                    f"{list(values.shape)}, got {list(getattr(choice, name).shape)}; "
                    f"a gate that is bound to the rows of one rank cannot choose for all."
                )

    def _all_units(
        self, values: Tensor, mask: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Gather every rank's units, shorter rows filled up with units that do not count."""
        # NaN marks what does not count: one tensor travels instead of two.
        own = torch.where(mask, values, torch.nan)
        units = self._rows_of_all(own, shapes, padding=torch.nan)
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

    def _bound(self, shapes: Sequence[tuple[int, int]]) -> BaseGate:
        """Return the gate, bound to the rows of all ranks if it is one that has to be."""
        if self._facts is None:
            return self._gate
        return self._gate.bind(self._rows_of_all(self._facts, shapes, padding=0))

    @contextmanager
    def _same_draws(
        self, generator: torch.Generator | None, device: torch.device
    ) -> Iterator[torch.Generator | None]:
        """Give every rank rank 0's generator; afterwards those that were given have moved on."""
        if not self._gate.draws:
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
        self,
        values: Tensor,
        mask: Tensor,
        shapes: Sequence[tuple[int, int]],
        generator: torch.Generator | None,
    ) -> Choice:
        """Choose by the price that a sketch of all ranks' values gives; see `sketch_price`."""
        if not self._gate.one_price:
            raise ValueError(
                f"gate must be Gate(rate=...), Gate(price=...) or UnbiasedGate(...) without "
                f"further options for more than exact_units ({self._exact_units}) units, where a "
                f"sketch sets one price for all ranks; got {self._gate!r}. Raise exact_units to "
                f"gather every value."
            )
        start = sum(rows * columns for rows, columns in shapes[: self._ranks.rank])
        place = (start + torch.arange(values.numel(), device=values.device)).view(values.shape)
        rate: float | None = getattr(self._gate, "rate", None)
        if self._gate.draws:
            choice = self._draw_by_sketch(values, mask, place, generator)
        elif rate is None:  # a fixed price: nothing has to travel but counts
            choice = self._gate.choose_all(values, mask)
        else:
            keep, price = self._keep_by_sketch(values, mask, rate, place)
            choice = Choice.of(keep.flatten(), mask.flatten(), price, values.dtype)
            choice = choice.reshape(values.shape)
            self._gate.count_call()
        with self._clock.stage("coordinate"):
            told = self._ranks.say(int(choice.keep.sum()), int(mask.sum()))
        self.num_kept, counted = (sum(column) for column in zip(*told, strict=True))
        share = self.num_kept / counted if counted else 0.0
        numbers = torch.tensor([float(choice.price), share], dtype=torch.float64)
        choice = choice._replace(price=numbers[0], rate=numbers[1])
        self.all_units = (values, mask, choice)
        return choice

    def _draw_by_sketch(
        self, values: Tensor, mask: Tensor, place: Tensor, generator: torch.Generator | None
    ) -> Choice:
        """Draw every unit by itself, at the price of all ranks: their number then varies."""
        worth = values[mask & (values != 0)].abs()
        with self._clock.stage("coordinate"):
            (counted,) = (
                sum(column) for column in zip(*self._ranks.say(int(mask.sum())), strict=True)
            )

            def price_of(sketches: Sequence[bytes]) -> float:
                pool, weight = pooled_values(sketches)
                return float(self._gate.price_for(pool, weight, torch.tensor([float(counted)])))

            price = agreed_price(self._ranks, worth, price_of)
        # Each rank draws for its own units: a hash of a unit's place and of one number for all.
        with self._same_draws(generator, values.device) as shared:
            device = None if shared is None else shared.device
            salt = torch.rand((), generator=shared, dtype=torch.float64, device=device)
        draws = lottery(place, salt=salt.to(values.device)).double() / 2.0**64 + 0.5
        at = torch.full((1,), price, dtype=torch.float64, device=values.device)
        parts = (values.flatten(), mask.flatten(), at, draws.flatten())
        return self._gate.choose_at(*parts).reshape(values.shape)

    def _keep_by_sketch(
        self, values: Tensor, mask: Tensor, rate: float, place: Tensor
    ) -> tuple[Tensor, float]:
        worth = mask & (values != 0)
        with self._clock.stage("coordinate"):
            told = self._ranks.say(int(mask.sum()), int(worth.sum()))
            counted, buyable = (sum(column) for column in zip(*told, strict=True))
            if buyable == 0:
                return worth, math.inf
            count = min(count_for(rate, counted), buyable)
            price = sketch_price(self._ranks, values[worth], count / buyable)
            above, tied = worth & (values > price), worth & (values == price)
            told = self._ranks.say(int(above.sum()), int(tied.sum()))
        over, level = (sum(column) for column in zip(*told, strict=True))
        # Discrete rewards put many units exactly at the price: a share of them, by their place.
        share = (count - over) / level if level else 0.0
        lot = lottery(place, salt=values.new_tensor(price)).double()
        return above | (tied & (lot / 2.0**64 + 0.5 < share)), price


def sketch_price(ranks: Ranks, values: Tensor, share: float) -> float:
    """Return the price above which about `share` of all ranks' values lies.

    Args:
        ranks: the group.
        values: [M_r] float of this rank, no NaN.
        share: in (0, 1].
    """
    return agreed_price(ranks, values, lambda sketches: merged_price(sketches, share))


def agreed_price(
    ranks: Ranks, values: Tensor, price_of: Callable[[Sequence[bytes]], float]
) -> float:
    """Return the price that rank 0 finds from the sketches of all ranks.

    Each rank sketches its own (KLL of Apache DataSketches); sketches merge into that of the union.

    Args:
        ranks: the group.
        values: [M_r] float of this rank, no NaN.
        price_of: sketches -> price.
    """
    own = torch.frombuffer(bytearray(sketch(values)), dtype=torch.uint8)
    lengths = [length for (length,) in ranks.say(own.numel())]
    everyone = ranks.gather(own, lengths)
    price = torch.zeros(1, dtype=torch.float64)
    if ranks.rank == 0:  # merging draws random bits: one rank does it for all
        price[0] = price_of([bytes(part.tolist()) for part in everyone])
    return float(ranks.broadcast(price))


def sketch(values: Tensor) -> bytes:
    """Return a mergeable sketch of values, [M] float: a few KB however many there are.

    Example:
        >>> import torch
        >>> parts = [sketch(torch.arange(0.0, 50.0)), sketch(torch.arange(50.0, 100.0))]
        >>> merged_price(parts, share=0.1)
        90.0
    """
    made = _datasketches().kll_doubles_sketch(_SKETCH_SIZE)
    made.update(values.detach().double().cpu().numpy())
    return bytes(made.serialize())


def merged_price(sketches: Sequence[bytes], share: float) -> float:
    """Return the lowest values among the highest `share` of all that was sketched."""
    kll = _datasketches().kll_doubles_sketch
    union = kll(_SKETCH_SIZE)
    for one in sketches:
        union.merge(kll.deserialize(one))
    count = max(1, round(share * union.n))
    return float(union.get_quantile((union.n - count) / union.n, False))


def pooled_values(sketches: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return values that stand for all that was sketched, and for how many each stands.

    Example:
        >>> import torch
        >>> parts = [sketch(torch.tensor([3.0, 1.0])), sketch(torch.ones(1))]
        >>> values, weight = pooled_values(parts)
        >>> sorted(values.tolist()), weight.tolist()
        ([1.0, 1.0, 3.0], [1.0, 1.0, 1.0])
    """
    kll = _datasketches().kll_doubles_sketch
    # Side by side, not merged: a merged sketch gives all its values a weight of 1, and going
    # through an empty one crashes the process (datasketches 5.2).
    read = [kll.deserialize(one) for one in sketches]
    pairs = [pair for one in read if not one.is_empty() for pair in one]
    both = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _datasketches() -> Any:
    try:
        return importlib.import_module("datasketches")
    except ImportError as error:
        raise ImportError(
            "more units than exact_units need a quantile sketch: pip install 'kondo[sketch]', or "
            "raise exact_units to gather every value."
        ) from error


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _check_nan(values: Tensor, mask: Tensor) -> None:
    broken = values.isnan() & mask
    if bool(broken.any()):
        raise ValueError(
            f"signal must not return NaN for a unit that counts, got it in {first_unit(broken)} "
            f"of this rank ({int(broken.sum())} in all)."
        )
