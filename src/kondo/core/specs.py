"""Gates as short text, for configuration files and command lines: "unbiased:0.1" -> a gate.

rule:number[,option=value,...]      a rule of this package
package.module:name                 a gate, or a function that returns one, of your own
dense                               None: everything is trained
"""

import ast
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from kondo.core import signals
from kondo.core.base_gate import BaseGate, Signal
from kondo.core.delight import delight
from kondo.core.gates import Gate
from kondo.core.given_gates import as_gate
from kondo.core.unbiased import UnbiasedGate
from kondo.core.variance import VarianceGate

# Word of a spec -> its gate, and the argument that the number is.
RULES: dict[str, tuple[Callable[..., BaseGate], str]] = {
    "unbiased": (UnbiasedGate, "rate"),
    "noise": (UnbiasedGate, "noise"),
    "variance": (VarianceGate, "rate"),
    "delight": (Gate, "rate"),
    "price": (Gate, "price"),
}
SIGNALS: dict[str, Signal] = {
    "delight": delight,
    "advantage": signals.advantage,
    "abs_advantage": signals.abs_advantage,
    "abs_delight": signals.abs_delight,
    "gradient_norm": signals.gradient_norm,
    "surprisal": signals.surprisal,
}
DENSE = "dense"

_GRAMMAR = (
    "write 'unbiased:0.1', 'noise:1.5', 'variance:0.1', 'delight:0.03', 'price:0' or 'dense', with "
    "options as in 'delight:0.1,negative_quota=0.3', or 'package.module:name' for a gate of your "
    "own"
)


def parse_gate(spec: Any) -> BaseGate | None:
    """Return the gate that a short text describes; None, which trains everything, for "dense".

    | spec             | gate                                                                      |
    |------------------|---------------------------------------------------------------------------|
    | `unbiased:0.1`   | `kondo.UnbiasedGate(rate=0.1)`                                            |
    | `noise:1.5`      | `kondo.UnbiasedGate(noise=1.5)`                                           |
    | `variance:0.1`   | `kondo.VarianceGate(rate=0.1)`                                            |
    | `delight:0.03`   | `kondo.Gate(rate=0.03)`                                                   |
    | `price:0`        | `kondo.Gate(price=0.0)`                                                   |
    | `dense`          | None                                                                      |
    | `my.gates:Mine`  | what `Mine` of the module `my.gates` is, or what it returns when called   |

    Further options of the gate follow, separated by commas: `delight:0.1,negative_quota=0.3`,
    `unbiased:0.1,signal=advantage`. A signal goes by its name in `kondo.signals`.

    A new gate is returned each time, but for a gate object that is named by its import path. Gates
    may remember past steps, so parse once, not per step.

    Args:
        spec: the text. Or what `kondo.backward` takes as a gate, which is returned as one: a gate,
            a `kondo.Choice`, a callable (values, mask, generator) -> `kondo.Choice`, or None.

    Raises:
        ValueError: the text is no spec, or the gate refuses its options.

    Example:
        >>> import kondo
        >>> kondo.parse_gate("unbiased:0.1")
        UnbiasedGate(rate=0.1)
        >>> kondo.parse_gate("delight:0.1,negative_quota=0.3")
        Gate(rate=0.1, negative_quota=0.3)
    """
    if not isinstance(spec, str):
        return None if spec is None else as_gate(spec)
    text = spec.strip()
    if text == DENSE:
        return None
    word, colon, rest = text.partition(":")
    if colon and "." in word and word not in RULES and rest.isidentifier():
        return _imported(spec, word, rest)
    if not colon or word not in RULES:
        raise ValueError(f"gate spec must name a known rule, got {spec!r}; {_GRAMMAR}.")
    make, main = RULES[word]
    number, *options = (part.strip() for part in rest.split(","))
    try:
        arguments: dict[str, Any] = {main: float(number)}
    except ValueError:
        raise ValueError(
            f"gate spec must have a number after the colon, got {number!r} in {spec!r}; {_GRAMMAR}."
        ) from None
    allowed = [name for name in inspect.signature(make).parameters if name != main]
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        if not equals or name not in allowed or name in arguments:
            raise ValueError(
                f"options in a gate spec must be name=value, each once, with a name of {allowed}, "
                f"got {option!r} in {spec!r}."
            )
        if name == "signal" and value not in SIGNALS:
            raise ValueError(f"signal must be one of {sorted(SIGNALS)}, got {value!r} in {spec!r}.")
        arguments[name] = SIGNALS[value] if name == "signal" else _literal(value)
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"gate spec {spec!r} is refused: {error}") from error


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _imported(spec: str, module: str, name: str) -> BaseGate:
    """Return a gate of the user's own, or what a function or class of that name makes."""
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"gate spec {spec!r} names what cannot be imported: {error}; the module must be on "
            f"Python's path of every process."
        ) from error
    try:
        made = found() if callable(found) and not isinstance(found, BaseGate) else found
    except (TypeError, ValueError) as error:
        raise ValueError(f"gate spec {spec!r} is refused: {error}") from error
    if isinstance(made, BaseGate):
        return made
    raise ValueError(
        f"gate spec {spec!r} must name a kondo.BaseGate, or a class or function without arguments "
        f"that returns one, got {made!r}."
    )
