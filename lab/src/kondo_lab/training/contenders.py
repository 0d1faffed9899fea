"""Contenders: ways to spend a learner step on sampled answers, each a gate and a loss.

What each would train on is in `decisions`. All contenders sum over tokens and divide by a number of
tokens, so that they differ in what they choose and in their loss, and in nothing else.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

from torch import Tensor

from kondo import BaseGate, Gate, UnbiasedGate, adapters, delight, losses, signals
from kondo.lm import BudgetGate
from kondo_lab.tasks.text.alphabet import encode
from kondo_lab.training.gates import DrawnVarianceGate, Everything, unchecked
from kondo_lab.training.losses import Loss, words


def entropy(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Stand for the entropy of the distribution that each token was drawn from.

    A signal that nobody can compute from log-probs: whoever decides puts the sampler's in.
    """
    raise ValueError("entropy is known to the sampler alone; let `decide` look at a batch.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialDelight:
    """Stand for the delight of some tokens of an answer, one value per answer.

        U * sum over the counted tokens of -log pi, or U * their mean

    It needs the answer's text: whoever decides has it.

    Args:
        part: "answer" counts what follows the last mark, END included; "working" what comes before
            that, the mark included. An answer without a mark is all working.
        mark: the character that the task puts before its answer, `AnswerTask.mark`.
        mean: divide by the number of counted tokens.

    Example:
        >>> import torch
        >>> from kondo_lab.training.contenders import PartialDelight
        >>> from kondo_lab.tasks.text.alphabet import encode
        >>> text = torch.tensor(encode(">ab>abc."))
        >>> PartialDelight(part="answer", mark=">").counts(text, text > 0).long()
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    part: Literal["all", "answer", "working"] = "all"
    mark: str = ""
    mean: bool = False

    def __post_init__(self) -> None:
        if self.part not in ("all", "answer", "working"):
            raise ValueError(f"part must be 'all', 'answer' or 'working', got {self.part!r}.")
        if self.part != "all" and len(self.mark) != 1:
            raise ValueError(
                f"mark must be one character for part {self.part!r}, got {self.mark!r}; take the "
                f"task's."
            )

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """Refuse: log-probs do not say which tokens are the answer."""
        raise ValueError("PartialDelight needs the text of answers; let `decide` look at a batch.")

    def counts(self, completions: Tensor, mask: Tensor) -> Tensor:
        """Return which tokens count, bool [..., T], of completions and their mask."""
        if self.part == "all":
            return mask
        marks = mask & (completions == encode(self.mark)[0])
        marks_ahead = marks.flip(-1).cumsum(-1).flip(-1)  # its own included
        answer = mask & (marks_ahead == 0) & marks.any(dim=-1, keepdim=True)
        return answer if self.part == "answer" else mask & ~answer

    def values(self, log_probs: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
        """Return [P, N] of log-probs and counted tokens [P, N, T] and advantages [P, N]."""
        spread = advantages.unsqueeze(2).expand_as(log_probs)
        total = unchecked(delight)(log_probs.detach(), spread, mask=counted).sum(dim=2)
        return total / counted.sum(dim=2).clamp(min=1) if self.mean else total


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One way to update a language model on N answers: a gate and a loss. The default is dense PG.

    | gate                        | trains on                                                   |
    |-----------------------------|-------------------------------------------------------------|
    | None                        | everything, weight 1                                        |
    | `Everything(eta)`           | everything, weight sigmoid(delight / eta): DG               |
    | `kondo.Gate(rate=...)`      | the units of highest delight, or of another signal; rate 1  |
    |                             | by |U| is the zero-advantage filter                         |
    | `DrawnVarianceGate(...)`    | the rows whose rewards vary most: PODS                      |
    | `kondo.UnbiasedGate(...)`   | rows drawn by their value, weight 1 / probability           |
    | `BudgetGate(...)`           | what buys most delight for a share of all tokens            |

    Example:
        >>> import kondo
        >>> from kondo_lab.training.contenders import Contender
        >>> Contender(name="DG-K 3%", gate=kondo.Gate(rate=0.03)).rate
        0.03
    """

    name: str
    """As in the figures' legends."""
    gate: BaseGate | None = None
    loss: Loss = losses.pg
    """Of the tokens: `kondo.losses.pg`, or `kondo.losses.ppo` with options."""
    divided: bool = False
    """Divide U of the loss by the group's standard deviation, as GRPO does. Delight is that of the
    undivided U."""
    unit: Literal["sequence", "token"] = "sequence"
    """What is gated. A sequence's delight and surprisal are the sums of its tokens'; its advantage
    is its own."""
    denominator: Literal["full", "kept"] = "full"
    """D: the tokens of the whole batch, as for dense, or the kept ones."""
    screen: Literal["free", "exact"] = "free"
    """Whose log-probs are decided by: the sampler's, or those of a forward without a graph."""

    def __post_init__(self) -> None:
        if self.unit == "token":
            if self.gate is not None and adapters.adapter_of(self.gate).draws:
                raise ValueError(
                    f"unit must be 'sequence' for {self.gate!r}: its draws are one per answer; got "
                    f"'token'."
                )
            if self.gate is not None and isinstance(self.gate.signal, PartialDelight):
                raise ValueError(
                    "unit must be 'sequence' for PartialDelight, a value per answer, got 'token'."
                )
        elif self.gate is not None and self.gate.signal is entropy:
            raise ValueError(
                "unit must be 'token' for the signal entropy, which is a token's, got 'sequence'."
            )

    @property
    def rate(self) -> float:
        """Share of the units kept; of a budget, tokens differentiated / all, prompts in both.

        NaN where it is not fixed beforehand: a bound of the noise keeps as many as it takes.
        """
        if getattr(self.gate, "noise", None) is not None:
            return math.nan
        share = getattr(self.gate, "rate", None) or getattr(self.gate, "budget", None)
        return 1.0 if share is None else float(share)

    @property
    def kind(self) -> str:
        """The gate's kind in a word."""
        if isinstance(self.gate, Gate):
            if self.rate < 1:
                return "top"
            return "price" if self.gate.price is not None else "filter"
        kinds = {
            Everything: "soft",
            DrawnVarianceGate: "variance",
            BudgetGate: "budget",
            UnbiasedGate: "unbiased",
        }
        return next((word for kind, word in kinds.items() if isinstance(self.gate, kind)), "dense")

    @property
    def by_delight(self) -> bool:
        """Whether it keeps a share by delight: DG-K."""
        return self.kind == "top" and self.gate is not None and self.gate.signal is delight

    def _key(self) -> tuple[object, ...]:
        options = (self.divided, self.unit, self.denominator, self.screen)
        return (self.name, repr(self.gate), words(self.loss), *options)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same name and options."""
        return self._key() == other._key() if isinstance(other, Contender) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Contender{self._key()!r}"


CLIPPED = partial(losses.ppo, clip=0.2)
"""GRPO's loss."""
FILTER = Gate(rate=1.0, signal=signals.abs_advantage)
"""Keeps answers to prompts whose rewards differ: U is not 0."""
UNBIASED_SIGNALS: dict[str, signals.Signal] = {
    "": signals.gradient_norm,
    " |delight|": signals.abs_delight,
    " |advantage|": signals.advantage,
}
"""Ending of a contender's name -> what rows are drawn in proportion to; the first is the gate's
default."""


def contenders(
    *,
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3),
    etas: tuple[float, ...] = (0.1, 1.0, 10.0),
) -> list[Contender]:
    """Return the study's contenders, each once, dense ones first.

    Where a method has a loss of its own in the literature it has it here: PODS, top-entropy tokens
    and the zero-advantage filter are GRPO's; what is compared with DG-K at an equal rate has
    DG-K's, plain PG. PODS averages over what it keeps, as published.

    Example:
        >>> from kondo_lab.training.contenders import contenders
        >>> [each.name for each in contenders(rates=(0.03,), etas=(1.0,))][:5]
        ['PG', 'GRPO', 'DG, eta 1', 'zero-advantage filter', 'DG-K 3%']
    """
    found = [
        Contender(name="PG"),
        Contender(name="GRPO", loss=CLIPPED, divided=True),
        *(Contender(name=f"DG, eta {eta:g}", gate=Everything(eta), unit="token") for eta in etas),
        Contender(name="zero-advantage filter", gate=FILTER, loss=CLIPPED, divided=True),
    ]
    for rate in rates:
        found += at_rate(rate)
    return found


def percent(rate: float) -> str:
    """Return a rate as the names of contenders have it: 0.03 is 3%."""
    return f"{100 * rate:g}%"


def at_rate(rate: float) -> list[Contender]:
    """Return the contenders that keep a share `rate`."""
    share = percent(rate)
    kept = Contender(name=f"DG-K {share}", gate=Gate(rate=rate))

    def other(name: str, **changes: Any) -> Contender:
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
) -> list[Contender]:
    """Return dense GRPO with its gradient estimated from some rows by `kondo.UnbiasedGate`.

    Loss, division by the standard deviation and full denominator are dense GRPO's, and so is the
    learning rate: the expected gradient is the same. Rows are drawn by the centred advantage, as
    gates see it everywhere; the division changes the noise, not the mean.

    Example:
        >>> from kondo_lab.training.contenders import unbiased
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
        Contender(name=name, gate=gate, loss=CLIPPED, divided=True) for name, gate in gates.items()
    ]
