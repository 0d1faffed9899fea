"""The price at the source: one for all actors, from sketches of what their units are worth.

    actor:    values of a rollout -> REQ sketch -> (values, weights)
    learner:  those of recent rollouts, pooled -> price for a rate -> published with the weights
    both:     values, price -> which units are bought, and their weights

An actor sketches all values, also of rows that it does not send, so the next price is that of all
units. A sketch travels as two arrays: nothing foreign is parsed.

REQ, not KLL, because prices lie in the upper tail, where its error shrinks: for the price of 3% of
1000 units, 126 values are off by 0.14% of the units (standard deviation), KLL's 293 by 0.43%.
"""

import copy
import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from datasketches import req_floats_sketch
from torch import Tensor

import kondo
from kondo.actors.setup import Settings

Array = npt.NDArray[Any]


class Price(NamedTuple):
    """What a unit must be worth."""

    price: float  # delight above it is kept; in a draw, units of this value are certain
    share: float  # of the units exactly at the price that is kept: discrete rewards make many


EVERYTHING = Price(-math.inf, 1.0)


class Sketch(NamedTuple):
    """Some values that stand for all units of a rollout."""

    values: Array  # [m] float32, none of them zero
    weights: Array  # [m] int64: units each stands for; their sum is that of non-zero values


class SourceGate:
    """The gate of a run as actors and learner know it: one price buys every unit by itself.

    A gate without such a price, `one_price` False, chooses among all units of a step, which the
    learner alone sees. Its price is `EVERYTHING`, and actors send all rows.
    """

    def __init__(self, settings: Settings):
        self.gate = copy.deepcopy(settings.gate)  # it may remember, and settings are shared
        self.sketch_size = settings.sketch_size
        self._adapter = kondo.adapters.adapter_of(self.gate)
        self.one_price = self._adapter.one_price
        self.at_source = settings.at_source and self.one_price
        # A draw is by the size of a value, whatever its sign.
        self._draws, self._seed = self._adapter.draws, settings.seed
        self.least = 0.0 if self._draws else -math.inf
        """The lowest value that a unit can have."""

    def values(self, log_probs: Tensor, advantages: Tensor, unit: kondo.Unit) -> Tensor:
        """Return the float32 value of each unit, [N], or [N, T] for unit "token".

        Computed in float64: the same on actor and learner, whatever other rows there are.
        """
        signal = kondo.delight if self.gate is None else self.gate.signal
        everything = torch.ones_like(log_probs, dtype=torch.bool)
        exact = log_probs.double(), advantages.double()
        values = kondo.signals.unit_values(signal, *exact, everything, unit)[0].float()
        return values.abs() if self._draws else values

    def price(self, values: Tensor, weight: Tensor, num_units: int) -> Price:
        """Return the price for `num_units` units, of which values [V] stand for weight [V] each.

        A draw keeps everything where recent rollouts had no value other than 0: they say nothing of
        a price, and an infinite one would drop the first success for good.
        """
        if not self.one_price or (self._draws and not len(values)):
            return EVERYTHING
        number = torch.tensor([num_units], dtype=torch.float64)
        price, share = self._adapter.price_for(values, weight, number)
        return Price(float(price), float(share))

    def bought(self, values: Tensor, price: Price, number: int, index: Tensor) -> kondo.Choice:
        """Return which units a price buys, and their float64 weights.

        Chance is a hash of the unit's rollout (`number`), row (`index`, int64 [n]) and token: actor
        and learner decide alike, whatever other rows they see. Values are [n] or [n, T] float32.
        """
        if price == EVERYTHING:
            return kondo.Choice.of(values != 0, dtype=torch.float64)
        place = index + number * 0x9E3779B1
        if values.ndim == 2:
            place = place.unsqueeze(1) * values.shape[1] + torch.arange(values.shape[1])
        edge, share = torch.tensor(price, dtype=torch.float64).unsqueeze(1)
        # Ties are cut by the price, which changes; draws differ from run to run.
        salt = torch.tensor(self._seed, dtype=torch.float64) if self._draws else edge
        lots = kondo.sampling.lottery(place, salt=salt)
        mask = torch.ones_like(values, dtype=torch.bool)
        return self._adapter.choose_at(values.double(), mask, edge, share, lots)

    def state_dict(self) -> dict[str, Any]:
        """Return what the gate remembers, if the learner asks it at all."""
        asked = not self.one_price and self.gate is not None
        return copy.deepcopy(self.gate.state_dict()) if asked else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not self.one_price and self.gate is not None:
            self.gate.load_state_dict(copy.deepcopy(state))


