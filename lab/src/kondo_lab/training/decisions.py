"""What an arm trains on, and the loss of it: P members at once, through `kondo.select`.

    rewards -> advantages U -> value per unit -> gate -> keep, weight -> loss of the kept rows

    L = 1/D * sum over actions of  weight * loss(log pi(action), U)     D: all actions, or the kept

N rows, T actions or tokens of each. Nothing is read back from the device where it is a GPU, so that
a step can be captured in a CUDA graph.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import kondo
from kondo import BaseGate, Gate, UnbiasedGate, adapters, signals
from kondo.lm import BudgetGate
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import kept_first
from kondo_lab.training.losses import inputs_of
from kondo_lab.training.programs import Program, Rolled, take_rows
from kondo_lab.training.text_signals import PartialDelight, entropy

Screen = Callable[[Rolled, Tensor], Rolled]
"""(experience, step) -> what another policy says of it, to decide by instead of the reported:
log_probs [p, N, T] of what was done, and of bandits the distribution [p, N, K]."""


class Decision(NamedTuple):
    """What was decided for p members."""

    advantages: Tensor
    """[p, N, T] or [p, N, 1], U of the loss."""
    weight: Tensor | None
    """[p, N, T] or [p, N, 1], factor of the loss; None where all of it is 1."""
    keep: Tensor | None
    """bool like the weight: kept; None where all is."""
    rows: Tensor | None
    """[p, N] rows, those with something kept first; None where all rows are trained."""
    kept: Tensor
    """[p] int64, rows a backward pass is paid for."""


def decide(
    program: Program,
    arm: Arm,
    gate: BaseGate | None,
    rolled: Rolled,
    draws: Draws,
    step: Tensor | int,
    *,
    screen: Screen | None = None,
) -> Decision:
    """Return the decision of the members that share `arm`, whose experience `rolled` is.

    Nothing is differentiated. A member whose log-probs are NaN keeps nothing: it has diverged, and
    the others go on.

    Args:
        program: of the members.
        arm: the rule.
        gate: the members' own copy of the arm's, with what it remembers.
        rolled: experience.
        draws: random sources of these members.
        step: of the draws.
        screen: another policy to decide by; None decides by the log-probs of `rolled`.
    """
    centred = program.advantages(arm, rolled)
    members, num_rows, _ = rolled["log_probs"].shape
    if gate is None:
        everything = torch.full(
            (members,), num_rows, dtype=torch.int64, device=rolled["log_probs"].device
        )
        trained = program.trained_advantages(arm, rolled, centred, None)
        return Decision(trained, None, None, None, everything)
    seen = rolled
    if arm.logit_noise:
        assert isinstance(step, Tensor)
        seen = rolled | program.with_noise(rolled, arm.logit_noise, draws, step)
    if screen is not None:
        assert isinstance(step, Tensor)
        seen = rolled | screen(rolled, step)
    estimated = centred
    if arm.screened == "both" and (arm.logit_noise or arm.draft):
        # For the gate alone: kept rows are trained with the policy's own advantages.
        estimated = program.advantages(arm, seen)
    choice = select(program, arm, gate, seen, estimated, draws, step)
    keep, weight = choice.keep, choice.weight
    if arm.unit == "sequence":
        keep, weight = keep.unsqueeze(2), weight.unsqueeze(2)
    if arm.trains_all_rows:
        everything = torch.full_like(keep[:, 0, 0], num_rows, dtype=torch.int64)
        trained = program.trained_advantages(arm, rolled, centred, None)
        return Decision(trained, weight, keep, None, everything)
    some = choice.keep if arm.unit == "sequence" else keep.any(dim=2)
    trained = program.trained_advantages(arm, rolled, centred, some)
    return Decision(trained, weight, keep, kept_first(some), some.sum(dim=1))


class Chosen(NamedTuple):
    """A gate's choice: [p, N] for rows, [p, N, T] for tokens."""

    keep: Tensor
    weight: Tensor


