"""Rules that are told which rows a bug has replaced, and what bugs take of an update.

No learner knows its bugs. Here they are known, to find out which of their rows do the harm.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from kondo import BaseGate, Choice, adapters
from kondo_lab.training.decisions import Decision
from kondo_lab.training.gates import Everything, QuantileGate, Randomness
from kondo_lab.training.population import Population

SUCCESS_SHARE = "push of bugs that succeed"
FAILURE_SHARE = "push of bugs that fail"
KEPT_SHARE = "trained rows that are bugs"


class TellsBugs(Everything):
    """PG or DG that weighs the rows of bugs by the sign of their advantage.

        w = successes   of a bug's row with U > 0
            failures    of a bug's row with U < 0
            sigmoid(delight / eta), or 1 without eta, of all others and where None is given

    Args:
        eta: as of `Everything`.
        successes: weight of the bugs' tokens that are paid above their prompt's mean.
        failures: weight of those that are paid below it.
    """

    def __init__(
        self,
        eta: float | None = None,
        *,
        successes: float | None = None,
        failures: float | None = None,
    ):
        super().__init__(eta)
        self.successes, self.failures = successes, failures

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Weigh N x T tokens, values [p, N T]; nothing is drawn."""
        choice = super().choose(values, mask, generator)
        bug: Tensor = vars(self)["bug"]
        bug = bug.repeat_interleave(values.shape[1] // bug.shape[1], dim=1)
        weight = choice.weight
        for own, of_sign in ((self.successes, values > 0), (self.failures, values < 0)):
            if own is not None:
                weight = torch.where(bug & of_sign, own, weight)
        return choice._replace(weight=weight)

    def __repr__(self) -> str:
        told = f"successes={self.successes!r}, failures={self.failures!r}"
        return f"TellsBugs({self.temperature!r}, {told})"


class AddsFailedBugs(QuantileGate):
    """The papers' gate that also keeps every bug's row with a negative advantage."""

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among N rows; nothing is drawn."""
        choice = super().choose(values, mask, generator)
        keep = choice.keep | (mask & vars(self)["bug"] & (values < 0))
        return Choice.of(keep, mask, choice.price, values.dtype)

    def __repr__(self) -> str:
        return f"AddsFailedBugs(rate={self.rate!r})"


@adapters.register(TellsBugs, AddsFailedBugs)
class _ToldOfBugs(adapters.DrawsNothing):
    def row_facts(self, batch: Any) -> Tensor:
        """Return which rows are bugs, [p, N]."""
        if "bug" not in batch:
            raise ValueError(
                "frictions must have bugs where a gate is to be told of them, got none; give "
                "bug > 0."
            )
        found: Tensor = batch["bug"]
        return found

    def bind(self, facts: Tensor) -> BaseGate:
        """Return the gate for a batch with these bugs."""
        bound: BaseGate = copy.copy(self.gate)
        vars(bound)["bug"] = facts
        return bound


@torch.no_grad()
def shares(population: Population) -> dict[str, Tensor]:
    """Return what bugs took of the last update; each [P].

        push of a token = abs(w U (1 - pi)), what it adds to the gradient of its own logit

    The first two are the shares of all push that come from bugs with U > 0 and with U < 0; the
    third is the share of bugs among the rows that push at all.
    """
    found: dict[str, list[Tensor]] = {SUCCESS_SHARE: [], FAILURE_SHARE: [], KEPT_SHARE: []}
    for group in population.groups:
        for rule, decision in zip(group.rules, group.decisions, strict=True):
            rolled = {name: population.rolled[name][rule.members] for name in ("log_probs", "bug")}
            for name, share in zip(found, _shares(decision, **rolled), strict=True):
                found[name].append(share)
    return {name: torch.cat(values) for name, values in found.items()}


def _shares(decision: Decision, log_probs: Tensor, bug: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three shares of the p members of a rule; log-probs [p, N, T], bug [p, N]."""
    weight = 1.0 if decision.weight is None else decision.weight
    push = weight * decision.advantages.double() * -torch.expm1(log_probs.double())
    of_bugs = torch.where(bug.unsqueeze(2), push, 0.0)
    all_of_it = push.abs().sum(dim=(1, 2)).clamp(min=1e-12)
    kept = (push != 0).any(dim=2)
    return (
        of_bugs.clamp(min=0).sum(dim=(1, 2)) / all_of_it,
        (-of_bugs).clamp(min=0).sum(dim=(1, 2)) / all_of_it,
        (kept & bug).sum(dim=1) / kept.sum(dim=1).clamp(min=1),
    )
