"""What every gate has: a signal (what a unit is worth) and a choice (which units that buys).

    signal(log_probs, advantages, mask=) -> values      one per element, summed over a sequence
    gate.choose(values, mask, generator) -> Choice      keep, weight, price, rate, probability

A gate owns both, so that `gate=kondo.VarianceGate(rate=0.1)` says everything. Whoever writes one
subclasses `BaseGate`, sets `signal` and defines `choose`. The other members have defaults; each
tells the step, the screen or the ranks one thing that they would otherwise have to guess.
"""

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, check_mask, first_unit
from kondo.core.delight import delight
from kondo.core.fingerprint import in_words

Signal = Callable[..., Tensor]
"""(log_probs, advantages, *, mask=None) -> values like log_probs, detached; see `kondo.signals`.

Optional attributes: `needs_log_probs = False` where it reads nothing of log_probs but their shape;
`of_sequences`, a function with the same arguments that returns one value per row, [N], for unit
"sequence" instead of the sum over a row's tokens; `of_densities`, a function with the same
arguments for log_probs that are densities measured from the mode, log pi(a) - log pi(mode);
`unchecked`, the same function without the check that log-probs are at most 0, which the step makes
together with its own; `zero_without_advantage = True` where it is 0 for an advantage of 0, whatever
the log-probs, so that a screen may leave such rows out.
"""

Unit = Literal["sample", "token", "sequence"]
"""What is gated: [..., N] log-probs one by one, [..., N, T] one by one, or their rows."""

_Signal = TypeVar("_Signal", bound=Callable[..., Tensor])

Randomness = torch.Generator | Tensor | None
"""Where draws come from: a generator, the default one, or uniform draws that were made already."""


_NO_PRICE = (
    "{} draws and has one_price = True, but no price for a draw: define price_for and choose_at, "
    "or set one_price = False."
)


def needs_log_probs(signal: Signal) -> bool:
    """Return whether a signal reads log-probs; it does unless it says that it does not.

    Options that were bound with `functools.partial` change nothing. Of a function that wraps
    another (`functools.wraps` copies attributes) nothing is believed.

    Example:
        >>> import kondo
        >>> needs_log_probs(kondo.delight), needs_log_probs(kondo.signals.advantage)
        (True, False)
    """
    while isinstance(signal, functools.partial) and not hasattr(signal, "needs_log_probs"):
        signal = signal.func
    return hasattr(signal, "__wrapped__") or bool(getattr(signal, "needs_log_probs", True))


def attribute_of(signal: Signal, name: str, default: Any = None) -> Any:
    """Return what a signal says of itself; of a function that wraps another nothing is believed.

    Options that were bound with `functools.partial` are bound to a function that it names, too; one
    that does not take them does not stand for the signal.
    """
    if hasattr(signal, "__wrapped__"):
        return default
    if not isinstance(signal, functools.partial) or hasattr(signal, name):
        return getattr(signal, name, default)
    found = attribute_of(signal.func, name, default)
    if found is default or not callable(found):
        return found
    try:
        inspect.signature(found).bind_partial(*signal.args, **signal.keywords)
    except TypeError:
        return default
    return functools.partial(found, *signal.args, **signal.keywords)


def value_name(signal: Signal) -> str:
    """Return what reports call a signal's values: "delight" if they are, else "signal"."""
    return "delight" if signal is delight else "signal"