def sketch(values: Tensor, size: int) -> Sketch:
    """Return a REQ sketch of the non-zero, finite values; fewer than 6 * size it holds whole.

    Example:
        >>> import torch
        >>> values, weights = sketch(torch.tensor([0.0, 2.0, -1.0]), size=4)
        >>> sorted(values.tolist()), weights.tolist()
        ([-1.0, 2.0], [1, 1])
    """
    flat = values.flatten()
    made = req_floats_sketch(size, True)  # True: exact towards the top
    made.update(flat[(flat != 0) & flat.isfinite()].float().numpy())
    # Going through an empty sketch crashes the process (datasketches 5.2).
    pairs = [] if made.is_empty() else list(made)
    return Sketch(
        np.array([value for value, _ in pairs], dtype=np.float32),
        np.array([weight for _, weight in pairs], dtype=np.int64),
    )


class PriceWindow:
    """Sketches of the last `size` rollouts, and the price that follows from them."""

    def __init__(self, size: int):
        self._recent: deque[tuple[Sketch, int]] = deque(maxlen=size)

    def copy(self) -> "PriceWindow":
        """Return a window with the same rollouts; pushing to it leaves this one as it is."""
        other = PriceWindow(0)
        other._recent = self._recent.copy()
        return other

    def push(self, found: Sketch, num_units: int) -> None:
        """Add a rollout: the sketch of its values, and how many units it had, zeros included."""
        self._recent.append((found, num_units))

    def price(self, gate: SourceGate) -> Price:
        """Return the gate's price for the units of the window.

        Example:
            >>> import torch
            >>> window = PriceWindow(4)
            >>> window.push(sketch(torch.tensor([1.0, 2.0, 3.0, 3.0]), size=4), num_units=8)
            >>> window.price(SourceGate(Settings(gate="delight:0.125")))
            Price(price=3.0, share=0.5)
        """
        if not self._recent:
            return EVERYTHING
        sketches = [found for found, _ in self._recent]
        values, weights = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*sketches, strict=True)
        )
        return gate.price(values, weights.double(), sum(units for _, units in self._recent))

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers."""
        return {
            "values": [torch.from_numpy(found.values.copy()) for found, _ in self._recent],
            "weights": [torch.from_numpy(found.weights.copy()) for found, _ in self._recent],
            "units": [units for _, units in self._recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is not what a window can hold; nothing is changed then.
        """
        parts: list[Any] = [state.get(name) for name in ("values", "weights", "units")]
        whole = all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts)
        entries: list[Any] = list(zip(*parts, strict=True)) if whole else [(None, None, None)]
        if not all(_is_entry(*entry) for entry in entries):
            raise ValueError(
                f"window must have, for each rollout, finite values other than 0, a weight >= 1 "
                f"for each, and units >= 1 that the weights do not exceed, got {state}."
            )
        self._recent.clear()
        self._recent += [(Sketch(v.numpy(), w.numpy()), units) for v, w, units in entries]


def _is_entry(values: Any, weights: Any, units: Any) -> bool:
    """Return whether this can be the sketch of a rollout and its number of units."""
    return (
        isinstance(values, Tensor)
        and isinstance(weights, Tensor)
        and (values.dtype, weights.dtype) == (torch.float32, torch.int64)
        and values.ndim == 1
        and values.shape == weights.shape
        and bool((values.isfinite() & (values != 0) & (weights >= 1)).all())
        and type(units) is int
        and units >= max(1, int(weights.sum()))
    )
