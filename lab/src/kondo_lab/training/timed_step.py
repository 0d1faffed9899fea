"""One update of one model, with clocks: by the product, and as somebody without a gate writes it.

    screen     log-probs to decide by: the sampler's (free), or a forward without a graph (exact)
    select     signal -> gate -> kept tokens, and packs of what they need
    train      forward and backward of the packs

Every arm goes through `kondo.backward`, and so has the same packing and head; a dense one has
no gate. The plain way pads all rows to one length: a second witness of what dense costs.
"""

import copy
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import kondo
from kondo import BaseGate, Choice, adapters, lm
from kondo.lm import BudgetGate
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import decisions
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import DrawnVarianceGate, WithDraws
from kondo_lab.training.losses import inputs_of
from kondo_lab.training.programs import Program, Rolled

STAGES = ("generate", "reward", "screen", "select", "train", "optimiser")
LEARNER, LOOP = "learner", "loop"
"""Everything after the reward, and everything: measured, not summed."""


class Learned(NamedTuple):
    """What a backward did, by counts of what it was called with."""

    rows: int
    """That entered a training forward."""
    tokens: int
    """That entered a training forward: prompts, prefixes and padding included."""
    kept: int
    """Tokens with a loss; 0 where nothing was worth it, and `.grad` is untouched."""
    loss: float
    """Whose gradient it is."""
    seconds: dict[str, float]
    """Of screen, select and train."""


def product_backward(
    arm: Arm,
    policy: lm.CausalLM,
    program: Program,
    rolled: Rolled,
    draws: Draws,
    step: int,
) -> Learned:
    """Add to `.grad` the gradient of the arm's loss, through `kondo.backward`.

    The choices are those of `decisions.decide`; the experience is that of one member.
    """
    tokens, log_probs, mask = (rolled[name][0] for name in ("tokens", "log_probs", "mask"))
    on_rows = partial(pad, pad=(program.prompt_length, 0))  # [N, La] -> [N, Lp + La]
    rows = lm.TokenRows(
        input_ids=tokens,
        attention_mask=on_rows(mask, value=True),
        completion_mask=on_rows(mask),
    )
    old, centred = on_rows(log_probs), program.advantages(arm, rolled)
    clock = Clock(tokens.device)
    with clock.stage("select"):  # some choose here, before the engine asks
        gate, advantages = _gate(arm, program, rows, rolled, draws, step)
    kept: Counter[str] = Counter()

    def loss(log_probs: Tensor, _: Tensor, *, own: Tensor, old: Tensor) -> Tensor:
        kept["tokens"] += log_probs.numel()  # a pack holds kept tokens alone
        inputs = inputs_of(arm.loss, {"old_log_probs": lambda: old})
        return arm.loss(log_probs, own, **inputs)

    report = kondo.backward(
        policy,
        rows,
        centred.flatten(),
        gate=gate,
        unit=arm.unit,
        screen=old if arm.screen == "free" else None,
        loss=loss,
        loss_inputs={"own": advantages, "old": old},
        options=kondo.Options(denominator=arm.denominator),
    )
    spent = report.seconds
    return Learned(
        rows=report.rows_trained,
        tokens=report.tokens_trained,
        kept=kept["tokens"],
        loss=report.loss,
        seconds={
            "screen": spent["screen"],
            "select": clock.seconds["select"] + spent["select"] + spent["compact"],
            "train": spent["forward"] + spent["backward"],
        },
    )


def _gate(
    arm: Arm, program: Program, rows: lm.TokenRows, rolled: Rolled, draws: Draws, step: int
) -> tuple[BaseGate | Choice | None, Tensor]:
    """Return a copy of the arm's gate for these rows, and the advantages [N] of its loss."""
    gate, centred = copy.copy(arm.gate), program.advantages(arm, rolled)
    advantages = program.trained_advantages(arm, rolled, centred, None)
    if gate is None:
        return None, advantages.flatten()
    if isinstance(gate, DrawnVarianceGate):
        keep = decisions.select(program, arm, gate, rolled, centred, draws, step).keep
        advantages = program.trained_advantages(arm, rolled, centred, keep)
        return Choice.of(keep[0]), advantages.flatten()
    known = decisions.known_values(program, arm, gate, rolled, centred, draws, step)
    if known is not None:  # of one member
        of_members = known
        gate.signal = lambda log_probs, advantages, *, mask: of_members(
            log_probs, advantages, mask=mask
        )[0]
    if isinstance(gate, BudgetGate):
        gate = gate.for_rows(rows)
    elif adapters.adapter_of(gate).draws:
        drawn = decisions.draws_of(gate, draws, step, program.num_rows)
        gate = WithDraws(gate, drawn[0])
    return gate, advantages.flatten()


def plain_backward(
    arm: Arm,
    module: torch.nn.Module,
    program: Program,
    rolled: Rolled,
    draws: Draws,
    step: int,
    *,
    max_tokens: int,
    filtered: bool = False,
) -> Learned:
    """Add the same gradient to `.grad` by a loop without kondo: all rows, weighted afterwards.

    Args:
        arm: the rule; of a gate, the choice is only a mask and saves nothing.
        module: token ids [B, T] -> logits [B, T, V].
        program: task and shapes.
        rolled: experience of one member.
        draws: its random sources.
        step: of the draws.
        max_tokens: most tokens of a forward.
        filtered: leave out rows of weight or advantage 0, whose gradient is 0.
    """
    tokens, first = rolled["tokens"][0], program.prompt_length
    clock, total = Clock(tokens.device), torch.zeros((), device=tokens.device)
    num_rows, num_columns = tokens.shape
    with clock.stage("select"):
        decision = decisions.decide(program, arm, arm.gate, rolled, draws, step)
        rows = torch.arange(num_rows, device=tokens.device)
        if filtered:
            able = decision.advantages[0, :, 0] != 0
            if decision.keep is not None:
                able = able & decision.keep[0].any(dim=1)
            rows = rows[able]
    with clock.stage("train"):
        size = max(1, max_tokens // num_columns)
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            logits = module(tokens[some, :-1])[:, first - 1 :]
            of_tokens = tokens[some, first:].unsqueeze(2)
            new = logits.log_softmax(dim=2).gather(2, of_tokens).squeeze(2).unsqueeze(0)
            part = decisions.loss(program, arm, new, rolled, decision, some.unsqueeze(0)).sum()
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
    kept = rolled["mask"] if decision.keep is None else decision.keep & rolled["mask"]
    return Learned(
        rows=len(rows),
        tokens=len(rows) * num_columns,
        kept=int(kept.sum()) if len(rows) else 0,
        loss=float(total),
        seconds={stage: clock.seconds[stage] for stage in ("screen", "select", "train")},
    )


class Clock:
    """Seconds per stage; it waits for the device at the end of each."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds = dict.fromkeys((*STAGES, LEARNER, LOOP), 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
