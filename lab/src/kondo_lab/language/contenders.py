"""Contenders: ways to spend a learner step on sampled answers, and what each would train on.

P members decide at once: N = G prompts x A answers rows, T completion tokens. Nothing is read back
from the device, so that a step can be captured in a CUDA graph.

    rewards -> advantages U -> value per unit -> gate -> weight per token -> loss

    L = 1/D * sum over tokens of  weight * loss(log pi(token), U),  D: tokens of the batch, or kept

All contenders sum over tokens and divide by a number of tokens, so that they differ in what they
choose and in their loss, and in nothing else. `loop` makes the same choices with the same gates
through the product.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kondo.core import losses, signals
from kondo.core.advantage import group_mean
from kondo.core.contract import BaseGate, Choice, Signal, attribute_of, needs_log_probs
from kondo.core.delight import delight
from kondo.core.gates import Gate
from kondo.core.rules import count_for
from kondo.core.unbiased import UnbiasedGate
from kondo.lm.budget import BudgetGate
from kondo_lab.draws import Draws
from kondo_lab.gates import DrawnVarianceGate, Everything, kept_first, unchecked
from kondo_lab.language.sampler import Sampled
from kondo_lab.population.losses import Loss, inputs_of, words
from kondo_lab.text.alphabet import encode

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards; TRL's."""


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
        >>> from kondo_lab.language.contenders import PartialDelight
        >>> from kondo_lab.text.alphabet import encode
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
        >>> from kondo_lab.language.contenders import Contender
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
            if self.gate is not None and self.gate.draws:
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


class Batch(NamedTuple):
    """What P members decide and train on: N rows, T completion tokens."""

    sampled: Sampled
    rewards: Tensor
    """[P, N] float, the answers to one prompt side by side."""
    draws: Draws
    """Of these members, for random choices and for ties between equal rewards."""
    step: int | Tensor
    """Of the draws."""
    group: int
    """A, answers per prompt."""


class Chosen(NamedTuple):
    """What a contender trains on. P members, N rows, T completion tokens."""

    advantages: Tensor
    """[P, N], U of the loss."""
    weight: Tensor
    """[P, N, T], factor of each token's loss; 0 where it is not trained."""
    rows: Tensor | None
    """[P, K] int64, the kept rows first, where their number is fixed by the rate: at most K are
    kept, and the others among them have weight 0. None where it is not, or all rows are trained."""
    tokens_kept: Tensor
    """[P] int64, tokens with a loss."""
    tokens_differentiated: Tensor
    """[P] int64, tokens that must enter a training forward: of each row with a kept token those up
    to its last one, its prompt included, padding not."""
    rows_kept: Tensor
    """[P] int64, rows with a kept token."""


def decide(contender: Contender, batch: Batch, log_probs: Tensor | None = None) -> Chosen:
    """Return what every member trains on, all of them by the same contender's rule.

    Nothing is differentiated, and no number is asked of the device. A kept row drags its prompt
    into the forward: prompts are counted in tokens_differentiated and in the costs of a budget.

    Args:
        contender: the rule.
        batch: of P members.
        log_probs: [P, N, T] float to decide by, of an exact forward; by default the sampler's.
    """
    sampled, rewards, _, _, group = batch
    log_probs = sampled.log_probs if log_probs is None else log_probs
    _check_inputs(log_probs, batch)
    gate, mask, prompt_length = contender.gate, sampled.mask, sampled.prompts.shape[-1]
    advantages = loss_advantages(contender, rewards, group)
    if gate is None:
        return _chosen(advantages, mask, mask.to(log_probs.dtype), None, prompt_length)
    values = values_of(contender, gate, batch, log_probs)
    if contender.unit == "sequence":
        choice = choose_rows(gate, values, batch)
        keep, weight = choice.keep.unsqueeze(2) & mask, choice.weight.unsqueeze(2) * mask
        if isinstance(gate, DrawnVarianceGate) and gate.group is not None:
            advantages = loss_advantages(contender, rewards, group, among=choice.keep)
    else:
        keep, weight = _choose_tokens(gate, values, mask, prompt_length)
    count = fixed_rows(contender, rewards.shape[1], group)
    rows = None if count is None else kept_first(keep.any(dim=2))[:, :count]
    return _chosen(advantages, keep, weight, rows, prompt_length)