def select(
    program: Program,
    arm: Arm,
    gate: BaseGate,
    seen: Rolled,
    centred: Tensor,
    draws: Draws,
    step: Tensor | int,
) -> Chosen:
    """Return what a gate keeps of experience with these advantages, by `kondo.select`."""
    log_probs = seen["log_probs"].detach()
    if not program.judges:
        # Noisy reports may be those of more than certainty, which is refused where it can be read.
        log_probs = log_probs.clamp(max=0.0)
    counts = seen.get("mask")
    if not log_probs.is_cuda:  # there a NaN would be refused, and end all members
        known = ~log_probs.isnan()
        counts = known if counts is None else counts & known
    if (own := known_values(program, arm, gate, seen, centred, draws, step)) is not None:
        gate = copy.copy(gate)  # its state, if it has one, is shared
        gate.signal = own
    adapter = adapters.adapter_of(gate)
    if (facts := adapter.row_facts(seen)) is not None:
        gate = adapter.bind(facts)
    before = 0
    if arm.unit == "token":
        # Ties depend on a token's place in the batch, which in the product has prompts.
        before = program.prompt_length
        log_probs = pad(log_probs, (before, 0)) if before else log_probs
        counts = pad(counts, (before, 0)) if before and counts is not None else counts
    if isinstance(gate, BudgetGate):
        gate = gate.for_rows(_with_prompts(program, seen["mask"]))
    uniform = draws_of(gate, draws, step, program.num_rows) if adapter.draws else None
    if centred.shape[2] == 1 != log_probs.shape[2]:
        centred = centred.squeeze(2)
    found = kondo.select(
        log_probs, centred, gate=gate, mask=counts, unit=arm.unit, generator=uniform
    )
    if arm.unit == "token":
        return Chosen(found.keep[..., before:], found.weight[..., before:])
    return Chosen(found.keep, found.weight)


class _Masks(NamedTuple):
    attention_mask: Tensor
    completion_mask: Tensor


def _with_prompts(program: Program, mask: Tensor) -> _Masks:
    """Return the masks of rows, [P, N, S], that have their prompts before them."""
    before = (program.prompt_length, 0)
    return _Masks(pad(mask, before, value=True), pad(mask, before))


def draws_of(gate: BaseGate, draws: Draws, step: Tensor | int, num_rows: int) -> Tensor:
    """Return what a gate that draws among rows draws with, [P, N]: one stream per kind of gate."""
    streams = {UnbiasedGate: "unbiased", Gate: "gate"}
    found = (stream for kind, stream in streams.items() if isinstance(gate, kind))
    return draws.uniform(next(found, "variance"), step, num_rows)


def known_values(
    program: Program,
    arm: Arm,
    gate: BaseGate,
    seen: Rolled,
    centred: Tensor,
    draws: Draws,
    step: Tensor | int,
) -> signals.Signal | None:
    """Return a signal that stands for what log-probs alone do not say; None where they suffice.

    Random values, entropies and parts of an answer are known to the experience; noise is drawn.
    """
    signal, by_row = gate.signal, arm.unit == "sequence"
    values: Tensor | None = None
    if signal is entropy:
        values = torch.where(seen["mask"], seen["entropies"], 0.0)
    elif signal is signals.uniform:
        values = draws.uniform("priority", step, *seen["log_probs"].shape[1 : 2 if by_row else 3])
    elif isinstance(signal, PartialDelight):
        counted = signal.counts(program.actions(seen), seen["mask"])
        values = signal.values(seen["log_probs"], centred.squeeze(2), counted)

    def given(log_probs: Tensor, advantages: Tensor, *, mask: Tensor) -> Tensor:
        assert values is not None
        return values if by_row else pad(values, (program.prompt_length, 0)).where(mask, 0.0)

    def noisy(log_probs: Tensor, advantages: Tensor, *, mask: Tensor) -> Tensor:
        exact = given if values is not None else _unit_signal(signal, by_row)
        found = exact(log_probs, advantages, mask=mask)
        found = found.sum(dim=2) if by_row and found.dim() == 3 else found
        flat = found.flatten(1)  # in standard deviations of the member's own values
        drawn = draws.normal("delight noise", step, flat.shape[1])
        noise = arm.delight_noise * flat.std(dim=1, keepdim=True) * drawn
        return (flat + noise).view(found.shape)

    if arm.delight_noise:
        return noisy
    return None if values is None else given