def unit_values(
    signal: Signal,
    log_probs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    unit: Unit,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the signal's value of every unit, and which units count: like `Units.values`.

    A signal with another rule for sequences brings it as `of_sequences`, and one with another rule
    for densities as `of_densities`.
    """
    function: Signal = attribute_of(signal, "unchecked", signal)
    if unit == "sequence":
        function = attribute_of(signal, "of_sequences", function)
    if density:
        function = attribute_of(signal, "of_densities", function)
    values = at_least_float32(function(log_probs, advantages, mask=valid))
    unit_mask = valid
    if unit == "sequence":
        unit_mask = valid.any(dim=-1)
        values = values if values.shape == unit_mask.shape else values.sum(dim=-1)
    if values.shape != unit_mask.shape:
        raise ValueError(
            f"signal must return one value per unit, {list(unit_mask.shape)}, got "
            f"{list(values.shape)}; for sequences, one per row or one per token to be summed."
        )
    return values, unit_mask


def unchecked_as(signal: Callable[..., Tensor]) -> Callable[[_Signal], _Signal]:
    """Return a decorator for what is `signal` where log-probs are known to be at most 0."""

    def note(function: _Signal) -> _Signal:
        vars(signal)["unchecked"] = function
        return function

    return note


class Choice(NamedTuple):
    """What a gate chose. Units stand in the last dimension; leading ones are separate choices."""

    keep: Tensor
    """bool [..., M]: the unit is worth a backward pass."""
    weight: Tensor
    """float [..., M]: factor of the unit's loss; 0 where not kept."""
    price: Tensor
    """float64 [...], in the signal's units: below it a unit is skipped, or not kept for certain.
    Infinite if nothing is worth keeping; minus infinity where a gate has no price."""
    rate: Tensor
    """float64 [...]: kept units / units that count. 0 if nothing counts."""
    probability: Tensor
    """float [..., M]: chance that the unit was kept; 0 or 1 where nothing was drawn."""

    @classmethod
    def of(
        cls,
        keep: Tensor,
        mask: Tensor | None = None,
        price: Tensor | float = -math.inf,
        dtype: torch.dtype | None = None,
    ) -> "Choice":
        """Return the choice that keeps these units, each with weight 1 and nothing drawn.

        Args:
            keep: [..., M] bool.
            mask: [..., M] bool, the units that count; by default those that are kept.
            price: [...] float, or one number for all.
            dtype: of the weights; the default one if None.
        """
        weight = keep.to(dtype or torch.get_default_dtype())
        number = (keep if mask is None else mask).sum(-1)
        rate = keep.sum(-1, dtype=torch.float64) / number.clamp(min=1)
        if not isinstance(price, Tensor):
            price = torch.full_like(rate, price)
        return cls(keep, weight, price.double(), rate, weight)

    def reshape(self, shape: torch.Size) -> "Choice":
        """Return the same choice with its units in another shape."""
        parts = (part.reshape(shape) for part in (self.keep, self.weight, self.probability))
        keep, weight, probability = parts
        return Choice(keep, weight, self.price, self.rate, probability)


class BaseGate(ABC):
    """What every gate is. Subclasses define `choose`; the rest has defaults.

    Example:
        >>> import torch, kondo
        >>> class AboveMean(kondo.BaseGate):
        ...     def choose(self, values, mask, generator=None):
        ...         mean = (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        ...         return kondo.Choice.of((values > mean) & mask, mask)
        >>> AboveMean()(torch.tensor([0.3, -1.0, 2.0, 0.1])).keep
        tensor([False, False,  True, False])
    """

    signal: Signal = staticmethod(delight)
    """What a unit is worth."""
    draws: bool = False
    """Whether `choose` reads its generator. Ranks then share rank 0's."""
    remembers: bool = False
    """Whether `choose` changes a running state. The step then checks its inputs first."""
    on_host: bool = True
    """Whether `choose` may be shown few values of a CUDA batch on the CPU, where that is faster."""
    one_price: bool = False
    """Whether one price (or one rate) decides every unit by itself. Ranks with too many units to
    gather then agree on a price from a sketch of all values; actors get it from the learner."""

    @abstractmethod
    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M units, for each of the leading dimensions on its own.

        Reads nothing back from the device, so that many members choose at once and a CUDA graph can
        hold the call.

        Args:
            values: [..., M] float32 or float64, detached, no NaN where the mask is True.
            mask: [..., M] bool, True means "counts".
            generator: for draws; the default generator if None. Or the draws themselves, uniform on
                [0, 1), like values.
        """

    @torch.no_grad()
    def __call__(
        self,
        values: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Check the values, then choose once among all of them, whatever their shape.

        Raises:
            ValueError: NaN in a unit that counts.
        """
        return self.choose_all(*check_units(values, mask), generator)

    def choose_all(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose once among all units of checked values, of any shape; the step calls it."""
        draws = generator.reshape(-1) if isinstance(generator, Tensor) else generator
        choice = self.choose(values.reshape(-1), mask.reshape(-1), draws)
        return choice.reshape(values.shape)

    def price_for(self, values: Tensor, weight: Tensor, num_valid: Tensor) -> Tensor:
        """Return the price of units that some values stand for, [..., 1] float64.

        For gates with `one_price` that draw; see `choose_at`.

        Args:
            values: [..., V] float.
            weight: [..., V] float, how many units each stands for.
            num_valid: [..., 1], units that count, those of value 0 included.
        """
        raise NotImplementedError(_NO_PRICE.format(type(self).__name__))

    def choose_at(self, values: Tensor, mask: Tensor, price: Tensor, draws: Tensor) -> Choice:
        """Choose by a price that `price_for` returned elsewhere, every unit by itself.

        Args:
            values: [..., M] float.
            mask: [..., M] bool.
            price: [..., 1] float64.
            draws: [..., M] uniform on [0, 1).
        """
        raise NotImplementedError(_NO_PRICE.format(type(self).__name__))

    def row_facts(self, batch: Any) -> Tensor | None:
        """Return what `choose` must know of the batch's rows, [N, K]; None where nothing.

        Ranks gather it along the rows. It must be a tensor of integers, 0 meaning "nothing here".
        """
        return None

    def bind(self, facts: Tensor) -> "BaseGate":
        """Return this gate for the rows that `facts`, by `row_facts`, describe."""
        return self

    def take(self, rows: Tensor) -> "BaseGate":
        """Return this gate for some, int64 [R], of the rows that it is bound to."""
        return self

    def positives_needed(self, num_valid: int) -> int | None:
        """Return how many units of positive value settle the choice; None if all units matter.

        For signals with the sign of the advantage. With that many positive units in the batch,
        nothing with an advantage <= 0 can be kept: a screen may leave those rows out.

        Args:
            num_valid: units that count.
        """
        return None

    @property
    def eta(self) -> float:
        """Temperature in the signal's units, which diagnostics use; 0 for a hard gate."""
        return 0.0

    def count_call(self) -> None:
        """Note a choice that was made elsewhere for this gate, as by a sketch over ranks."""
        return

    def fingerprint(self) -> str:
        """Return in words what ranks must have in common: options and running state.

        By default its own repr, or the class and its public attributes, each by `in_words`.
        """
        if type(self).__repr__ is not object.__repr__:
            return repr(self)
        options = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        shown = (f"{name}={in_words(value)}" for name, value in options.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def state_dict(self) -> dict[str, Any]:
        """Return the running state, plain tensors and numbers; empty where there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(
                f"state must be empty for {type(self).__name__}, which has none, got the keys "
                f"{sorted(state)}; give what its state_dict() returned."
            )


AnyGate = BaseGate | Callable[..., Choice] | Choice | None
"""What can be given as a gate; see `as_gate`. None keeps everything."""


def check_units(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return detached values and which units count, after checking that those hold no NaN."""
    units = at_least_float32(check_float("values", values).detach())
    counts = check_mask(mask, values.shape)
    if counts is None:
        counts = torch.ones_like(units, dtype=torch.bool)
    broken = units.isnan() & counts
    if bool(broken.any()):
        raise ValueError(
            f"values must not be NaN where the mask is True, got NaN in {first_unit(broken)} "
            f"({int(broken.sum())} in all); find the NaN log-prob or advantage, or mask the unit."
        )
    return units, counts
