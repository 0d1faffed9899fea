"""A check of a free screen: trusted while it chooses as the exact one does, and never in silence.

free screen, rows, advantages -> check now and then -> free or exact log-probs
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from kondo import rows as nests
from kondo.core.base_gate import BaseGate, Unit
from kondo.core.given_gates import as_gate
from kondo.engine.policy import LogProb
from kondo.engine.screen import screen_log_probs
from kondo.lm.screens import Agreement, agreement

_log = logging.getLogger(__name__)

# One swap among fewer kept units moves the overlap by over 0.15, whatever the swap costs.
_FEW_UNITS = 10

_NUMBERS = ("steps", "checks", "failures", "exact_steps", "trusted")


class CheckedScreen:
    """Use a free screen while it agrees with the exact one, and the exact one while it does not.

    Every `every` steps, the first included, the kept set of the free screen is compared with the
    exact one. Below `least_overlap` a warning is logged and the exact screen takes over, until a
    later check passes. Where fewer than ten units are kept, one that changes sides would decide:
    the exact delight bought, as a share of what the exact screen buys, is then held to that limit.
    Call it once a step, and give what it returns as `screen=`:

        checked = CheckedScreen(lm.log_prob, gate=gate)
        screen = checked(rows, advantages, rollout_log_probs)
        kondo.backward(lm, rows, advantages, gate=gate, screen=screen)

    Where ranks each hold one of their own, each checks its own rows with its own copy of the
    gate, and each decides for itself: some may screen exactly while others do not. That is sound
    where a forward is a rank's own affair (DDP, whose screen has no gradient to share). Where it is
    a collective (sharded weights), ranks that disagree would wait for each other forever: check on
    one rank, and send what it decided to the others.

    Args:
        exact: rows -> [N, S], the policy's own log_prob.
        gate: the gate of the step; copied for each check. A `BudgetGate` that is not bound yet is
            bound to the rows checked; one that is keeps its costs and weights.
        unit: what is gated.
        every: steps between checks, >= 1.
        least_overlap: |A & B| / |A | B| that a check must reach, in [0, 1]; few units: see above.
        sample: rows a check looks at, drawn anew; all if None. A rate of 3% of few rows says
            little: let the sample hold some dozens of kept units.
        seed: of the draw of that sample.
    """

    def __init__(
        self,
        exact: LogProb,
        *,
        gate: Any,
        unit: Unit = "sequence",
        every: int = 50,
        least_overlap: float = 0.8,
        sample: int | None = None,
        seed: int = 0,
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}.")
        if not 0.0 <= least_overlap <= 1.0:
            raise ValueError(f"least_overlap must lie in [0, 1], got {least_overlap}.")
        if sample is not None and sample < 1:
            raise ValueError(f"sample must be at least 1 row, got {sample}; None checks all rows.")
        self._exact, self._gate, self._unit = exact, as_gate(gate), unit
        self.every, self.least_overlap, self.sample = every, least_overlap, sample
        self._draws = torch.Generator().manual_seed(seed)
        self.trusted = True
        """Whether the free screen is in use."""
        self.steps = self.checks = self.failures = self.exact_steps = 0
        self.latest: Agreement | None = None
        """Of the latest check."""

    def __call__(
        self,
        rows: Any,
        advantages: Tensor,
        free: Tensor | LogProb,
        *,
        mask: Tensor | None = None,
        gate: Any | None = None,
    ) -> Tensor:
        """Return the log-probs to screen this step with, [N, S].

        A draft is not run in steps that need none: not trusted, and no check due.

        Args:
            rows: the batch, a nest of tensors with N rows.
            advantages: [N] or [N, S] float.
            free: log-probs that already exist, or a cheap draft.
            mask: [N, S] bool; by default the rows' completion_mask.
            gate: this step's, e.g. a `BudgetGate` that is bound to these rows; by default the
                one of this object.
        """
        if mask is None:
            mask = getattr(rows, "completion_mask", None)
        due = self.steps % self.every == 0
        cheap = known = None
        if due or self.trusted:
            cheap = screen_log_probs(self._exact, rows, screen=free)
        if due:
            assert cheap is not None
            gate = self._gate if gate is None else as_gate(gate)
            known = self._check(rows, cheap, advantages, mask, gate)
        self.steps += 1
        if self.trusted:
            assert cheap is not None  # trusted before, or by this check
            return cheap
        self.exact_steps += 1
        return screen_log_probs(self._exact, rows) if known is None else known

    def _check(
        self, rows: Any, cheap: Tensor, advantages: Tensor, mask: Tensor | None, gate: BaseGate
    ) -> Tensor | None:
        """Compare on a sample of the rows; return the exact log-probs if it was all of them."""
        size, index = cheap.shape[0], None
        parts = (rows, cheap, advantages, mask)
        if self.sample is not None and self.sample < size:
            index = torch.randperm(size, generator=self._draws)[: self.sample].sort().values
            parts = nests.take(parts, index)
        rows, cheap, advantages, mask = parts
        exact = screen_log_probs(self._exact, rows)
        facts = gate.row_facts(rows)
        if facts is not None:
            gate = gate.bind(facts)
        elif index is not None:
            gate = gate.take(index)
        self._judge(agreement(cheap, exact, advantages, gate=gate, mask=mask, unit=self._unit))
        return exact if index is None else None

    def _judge(self, found: Agreement) -> None:
        self.checks += 1
        self.latest = found
        few = found.kept_exact < _FEW_UNITS and not math.isnan(found.delight_share)
        trusted = (found.delight_share if few else found.overlap) >= self.least_overlap
        facts = (self.steps, found.overlap, self.least_overlap, found.recall, found.delight_share)
        numbers = "step %d: overlap %.3f, limit %.3f, recall %.3f, delight bought %.3f"
        if not trusted:
            self.failures += 1
            _log.warning(
                f"the free screen disagrees with the exact one, which screens the next "
                f"{self.every} steps; {numbers}",
                *facts,
            )
        elif not self.trusted:
            _log.warning(f"the free screen agrees again and is back in use; {numbers}", *facts)
        self.trusted = trusted

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the present verdict and the sample's random state."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "latest": None if self.latest is None else tuple(self.latest),
            "draws": self._draws.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(
                f"state must have the keys {sorted(expected)}, got {sorted(state)}; give what "
                f"CheckedScreen.state_dict() returned."
            )
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self.latest = None if state["latest"] is None else Agreement(*state["latest"])
        self._draws.set_state(state["draws"].cpu())