def _unit_signal(signal: signals.Signal, by_row: bool) -> signals.Signal:
    """Return a signal that reads nothing from the device, by row where it has a rule for rows."""
    known = signals.known_of(signal)
    return (by_row and known.of_sequences) or known.unchecked or signal


def loss(
    program: Program,
    arm: Arm,
    log_probs: Tensor,
    rolled: Rolled,
    decision: Decision,
    rows: Tensor | None,
    *,
    missing: Tensor | None = None,
) -> Tensor:
    """Return each member's loss, [P], differentiable with respect to log_probs alone.

    A loss gets what it names among its parameters: old_log_probs or behaviour_log_probs, [n, T] of
    whoever acted; mask, bool [n, T], what is trained; members, P, whose rows stand one after the
    other; positive_share, [n, 1], of the whole batch; and whole_rows. A row is one answer or image;
    outside the mask both kinds of log-probs are 0, so ratios are 1.

    Args:
        program: of the members.
        arm: the rule.
        log_probs: [P, N, T], or [P, C, T] of some rows.
        rolled: experience, with the log-probs of the policy that acted.
        decision: by `decide`.
        rows: [P, C] int64, the rows that log_probs stand for; None for all. They must hold every
            row with something kept.
        missing: bool [P], for whom nobody reported log-probs: the new ones stand in.
    """
    if arm.of_labels:  # nothing was sampled, so nothing was decided
        return arm.loss(log_probs).sum(dim=(1, 2)) / program.num_rows
    members, whole = len(log_probs), rolled["log_probs"]
    old, mask = rolled.get("behaviour", whole), rolled.get("mask")
    advantages, weight = decision.advantages, decision.weight
    if rows is not None:
        advantages = take_rows(advantages, rows)
        weight = None if weight is None else take_rows(weight, rows)
        mask = None if mask is None else take_rows(mask, rows)
    if log_probs.shape[:2] != advantages.shape[:2]:
        raise ValueError(
            f"log_probs must have rows {list(advantages.shape[:2])}, got "
            f"{list(log_probs.shape[:2])}; give rows= if they are those of some rows."
        )
    if mask is not None:
        weight = mask.to(log_probs.dtype) if weight is None else weight * mask
    trained = None
    if weight is not None and mask is not None:
        # What lies outside the mask may be anything, and must not leak.
        trained = (weight != 0).expand_as(log_probs)
        log_probs = torch.where(trained, log_probs, 0.0)

    def old_log_probs() -> Tensor:
        own = old if rows is None else take_rows(old, rows)
        if missing is not None:
            own = torch.where(missing[:, None, None], log_probs.detach(), own)
        return (own if trained is None else torch.where(trained, own, 0.0)).flatten(0, 1)

    def what_is_trained() -> Tensor:
        some = torch.ones_like(log_probs, dtype=torch.bool) if trained is None else trained
        return some.flatten(0, 1)

    def positive_share() -> Tensor:
        share = (decision.advantages > 0).double().mean(dim=(1, 2)).to(log_probs.dtype)
        return share.repeat_interleave(log_probs.shape[1]).unsqueeze(1)

    inputs = inputs_of(
        arm.loss,
        {
            "old_log_probs": old_log_probs,
            "behaviour_log_probs": old_log_probs,
            "mask": what_is_trained,
            "members": lambda: members,
            "positive_share": positive_share,
            "whole_rows": lambda: program.whole_rows,
        },
    )
    good = advantages.expand_as(log_probs).flatten(0, 1)
    terms = arm.loss(log_probs.flatten(0, 1), good, **inputs).view_as(log_probs)
    total = (terms if weight is None else weight * terms).sum(dim=(1, 2))
    return total / _denominator(arm, rolled, decision, terms.shape[2])


def _denominator(arm: Arm, rolled: Rolled, decision: Decision, width: int) -> float | Tensor:
    """Return D of each member, [P], or one number for all: real actions, all or the kept ones."""
    mask, keep = rolled.get("mask"), decision.keep
    if arm.denominator == "full" or keep is None:
        if mask is None:
            return float(rolled["log_probs"].shape[1] * width)
        return mask.sum(dim=(1, 2)).clamp(min=1)
    kept = keep.expand(*keep.shape[:2], width) if mask is None else keep & mask
    return kept.sum(dim=(1, 2)).clamp(min=1)
