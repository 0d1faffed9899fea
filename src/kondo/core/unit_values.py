"""The value of every unit: what a step asks of a signal, and what is known of those of `kondo`."""

import functools
import inspect
from typing import NamedTuple

from torch import Tensor

from kondo.arguments import at_least_float32
from kondo.core.base_gate import Signal, Unit
from kondo.core.delight import delight


class Known(NamedTuple):
    """What is known of a signal of `kondo` beside its values: functions with the same arguments."""

    unchecked: Signal | None = None
    """The same values of log-probs that the caller holds to be at most 0: nothing is read."""
    of_sequences: Signal | None = None
    """For unit "sequence", one value per row, [N], instead of the sum over a row's tokens."""
    of_densities: Signal | None = None
    """For log_probs that are densities measured from the mode, log pi(a) - log pi(mode)."""
    zero_without_advantage: bool = False
    """Whether a value is 0 where the advantage is, so that a screen may leave such rows out."""


_KNOWN: list[tuple[Signal, Known]] = []


def note(signal: Signal, known: Known) -> None:
    """Note what is known of a signal."""
    _KNOWN.append((signal, known))


def known_of(signal: Signal) -> Known:
    """Return what is known of a signal; its options may be bound with `functools.partial`."""
    if not isinstance(signal, functools.partial):
        # By identity: a callable of the user's need not have a hash.
        return next((known for one, known in _KNOWN if one is signal), Known())
    known = known_of(signal.func)

    def bound(function: Signal | None) -> Signal | None:
        """Return the function with the same options, None if it does not take them."""
        if function is None:
            return None
        try:
            inspect.signature(function).bind_partial(*signal.args, **signal.keywords)
        except TypeError:
            return None
        return functools.partial(function, *signal.args, **signal.keywords)

    return Known(
        bound(known.unchecked),
        bound(known.of_sequences),
        bound(known.of_densities),
        known.zero_without_advantage,
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
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the signal's value of every unit, and which units count.

    Args:
        signal: what a unit is worth.
        log_probs: [..., N] or [..., N, T] float, at most 0 for signals of `kondo`.
        advantages: like log_probs, or [..., N].
        valid: bool like log_probs: the element counts.
        unit: what is gated; a sequence has the sum of its tokens, unless its signal has a rule.
        density: whether log_probs are densities, measured from the mode.
        whole: every element counts.
    """
    known = known_of(signal)
    function = known.unchecked or signal
    # Where all counts, signals of ours need no mask: fewer kernels.
    mask = None if whole and known.unchecked is not None else valid
    if unit == "sequence":
        function = known.of_sequences or function
    if density:
        function = known.of_densities or function
    values = at_least_float32(function(log_probs, advantages, mask=mask))
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
