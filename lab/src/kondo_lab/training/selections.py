"""Contenders that differ in what they select, or in their loss, and in nothing else.

    selection    what is kept, at one rate        loss    of what is kept
    |delight|, |advantage|, ...                   PG      -U log pi
                                                  GRPO    PPO's clip, U divided by the group's std

Every selection meets every loss. All have the full denominator, that of dense, so that a selection
is never confused with a loss, a division or a denominator.
"""

import dataclasses
from typing import Any

from kondo import BaseGate, Gate, UnbiasedGate, losses, signals
from kondo_lab.training.contenders import CLIPPED, Contender, PartialDelight
from kondo_lab.training.gates import DrawnVarianceGate, WeightedGate

LOSSES: dict[str, dict[str, Any]] = {
    "PG": {"loss": losses.pg, "divided": False},
    "GRPO": {"loss": CLIPPED, "divided": True},
}
"""Name of a dense contender -> its loss."""
JOIN = " by "
"""Between what is selected and its loss, in the name of a contender."""
SOFTNESS = 0.1
"""Temperature of the Bernoulli gate, in nats of delight."""
ETA = 1.0
"""Temperature of the weights within the kept rows: the papers'."""


def selectors(rate: float) -> dict[str, BaseGate]:
    """Return name -> gate of every way to select that meets both losses.

    Example:
        >>> from kondo_lab.training.selections import selectors
        >>> list(selectors(0.1))
        ['delight', '|advantage|', 'variance', 'gradient norm', 'random']
    """
    return {
        "delight": Gate(rate=rate),
        "|advantage|": Gate(rate=rate, signal=signals.abs_advantage),
        "variance": DrawnVarianceGate(rate=rate),
        "gradient norm": Gate(rate=rate, signal=signals.gradient_norm),
        "random": Gate(rate=rate, signal=signals.uniform),
    }


def named(selection: str, loss: str) -> str:
    """Return the name of a contender.

    Example:
        >>> from kondo_lab.training.selections import named
        >>> named("delight", "PG")
        'delight by PG'
    """
    return f"{selection}{JOIN}{loss}"


def crossed(rate: float) -> list[Contender]:
    """Return both dense contenders, then every selection with every loss.

    Example:
        >>> from kondo_lab.training.selections import crossed
        >>> [each.name for each in crossed(0.1)][:4]
        ['PG', 'GRPO', 'delight by PG', 'delight by GRPO']
    """
    dense = [Contender(name=loss, **options) for loss, options in LOSSES.items()]
    return dense + [
        Contender(name=named(selection, loss), gate=gate, **options)
        for selection, gate in selectors(rate).items()
        for loss, options in LOSSES.items()
    ]


def variants(rate: float, *, mark: str, noise: float = 1.5) -> list[Contender]:
    """Return readings of the delight gate, each with its control, and unbiased gates.

    Args:
        rate: share of the rows, or tokens, that those with a rate keep.
        mark: the character that stands before an answer.
        noise: bound of the gate without a rate.

    Example:
        >>> from kondo_lab.training.selections import variants
        >>> [each.name for each in variants(0.1, mark=">")][:3]
        ['delight tokens by PG', 'random tokens by PG', 'price 0 by PG']
    """
    kept = Contender(name="", gate=Gate(rate=rate))

    def other(selection: str, loss: str = "PG", **changes: Any) -> Contender:
        changes = {**LOSSES[loss], **changes}
        return dataclasses.replace(kept, name=named(selection, loss), **changes)

    def by(signal: Any) -> Gate:
        return Gate(rate=rate, signal=signal)

    return [
        other("delight tokens", unit="token"),
        other("random tokens", gate=by(signals.uniform), unit="token"),
        other("price 0", gate=Gate(price=0.0)),
        other("Bernoulli", gate=Gate(rate=rate, temperature=SOFTNESS)),
        other("mean delight", gate=by(PartialDelight(mean=True))),
        other("sigmoid within kept", gate=WeightedGate(rate=rate, eta=ETA)),
        other("answer delight", gate=by(PartialDelight(part="answer", mark=mark))),
        other("working delight", gate=by(PartialDelight(part="working", mark=mark))),
        other("unbiased", "GRPO", gate=UnbiasedGate(rate=rate)),
        other(f"noise {noise:g}", "GRPO", gate=UnbiasedGate(noise=noise)),
    ]
