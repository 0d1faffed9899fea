"""One choice for the units of all ranks.

    values of each rank -> all of them, in the order of the ranks -> gate -> slice of each rank

Every rank calls the same gate on the same units, so keep, price, ties and the gate's running state
are those of one process with all rows, and the same on all ranks. Beyond `exact_units`, where the
gate is one that a price alone decides, a sketch of each rank's values travels instead.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kondo.core.adapters import Adapter, adapter_of, register
from kondo.core.base_gate import BaseGate, Choice, Randomness
from kondo.core.sampling import GOLDEN, count_for, lottery, mix_bits
from kondo.ranks.communicator import Ranks
from kondo.stage_clock import StageClock

# Values a sketch keeps per level: the rank of its quantiles is off by about 0.05% of all units.
_SKETCH_SIZE = 4096

_Shapes = Sequence[tuple[int, int]]
"""Rows and columns of every rank."""


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

    def __init__(
        self, gate: BaseGate, batch: Any, ranks: Ranks, clock: StageClock, *, exact_units: int
    ):
        self.signal = gate.signal
        self._known, self._ranks, self._clock = adapter_of(gate), ranks, clock
        self._facts, self._exact_units = self._known.row_facts(batch), exact_units
        self.gathered = False
        """Whether the values of all ranks came together here."""
        self.num_kept = 0
        """Units kept by all ranks, as this rank has it."""
        self.digest = 0
        """Which units these are, as one number; 0 where every rank chose for its own alone."""
        self.all_units: tuple[Tensor, Tensor, Choice]
        """Values, mask and choice of all ranks where they came together, else of this one."""

    @torch.no_grad()
    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Return this rank's part of the choice; price and rate are those of all ranks."""
        assert not isinstance(generator, Tensor)  # made for the units of this rank alone
        num_rows, width = values.shape[0], values.shape[1] if values.ndim == 2 else 1
        columns = 0 if self._facts is None else self._facts.shape[1]
        with self._clock.stage("wait"):
            told = self._ranks.say(num_rows, width, values.dtype == torch.float64, columns)
        shapes = [(rows, columns) for rows, columns, *_ in told]
        values = values.to(torch.float64 if any(each[2] for each in told) else torch.float32)
        many = sum(rows * columns for rows, columns in shapes) > self._exact_units
        if many and self._known.one_price:
            return self._by_price(values, mask, shapes, generator)
        with self._clock.stage("coordinate"):
            # NaN marks what does not count: one tensor travels instead of two.
            own = torch.where(mask, values, torch.nan)
            units = self._rows_of_all(own, shapes, padding=torch.nan)
            counts = ~units.isnan()
            units, known = torch.where(counts, units, 0.0), self._known
            if self._facts is not None:
                facts = [(rows, columns) for rows, *_, columns in told]
                known = adapter_of(known.bind(self._rows_of_all(self._facts, facts, padding=0)))
        with self._same_draws(generator, units.device) as shared:
            choice = known.choose(units, counts, shared)
        for name in ("keep", "weight", "probability"):
            if getattr(choice, name).shape != units.shape:
                raise ValueError(
                    f"gate must return {name} with one value per unit of all ranks, "
                    f"{list(units.shape)}, got {list(getattr(choice, name).shape)}; "
                    f"a gate that is bound to the rows of one rank cannot choose for all."
                )
        self.gathered, self.all_units = True, (units, counts, choice)
        place = torch.arange(1, choice.keep.numel() + 1, device=choice.keep.device)
        marks = mix_bits(place * GOLDEN).where(choice.keep.flatten(), 0)
        self.num_kept, self.digest = torch.stack([choice.keep.sum(), marks.sum()]).tolist()
        start = sum(rows for rows, _ in shapes[: self._ranks.rank])

        def own_part(units: Tensor) -> Tensor:
            part = units[start : start + num_rows].to(values.device)
            return part if part.ndim == 1 else part[:, :width]

        keep, weight, price, rate, probability = choice
        return Choice(own_part(keep), own_part(weight), price, rate, own_part(probability))

    def _rows_of_all(self, values: Tensor, shapes: _Shapes, *, padding: float) -> Tensor:
        """Gather [N] or [N, T] of every rank, one after another, as wide as the widest."""
        parts = self._ranks.gather(values.flatten(), [math.prod(shape) for shape in shapes])
        if values.ndim == 1:
            return torch.cat(parts)
        widest = max(columns for _, columns in shapes)
        wide = [
            torch.nn.functional.pad(part.view(shape), (0, widest - shape[1]), value=padding)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return torch.cat(wide)

    @contextmanager
    def _same_draws(
        self, generator: torch.Generator | None, device: torch.device
    ) -> Iterator[torch.Generator | None]:
        """Give every rank rank 0's generator; afterwards those that were given have moved on."""
        if not self._known.draws:
            yield generator
            return
        source = generator
        if source is None and device.type == "cuda":
            source = torch.cuda.default_generators[device.index or 0]
        source = source or torch.default_generator
        shared = torch.Generator(source.device)
        with self._clock.stage("coordinate"):
            shared.set_state(self._ranks.broadcast(source.get_state()))
        yield shared
        if generator is not None or self._ranks.rank == 0:
            source.set_state(shared.get_state())

    def _by_price(
        self, values: Tensor, mask: Tensor, shapes: _Shapes, generator: torch.Generator | None
    ) -> Choice:
        """Choose every unit by itself, at a price that is found from a sketch of all values."""
        known, ranks, worth = self._known, self._ranks, mask & (values != 0)
        rate: float | None = getattr(known.gate, "rate", None)
        if rate is None and not known.draws:  # a fixed price: nothing has to travel but counts
            choice = known.choose(values, mask)
        else:
            with self._clock.stage("coordinate"):
                counted, buyable = ranks.total(int(mask.sum()), int(worth.sum()))
                price, share = math.inf, 1.0
                if known.draws:
                    of_all = torch.tensor([float(counted)])
                    price = _agreed_price(
                        ranks,
                        values[worth].abs(),
                        lambda parts: float(known.price_for(*pooled_values(parts), of_all)[0]),
                    )
                elif buyable:
                    count = min(count_for(rate or 0.0, counted), buyable)
                    price = _agreed_price(
                        ranks, values[worth], lambda parts: merged_price(parts, count / buyable)
                    )
                    above, level = worth & (values > price), worth & (values == price)
                    over, tied = ranks.total(int(above.sum()), int(level.sum()))
                    # Discrete rewards put many units exactly at the price: a share is kept.
                    share = (count - over) / tied if tied else 0.0
            salt = values.new_tensor(price)
            if known.draws:  # one number for all ranks: each then draws for its own units
                with self._same_draws(generator, values.device) as shared:
                    device = None if shared is None else shared.device
                    salt = torch.rand((), generator=shared, dtype=torch.float64, device=device)
            start = sum(math.prod(shape) for shape in shapes[: ranks.rank])
            place = start + torch.arange(values.numel(), device=values.device)
            lots = lottery(place, salt=salt.to(values.device))
            at, some = values.new_tensor([[price], [share]], dtype=torch.float64)
            choice = known.choose_at(values.flatten(), mask.flatten(), at, some, lots)
            choice = choice.reshape(values.shape)
        with self._clock.stage("coordinate"):
            self.num_kept, counted = ranks.total(int(choice.keep.sum()), int(mask.sum()))
        numbers = [float(choice.price), self.num_kept / counted if counted else 0.0]
        price_and_rate = torch.tensor(numbers, dtype=torch.float64)
        choice = choice._replace(price=price_and_rate[0], rate=price_and_rate[1])
        self.all_units = (values, mask, choice)
        return choice


@register(GlobalGate)
class _GlobalAdapter(Adapter):
    remembers = True  # a rank names its broken input before it waits for the others

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        choice: Choice = self.gate.choose(values, mask, generator)
        return choice


def _agreed_price(
    ranks: Ranks, values: Tensor, price_of: Callable[[Sequence[bytes]], float]
) -> float:
    """Return the price that rank 0 finds from the sketches of the values of all ranks."""
    own = torch.frombuffer(bytearray(sketch(values)), dtype=torch.uint8)
    everyone = ranks.gather(own, [length for (length,) in ranks.say(own.numel())])
    price = torch.zeros(1, dtype=torch.float64)
    if ranks.rank == 0:  # merging draws random bits: one rank does it for all
        price[0] = price_of([bytes(part.tolist()) for part in everyone])
    return float(ranks.broadcast(price))


def sketch(values: Tensor) -> bytes:
    """Return a mergeable sketch of values, [M] float: a few KB however many there are.

    KLL of Apache DataSketches.

    Example:
        >>> import torch
        >>> parts = [sketch(torch.arange(0.0, 50.0)), sketch(torch.arange(50.0, 100.0))]
        >>> merged_price(parts, share=0.1)
        90.0
        >>> values, weight = pooled_values([sketch(torch.tensor([3.0, 1.0]))])
        >>> values.tolist(), weight.tolist()
        ([1.0, 3.0], [1.0, 1.0])
    """
    made = _kll()(_SKETCH_SIZE)
    made.update(values.detach().double().cpu().numpy())
    return bytes(made.serialize())


def merged_price(sketches: Sequence[bytes], share: float) -> float:
    """Return the lowest value among the highest `share` of all that was sketched."""
    union = _kll()(_SKETCH_SIZE)
    for one in sketches:
        union.merge(_kll().deserialize(one))
    count = max(1, round(share * union.n))
    return float(union.get_quantile((union.n - count) / union.n, False))


def pooled_values(sketches: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return values that stand for all that was sketched, ascending, and how many each stands for.

    Side by side, not merged: a merged sketch gives all its values a weight of 1, and going through
    an empty one crashes the process (datasketches 5.2).
    """
    read = [_kll().deserialize(one) for one in sketches]
    pairs = sorted(pair for one in read if not one.is_empty() for pair in one)
    both = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _kll() -> Any:
    try:
        return importlib.import_module("datasketches").kll_doubles_sketch
    except ImportError as error:
        raise ImportError(
            "more units than exact_units need a quantile sketch: pip install 'kondo[sketch]', or "
            "raise exact_units to gather every value."
        ) from error
