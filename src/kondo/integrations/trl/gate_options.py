"""The options that make a gate, in their short and their long form, and what contradicts them.

    kondo_gate = "unbiased:0.1"            kondo.parse_gate
    kondo_rate = 0.1, kondo_by = ...       the long form, for command lines with one option each

Both make a gate; what does not fit it is refused by `check_gate`, which looks at the gate alone.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

import kondo
from kondo.arguments import check_flag, check_optional, check_whole
from kondo.integrations.trl import correction

_SIGNALS: dict[str, Callable[..., Tensor]] = {
    "gradient_norm": kondo.signals.gradient_norm,
    "delight": kondo.signals.abs_delight,
    "advantage": kondo.signals.unit_advantage,
}

_ALLOWED = {
    "kondo_by": ("unbiased", "variance", "delight"),
    "kondo_unit": ("sequence", "token"),
    "kondo_screen": ("auto", "rollout", "exact"),
    "kondo_signal": tuple(_SIGNALS),
    "kondo_correction": ("none", "sequence"),
}

# Option of the long form -> its default, the values of kondo_by that take another, and why the rest
# do not.
_BELONGS_TO: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "kondo_price": (None, ("delight",), "a price is an amount of delight; give kondo_rate"),
    "kondo_noise": (None, ("unbiased",), "only an unbiased draw has a noise; give kondo_rate"),
    "kondo_signal": ("gradient_norm", ("unbiased",), "the signal is fixed"),
    "kondo_temperature": (0.0, ("delight",), "it softens a price of delight"),
    "kondo_reserve": (0.0, ("delight",), "it is drawn from what a price of delight skips"),
    "kondo_negative_quota": (0.0, ("delight",), "negative advantages are kept anyway"),
    "kondo_window": (0, ("delight",), "past batches set a price of delight only"),
}

_NUMBERS = (
    *("kondo_rate", "kondo_noise", "kondo_price", "kondo_temperature", "kondo_reserve"),
    *("kondo_negative_quota", "delight_eta", "kondo_correction_cap"),
)

# The long form, which kondo_gate replaces.
_LONG_FORM = {"kondo_rate": None, "kondo_by": "unbiased"} | {
    name: default for name, (default, _, _) in _BELONGS_TO.items()
}


def check_text(spec: Any) -> None:
    """Raise ValueError for a gate that is no text: a config is copied, and written to files."""
    if not isinstance(spec, str):
        raise ValueError(
            f"kondo_gate must be text for kondo.parse_gate, such as 'unbiased:0.1', or 'dense', "
            f"got {spec!r}; a gate of your own is set as trainer.gate."
        )


def gate_of(args: Any) -> kondo.BaseGate | None:
    """Return a new gate with these options; None, which keeps everything, for dense.

    Args:
        args: a config with our options.
    """
    if args.kondo_gate is not None:
        return kondo.parse_gate(args.kondo_gate)
    if args.kondo_rate == 1.0:
        return None
    if args.kondo_by == "unbiased":
        signal = _SIGNALS[args.kondo_signal]
        return kondo.UnbiasedGate(rate=args.kondo_rate, noise=args.kondo_noise, signal=signal)
    if args.kondo_by == "variance":
        return kondo.VarianceGate(rate=args.kondo_rate)
    return kondo.Gate(
        rate=args.kondo_rate,
        price=args.kondo_price,
        temperature=args.kondo_temperature,
        reserve=args.kondo_reserve,
        negative_quota=args.kondo_negative_quota,
        window=args.kondo_window,
    )


def check_options(args: Any) -> None:
    """Raise ValueError for options that are out of range or contradict each other."""
    for name, allowed in _ALLOWED.items():
        if getattr(args, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {getattr(args, name)!r}.")
    for name in _NUMBERS:
        check_optional(name, getattr(args, name))
    check_whole("kondo_window", args.kondo_window)
    check_flag("kondo_check", args.kondo_check)
    if args.kondo_gate is None:
        _check_long_form(args)
    else:
        check_text(args.kondo_gate)
        _check_short_form(args)
    correction.check_options(args)
    eta = args.delight_eta
    if eta is not None and not (eta > 0 and math.isfinite(eta)):
        raise ValueError(
            f"delight_eta must be finite and > 0, got {eta}; None leaves survivors unweighted."
        )
    check_gate(gate_of(args), args)


def _check_short_form(args: Any) -> None:
    given = {k: getattr(args, k) for k, v in _LONG_FORM.items() if getattr(args, k) != v}
    if given:
        named = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"kondo_gate={args.kondo_gate!r} already says what is kept; leave out {named}. Options "
            f"of a gate go into the text, as in 'delight:0.1,negative_quota=0.3'."
        )


def _check_long_form(args: Any) -> None:
    """Refuse what has no meaning, or no effect, for what kondo_by names."""
    for name, (default, takers, why) in _BELONGS_TO.items():
        if getattr(args, name) != default and args.kondo_by not in takers:
            others = " or ".join(f"kondo_by={taker!r}" for taker in takers)
            raise ValueError(
                f"{name} must be {default!r} with kondo_by={args.kondo_by!r}, got "
                f"{getattr(args, name)!r}: {why}. Leave it out, or set {others}."
            )
    given = [args.kondo_rate, args.kondo_noise, args.kondo_price]
    if sum(value is not None for value in given) != 1:
        raise ValueError(
            f"give kondo_gate, such as 'unbiased:0.1', or exactly one of kondo_rate, kondo_noise "
            f"and kondo_price, got {given}; 'unbiased:0.1' trains a tenth, 'dense' everything."
        )
    if args.kondo_rate is not None and not 0.0 < args.kondo_rate <= 1.0:
        raise ValueError(f"kondo_rate must lie in (0, 1], got {args.kondo_rate}.")


def check_gate(gate: kondo.BaseGate | None, args: Any) -> None:
    """Raise ValueError for a gate that does not fit the other options; None, dense, fits all.

    The config calls it for its own gate, the trainer for each that is put in, and each choice for
    what the gate is by then.
    """
    if gate is None:
        return
    unbiased, screens = (
        isinstance(gate, kondo.UnbiasedGate),
        kondo.signals.needs_log_probs(gate.signal),
    )
    # Option, whether it fits, what it must be, and why.
    for name, fits, expected, why in (
        (
            "kondo_unit",
            args.kondo_unit == "sequence" or not isinstance(gate, kondo.VarianceGate),
            "sequence",
            "tokens of one completion have one reward",
        ),
        (
            "kondo_screen",
            args.kondo_screen == "auto" or screens,
            "auto",
            "its signal needs no log-probs, so there is no screen",
        ),
        (
            "delight_eta",
            args.delight_eta is None or gate.signal is kondo.delight,
            None,
            "it weighs what is trained by delight, and the gate's signal is another",
        ),
        (
            "beta",
            args.beta == 0.0 or not unbiased or screens,
            0.0,
            "a completion without an advantage has a KL, and would never be drawn; a signal that "
            "reads log-probs, such as gradient_norm, sees it",
        ),
        (
            "entropy_coef",
            args.entropy_coef == 0.0 or not unbiased,
            0.0,
            "completions without an advantage are never drawn, so that their entropy would be "
            "missing from the mean gradient",
        ),
    ):
        if not fits:
            raise ValueError(
                f"{name} must be {expected!r} with the gate {gate!r}, got "
                f"{getattr(args, name)!r}: {why}. Leave it out, or choose another gate."
            )