def loss(
    contender: Contender,
    new_log_probs: Tensor,
    sampled: Sampled,
    chosen: Chosen,
    *,
    rows: Tensor | None = None,
    unknown: Tensor | None = None,
) -> Tensor:
    """Return each member's loss, [P], differentiable with respect to new_log_probs alone.

    A loss gets what it names among its parameters: old_log_probs or behaviour_log_probs, [n, T] of
    whoever sampled; mask, bool [n, T], what is trained; and members, P, whose rows stand one after
    the other. A row is one answer; outside the mask both kinds of log-probs are 0, so ratios are 1.

    Args:
        contender: the rule.
        new_log_probs: [P, N, T] float, or [P, C, T] of some rows.
        sampled: with the log-probs of the policy that sampled; PG does not look at them.
        chosen: by `decide`.
        rows: [P, C] int64, the rows that new_log_probs stand for, e.g. chosen.rows; None for all.
            They must hold every row with a kept token.
        unknown: bool [P], for whom sampled log-probs are not known: the new ones stand in.
    """
    weight, advantages, old = chosen.weight, chosen.advantages, sampled.log_probs
    if rows is not None:
        weight, advantages, old = (take_rows(part, rows) for part in (weight, advantages, old))
    if new_log_probs.shape != weight.shape:
        raise ValueError(
            f"new_log_probs must have shape {list(weight.shape)}, got {list(new_log_probs.shape)}; "
            f"give rows= if they are those of some rows."
        )
    # What lies outside may be anything, and must not leak.
    trained = weight != 0
    new = torch.where(trained, new_log_probs, 0.0).flatten(0, 1)
    if unknown is not None:
        old = torch.where(unknown[:, None, None], new_log_probs.detach(), old)
    inputs = inputs_of(
        contender.loss,
        dict.fromkeys(
            ("old_log_probs", "behaviour_log_probs"),
            lambda: torch.where(trained, old, 0.0).flatten(0, 1),
        )
        | {
            "mask": lambda: trained.flatten(0, 1),
            "members": lambda: len(weight),
        },
    )
    terms = contender.loss(new, advantages.flatten(), **inputs)
    full = contender.denominator == "full"
    counted = sampled.mask.sum(dim=(1, 2)) if full else chosen.tokens_kept
    return (weight * terms.view_as(weight)).sum(dim=(1, 2)) / counted.clamp(min=1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [P, C, ...] of the rows [P, C] in values [P, N, ...]."""
    index = rows.view(*rows.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*rows.shape, *values.shape[2:]))


def fixed_rows(contender: Contender, num_rows: int, group: int) -> int | None:
    """Return how many rows suffice for a training forward; None where only all of them do."""
    gate = contender.gate
    if isinstance(gate, DrawnVarianceGate) and gate.group is not None:
        return num_rows // group * count_for(gate.rate, group)
    if contender.kind not in ("top", "variance", "unbiased") or contender.unit == "token":
        return None
    if isinstance(gate, Gate) and gate.draws:  # each row by a draw of its own
        return None
    return None if math.isnan(contender.rate) else count_for(contender.rate, num_rows)


def loss_advantages(
    contender: Contender, rewards: Tensor, group: int, *, among: Tensor | None = None
) -> Tensor:
    """Return U of the contender's loss, [P, N]: centred, and for GRPO divided by the group's std.

    Args:
        contender: the rule.
        rewards: [P, N].
        group: A.
        among: [P, N] bool, take mean and std of these rows alone; U is 0 elsewhere.
    """
    if among is None:
        centred = group_mean(rewards, group)
        if not contender.divided:
            return centred
        centred = centred.reshape(len(rewards), -1, group)
        return (centred / (centred.std(dim=2, keepdim=True) + STD_EPSILON)).flatten(1)
    by_prompt, kept = (values.reshape(len(rewards), -1, group) for values in (rewards, among))
    number = kept.sum(dim=2, keepdim=True)
    mean = torch.where(kept, by_prompt, 0.0).sum(dim=2, keepdim=True) / number.clamp(min=1)
    centred = torch.where(kept, by_prompt - mean, 0.0)
    if contender.divided:
        variance = centred.square().sum(dim=2, keepdim=True) / (number - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return centred.flatten(1)


def choose_rows(gate: BaseGate, values: Tensor, batch: Batch) -> Choice:
    """Return the choice of a gate among whole rows, by what they are worth, [P, N]."""
    sampled, _, draws, step, _ = batch
    if isinstance(gate, BudgetGate):
        gate = gate.for_rows(_with_prompts(sampled.mask, sampled.prompts.shape[-1]))
    drawn = draws_of(gate, draws, step, values.shape[1]) if gate.draws else None
    return gate.choose(values, sampled.mask.any(dim=2), drawn)


def draws_of(gate: BaseGate, draws: Draws, step: int | Tensor, num_rows: int) -> Tensor:
    """Return what a gate that draws among rows draws with, [P, N]: one stream per kind of gate."""
    streams = {UnbiasedGate: "unbiased", Gate: "bernoulli"}
    found = (stream for kind, stream in streams.items() if isinstance(gate, kind))
    return draws.uniform(next(found, "variance"), step, num_rows)


def _choose_tokens(
    gate: BaseGate, values: Tensor, mask: Tensor, prompt_length: int
) -> tuple[Tensor, Tensor]:
    """Return keep and weight of tokens, [P, N, T] both, as of rows with their prompts.

    Ties depend on a token's place in the batch, which in the product has prompts.
    """
    whole, inside = (pad(part, (prompt_length, 0)) for part in (values, mask))
    if isinstance(gate, BudgetGate):
        choice = gate.for_rows(_with_prompts(mask, prompt_length)).choose(whole, inside)
    else:
        choice = gate.choose(whole.flatten(1), inside.flatten(1)).reshape(whole.shape)
    return choice.keep[..., prompt_length:], choice.weight[..., prompt_length:]


class _Masks(NamedTuple):
    attention_mask: Tensor
    completion_mask: Tensor


def _with_prompts(mask: Tensor, prompt_length: int) -> _Masks:
    """Return the masks of rows, [P, N, S], that have their prompts before them."""
    real = pad(mask, (prompt_length, 0), value=True)
    return _Masks(real, pad(mask, (prompt_length, 0)))


def values_of(contender: Contender, gate: BaseGate, batch: Batch, log_probs: Tensor) -> Tensor:
    """Return what units are worth: [P, N], or [P, N, T] for tokens."""
    signal, by_row, mask = gate.signal, contender.unit == "sequence", batch.sampled.mask
    if signal is entropy:
        return torch.where(mask, batch.sampled.entropies, 0.0)
    centred = group_mean(batch.rewards, batch.group)
    if isinstance(signal, PartialDelight):
        return signal.values(log_probs, centred, signal.counts(batch.sampled.completions, mask))
    if signal is signals.uniform:
        shape = (centred if by_row else mask).shape[1:]
        return batch.draws.uniform("priority", batch.step, *shape)
    if by_row and not needs_log_probs(signal):  # a sum over tokens would favour length
        return signal(centred, centred)
    of_rows = attribute_of(signal, "of_sequences") if by_row else None
    if of_rows is not None:
        rows = log_probs.detach().flatten(0, 1), centred.flatten()  # members side by side
        of_each: Tensor = of_rows(*rows, mask=mask.flatten(0, 1))
        return of_each.view_as(centred)
    spread = centred.unsqueeze(2).expand_as(log_probs)
    values = unchecked(signal)(log_probs.detach(), spread, mask=mask)
    return values.sum(dim=2) if by_row else values


def _chosen(
    advantages: Tensor, keep: Tensor, weight: Tensor, rows: Tensor | None, prompt_length: int
) -> Chosen:
    place = torch.arange(1, keep.shape[2] + 1, device=keep.device)
    last = torch.where(keep, place, 0).amax(dim=2)
    dragged = last + prompt_length * (last > 0)
    return Chosen(
        advantages=advantages,
        weight=weight,
        rows=rows,
        tokens_kept=keep.sum(dim=(1, 2)),
        tokens_differentiated=dragged.sum(dim=1),
        rows_kept=(last > 0).sum(dim=1),
    )


def _check_inputs(log_probs: Tensor, batch: Batch) -> None:
    mask, rewards, group = batch.sampled.mask, batch.rewards, batch.group
    if log_probs.dim() != 3 or mask.shape != log_probs.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"log_probs and mask must have one shape [P, N, T], mask bool, got "
            f"{list(log_probs.shape)} and {mask.dtype} {list(mask.shape)}."
        )
    if rewards.shape != log_probs.shape[:2]:
        raise ValueError(
            f"rewards must have shape {list(log_probs.shape[:2])}, one per answer, got "
            f"{list(rewards.shape)}."
        )
    if group < 2 or rewards.shape[1] % group:
        raise ValueError(
            f"group must be at least 2 and divide the {rewards.shape[1]} rows, got {group}; it is "
            f"the number of answers to a prompt."
        )


CLIPPED = partial(losses.ppo, clip=0.2)
"""GRPO's loss."""
FILTER = Gate(rate=1.0, signal=signals.abs_advantage)
"""Keeps answers to prompts whose rewards differ: U is not 0."""
UNBIASED_SIGNALS: dict[str, Signal] = {
    "": signals.gradient_norm,
    " |delight|": signals.abs_delight,
    " |advantage|": signals.unit_advantage,
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
        >>> from kondo_lab.language.contenders import contenders
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

    def by(signal: Signal) -> Gate:
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
        >>> from kondo_lab.language.contenders import unbiased
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
