"""One update of one model, with clocks: by the product, and as somebody without a gate writes it.

    screen     log-probs to decide by: the sampler's (free), or a forward without a graph (exact)
    select     signal -> gate -> kept tokens, and packs of what they need
    train      forward and backward of the packs

Every contender goes through `kondo.backward`, and so has the same packing and head; a dense one has
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
from kondo import BaseGate, Choice, adapters, advantage, lm, signals
from kondo.lm import BudgetGate
from kondo_lab.training import contenders, decisions
from kondo_lab.training.contenders import Contender
from kondo_lab.training.decisions import Batch
from kondo_lab.training.gates import DrawnVarianceGate, WithDraws
from kondo_lab.training.losses import inputs_of

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


def product_backward(contender: Contender, policy: lm.CausalLM, batch: Batch) -> Learned:
    """Add to `.grad` the gradient of the contender's loss, through `kondo.backward`.

    The choices are those of `decisions.decide`; the batch is that of one member.
    """
    tokens, log_probs, _, mask = (part[0] for part in batch.sampled)
    prompt_length = tokens.shape[1] - mask.shape[1]
    on_rows = partial(pad, pad=(prompt_length, 0))  # [N, La] -> [N, Lp + La]
    rows = lm.TokenRows(
        input_ids=tokens,
        attention_mask=on_rows(mask, value=True),
        completion_mask=on_rows(mask),
    )
    old = on_rows(log_probs)
    clock = Clock(tokens.device)
    with clock.stage("select"):  # some choose here, before the engine asks
        gate, advantages = _gate(contender, rows, batch)
        if isinstance(gate, BaseGate):
            gate.signal = _signal(contender, gate, batch)
    kept: Counter[str] = Counter()

    def loss(log_probs: Tensor, _: Tensor, *, own: Tensor, old: Tensor) -> Tensor:
        kept["tokens"] += log_probs.numel()  # a pack holds kept tokens alone
        inputs = inputs_of(contender.loss, {"old_log_probs": lambda: old})
        return contender.loss(log_probs, own, **inputs)

    report = kondo.backward(
        policy,
        rows,
        advantage.group_mean(batch.rewards[0], batch.group),
        gate=gate,
        unit=contender.unit,
        screen=old if contender.screen == "free" else None,
        loss=loss,
        loss_inputs={"own": advantages, "old": old},
        options=kondo.Options(denominator=contender.denominator),
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
    contender: Contender, rows: lm.TokenRows, batch: Batch
) -> tuple[BaseGate | Choice | None, Tensor]:
    """Return a copy of the contender's gate for these rows, and the advantages [N] of its loss."""
    gate, (_, rewards, _, _, group) = copy.copy(contender.gate), batch
    advantages = decisions.loss_advantages(contender, rewards, group)
    if isinstance(gate, BudgetGate):
        gate = gate.for_rows(rows)
    if isinstance(gate, DrawnVarianceGate):
        keep = decisions.choose_rows(gate, advantage.group_mean(rewards, group), batch).keep
        if gate.group is not None:
            advantages = decisions.loss_advantages(contender, rewards, group, among=keep)
        return Choice.of(keep[0]), advantages[0]
    if gate is not None and adapters.adapter_of(gate).draws:
        draws = decisions.draws_of(gate, batch.draws, batch.step, rewards.shape[1])
        gate = WithDraws(gate, draws[0])
    return gate, advantages[0]


def _signal(contender: Contender, gate: BaseGate, batch: Batch) -> signals.Signal:
    """Return what the gate looks at, with the sampler's entropies and texts and its own draws."""
    by_row, prompt_length = contender.unit == "sequence", batch.sampled.prompts.shape[-1]
    given = gate.signal in (contenders.entropy, signals.uniform)
    given |= isinstance(gate.signal, contenders.PartialDelight)
    if not given and (signals.needs_log_probs(gate.signal) or not by_row):
        return gate.signal
    (values,) = decisions.values_of(contender, gate, batch, batch.sampled.log_probs)

    def known(log_probs: Tensor, advantages: Tensor, *, mask: Tensor) -> Tensor:
        return values if by_row else pad(values, (prompt_length, 0)).where(mask, 0.0)

    return known


def plain_backward(
    contender: Contender,
    module: torch.nn.Module,
    batch: Batch,
    *,
    max_tokens: int,
    filtered: bool = False,
) -> Learned:
    """Add the same gradient to `.grad` by a loop without kondo: all rows, weighted afterwards.

    Args:
        contender: the rule; of a gate, the choice is only a mask and saves nothing.
        module: token ids [B, T] -> logits [B, T, V].
        batch: of one member.
        max_tokens: most tokens of a forward.
        filtered: leave out rows of weight or advantage 0, whose gradient is 0.
    """
    tokens, prompt_length = batch.sampled.tokens[0], batch.sampled.prompts.shape[-1]
    clock, total = Clock(tokens.device), batch.rewards.new_zeros(())
    num_rows, num_columns = tokens.shape
    with clock.stage("select"):
        chosen = decisions.decide(contender, batch)
        rows = torch.arange(num_rows, device=tokens.device)
        if filtered:
            rows = rows[chosen.weight[0].any(dim=1) & (chosen.advantages[0] != 0)]
    with clock.stage("train"):
        size = max(1, max_tokens // num_columns)
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            logits = module(tokens[some, :-1])[:, prompt_length - 1 :]
            of_tokens = tokens[some, prompt_length:].unsqueeze(2)
            new = logits.log_softmax(dim=2).gather(2, of_tokens).squeeze(2).unsqueeze(0)
            part = decisions.loss(
                contender, new, batch.sampled, chosen, rows=some.unsqueeze(0)
            ).sum()
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
    return Learned(
        rows=len(rows),
        tokens=len(rows) * num_columns,
        kept=int(chosen.tokens_kept) if len(rows) else 0,
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
