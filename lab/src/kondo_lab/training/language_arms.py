"""Arms of language models, under the names of the studies.

    published     as published: dense, DG, DG-K, PODS, top-entropy tokens, the filter
    unbiased      dense GRPO whose gradient is estimated from some rows
    crossed       what differs in the selection or the loss, and in nothing else
    variants      readings of the delight gate, each with its control

All sum over tokens and divide by a number of tokens. They screen by the sampler's log-probs unless
they say "exact".
"""

import dataclasses
from functools import partial
from typing import Any

from kondo import BaseGate, Gate, UnbiasedGate, losses, signals
from kondo.lm import BudgetGate
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.gates import DrawnVarianceGate, Everything, WeightedGate
from kondo_lab.training.text_signals import PartialDelight, entropy

text_arm = partial(Arm, screen="free")
"""An arm that screens by the sampler's log-probs."""
CLIPPED = partial(losses.ppo, clip=0.2)
"""GRPO's loss."""
FILTER = Gate(rate=1.0, signal=signals.abs_advantage)
"""Keeps answers to prompts whose rewards differ: U is not 0."""
UNBIASED_SIGNALS: dict[str, signals.Signal] = {
    "": signals.gradient_norm,
    " |delight|": signals.abs_delight,
    " |advantage|": signals.advantage,
}
"""Ending of an arm's name -> what rows are drawn in proportion to; the first is the gate's
default."""


def published(
    *,
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3),
    etas: tuple[float, ...] = (0.1, 1.0, 10.0),
) -> list[Arm]:
    """Return the arms, each once, dense ones first.

    Where a method has a loss of its own in the literature it has it here: PODS, top-entropy tokens
    and the zero-advantage filter are GRPO's; what is compared with DG-K at an equal rate has
    DG-K's, plain PG. PODS averages over what it keeps, as published.

    Example:
        >>> from kondo_lab.training.language_arms import published
        >>> [each.name for each in published(rates=(0.03,), etas=(1.0,))][:5]
        ['PG', 'GRPO', 'DG, eta 1', 'zero-advantage filter', 'DG-K 3%']
    """
    found = [
        text_arm(name="PG"),
        text_arm(name="GRPO", loss=CLIPPED, divided=True),
        *(text_arm(name=f"DG, eta {eta:g}", gate=Everything(eta), unit="token") for eta in etas),
        text_arm(name="zero-advantage filter", gate=FILTER, loss=CLIPPED, divided=True),
    ]
    for rate in rates:
        found += at_rate(rate)
    return found


def at_rate(rate: float) -> list[Arm]:
    """Return the arms that keep a share `rate`."""
    share = percent(rate)
    kept = text_arm(name=f"DG-K {share}", gate=Gate(rate=rate))

    def other(name: str, **changes: Any) -> Arm:
        return dataclasses.replace(kept, name=f"{name} {share}", **changes)

    def by(signal: signals.Signal) -> Gate:
        return Gate(rate=rate, signal=signal)

    grpo: dict[str, Any] = {"loss": CLIPPED, "divided": True}
    return [
        kept,
        other("DG-K exact", screen="exact"),
        other("DG-K tokens", unit="token"),
        other("DG-K tokens exact", unit="token", screen="exact"),
        other("DG-K cost", gate=BudgetGate(budget=rate), unit="token"),
        other("|delight|", gate=by(signals.abs_delight)),
        other("random", gate=by(signals.uniform)),
        other("PODS", gate=DrawnVarianceGate(rate=rate), denominator="kept", **grpo),
        other("entropy tokens", gate=by(entropy), unit="token", **grpo),
        other("surprisal", gate=by(signals.surprisal)),
        other("advantage", gate=by(signals.advantage)),
    ]


def unbiased(
    *, rates: tuple[float, ...] = (0.03, 0.1), noises: tuple[float, ...] = (1.5, 3.0)
) -> list[Arm]:
    """Return dense GRPO with its gradient estimated from some rows by `kondo.UnbiasedGate`.

    Loss, division by the standard deviation and full denominator are dense GRPO's, and so is the
    learning rate: the expected gradient is the same. Rows are drawn by the centred advantage, as
    gates see it everywhere; the division changes the noise, not the mean.

    Example:
        >>> from kondo_lab.training.language_arms import unbiased
        >>> [each.name for each in unbiased(rates=(0.1,), noises=(1.5,))]
        ['unbiased 10%', 'unbiased |delight| 10%', 'unbiased |advantage| 10%', 'noise 1.5']
    """
    gates = {
        f"unbiased{ending} {percent(rate)}": UnbiasedGate(rate=rate, signal=signal)
        for rate in rates
        for ending, signal in UNBIASED_SIGNALS.items()
    }
    gates |= {f"noise {noise:g}": UnbiasedGate(noise=noise) for noise in noises}
    return [
        text_arm(name=name, gate=gate, loss=CLIPPED, divided=True) for name, gate in gates.items()
    ]


LOSSES: dict[str, dict[str, Any]] = {
    "PG": {"loss": losses.pg, "divided": False},
    "GRPO": {"loss": CLIPPED, "divided": True},
}
"""Name of a dense arm -> its loss."""
JOIN = " by "
"""Between what is selected and its loss, in the name of an arm."""
SOFTNESS = 0.1
"""Temperature of the Bernoulli gate, in nats of delight."""
ETA = 1.0
"""Temperature of the weights within the kept rows: the papers'."""


def selectors(rate: float) -> dict[str, BaseGate]:
    """Return name -> gate of every way to select that meets both losses.

    Example:
        >>> from kondo_lab.training.language_arms import selectors
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
    """Return the name of an arm.

    Example:
        >>> from kondo_lab.training.language_arms import named
        >>> named("delight", "PG")
        'delight by PG'
    """
    return f"{selection}{JOIN}{loss}"


def crossed(rate: float) -> list[Arm]:
    """Return both dense arms, then every selection with every loss.

    Example:
        >>> from kondo_lab.training.language_arms import crossed
        >>> [each.name for each in crossed(0.1)][:4]
        ['PG', 'GRPO', 'delight by PG', 'delight by GRPO']
    """
    dense = [text_arm(name=loss, **options) for loss, options in LOSSES.items()]
    return dense + [
        text_arm(name=named(selection, loss), gate=gate, **options)
        for selection, gate in selectors(rate).items()
        for loss, options in LOSSES.items()
    ]


def variants(rate: float, *, mark: str, noise: float = 1.5) -> list[Arm]:
    """Return readings of the delight gate, each with its control, and unbiased gates.

    Args:
        rate: share of the rows, or tokens, that those with a rate keep.
        mark: the character that stands before an answer.
        noise: bound of the gate without a rate.

    Example:
        >>> from kondo_lab.training.language_arms import variants
        >>> [each.name for each in variants(0.1, mark=">")][:3]
        ['delight tokens by PG', 'random tokens by PG', 'price 0 by PG']
    """
    kept = text_arm(name="", gate=Gate(rate=rate))

    def other(selection: str, loss: str = "PG", **changes: Any) -> Arm:
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
