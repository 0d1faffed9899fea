"""How far the rows a screen keeps are those that the policy itself would keep."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kondo import Gate, delight, quantiles, sampling
from kondo_lab.training.gates import TIE_TOLERANCE, unchecked
from kondo_lab.training.member import Member
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Program


class ComparedPopulation(Population):
    """A population that compares, at every step, each member's kept rows with the exact ones.

    Args:
        program: task and network.
        members: each with the gate `top`: screens can be compared where all keep as many.
        device: where all of it lives.
    """

    def __init__(self, program: Program, members: Sequence[Member], *, device: torch.device):
        rows = program.num_rows
        fixed = [m.arm.kind == "top" and m.arm.fixed_rows(rows) is not None for m in members]
        others = {repr(m.arm.gate) for m, own in zip(members, fixed, strict=True) if not own}
        if others:
            raise ValueError(
                f"members must all keep a fixed count to be compared, got {sorted(others)}; give "
                f"kondo.Gate(rate=...)."
            )
        self._agreed = torch.zeros(len(members), dtype=torch.float64, device=device)
        self._compared = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(program, members, device=device)

    def roll(self, step: Tensor) -> None:
        """Draw the experience of `step`, decide, and compare."""
        super().roll(step)
        for group in self.groups:
            for rule, decision in zip(group.rules, group.decisions, strict=True):
                assert decision.weight is not None  # the gate is hard
                chi = unchecked(delight)(
                    self.rolled["log_probs"][rule.members], decision.advantages
                )
                kept = decision.weight.squeeze(2) > 0
                assert isinstance(rule.gate, Gate)
                assert rule.gate.rate is not None
                shared = overlap(kept, chi.sum(dim=2), rule.gate.rate)
                self._agreed[rule.members].add_(shared)
        self._compared.add_(1)

    def read_agreement(self) -> Tensor:
        """Return each member's mean overlap per step since the last call, [P]."""
        agreement = self._agreed / self._compared
        self._agreed.zero_()
        self._compared.zero_()
        return agreement

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, and what was compared since the last log."""
        return super().state_dict() | {"agreement": [self._agreed, self._compared]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same program and members."""
        super().load_state_dict(state)
        for own, saved in zip((self._agreed, self._compared), state["agreement"], strict=True):
            own.copy_(saved)


def overlap(kept: Tensor, delight: Tensor, rate: float) -> Tensor:
    """Return the share of the kept rows that the exact screen keeps, [p]; 1 if neither keeps any.

    Two rows with the same image and action have the same delight, and a lot decides between them:
    a kept row counts if its delight reaches that of the last row the exact screen keeps. Where
    one of both keeps fewer rows, the share is of the larger number.

    Args:
        kept: [p, N] bool, by any screen.
        delight: [p, N], of the policy itself.
        rate: of the gate.

    Example:
        >>> import torch
        >>> from kondo_lab.studies.speculative.draft_agreement import overlap
        >>> delight = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
        >>> overlap(torch.tensor([[True, False, True, False]]), delight, 0.5)
        tensor([0.5000], dtype=torch.float64)
    """
    exact, _ = quantiles.highest(delight, delight != 0, sampling.count_for(rate, delight.shape[1]))
    last = torch.where(exact, delight, torch.inf).amin(dim=1, keepdim=True)
    both = (kept & (delight >= last - TIE_TOLERANCE)).sum(dim=1).double()
    larger = torch.maximum(kept.sum(dim=1), exact.sum(dim=1))
    return torch.where(larger > 0, both / larger, 1.0)


def probe(population: Population) -> dict[str, Tensor]:
    """Return the agreement of a population that is compared; nothing of another."""
    if not isinstance(population, ComparedPopulation):
        return {}
    return {"kept agreement": population.read_agreement()}
