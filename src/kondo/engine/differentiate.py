"""Stage 4, differentiate: forward with a graph and backward on the compact rows only."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, expand_rows
from kondo.engine.compact import MicroBatch
from kondo.engine.finite import FiniteCheck, Gated
from kondo.engine.loss_arguments import SEQUENCE_INDEX, sequence_index, takes_sequences
from kondo.engine.report import StageClock

Loss = Callable[..., Tensor]
BackwardFn = Callable[[Tensor], Any]


class Differentiated(NamedTuple):
    """What went through the forward with a graph, and its backward."""

    loss: Tensor
    """0-d, detached: the sum over micro-batches."""
    elements: int
    """Elements of the log-probs of micro-batches without a `keep`: a dense step's."""


def differentiate(
    log_prob: Callable[[Any], Tensor],
    micro_batches: Iterable[MicroBatch],
    *,
    loss: Loss,
    denominator: float | Callable[[Tensor], float],
    backward_fn: BackwardFn,
    clock: StageClock,
    check: FiniteCheck | None,
) -> Differentiated:
    """Add the gradient of the gated loss to `.grad`.

    loss = sum over kept elements of weight * loss(log_prob, advantage) / denominator, summed over
    micro-batches, so accumulation equals one large batch.

    Args:
        log_prob: rows -> log-probs.
        micro_batches: by a compaction.
        loss: (log_probs, advantages, **loss_inputs) -> one value per element. One with a parameter
            `sequence_index` also gets that.
        denominator: a number, or what gives it for the log-probs of a micro-batch.
        backward_fn: how to differentiate a loss.
        clock: for the stages forward and backward.
        check: refuses what is not finite in kept units; the host waits for the device. None for a
            dense step.
    """
    total: Tensor | None = None
    elements = 0
    sequences = takes_sequences(loss)
    for micro in micro_batches:
        with clock.stage("forward"):
            log_probs = _graph_log_probs(log_prob, micro)
            divide = denominator(log_probs) if callable(denominator) else denominator
            parts = gate_losses(log_probs, micro, loss, sequences=sequences)
            gated = parts.losses.sum() / divide
            hidden = False
            if check is not None:  # after the loss is launched: the device has work to do
                hidden = check.look(parts, micro)
        leaks = check.refuse_leaks(parts) if check is not None and hidden else nullcontext()
        with clock.stage("backward"), leaks:
            backward_fn(gated)
        elements += log_probs.numel() if micro.keep is None and not micro.filler else 0
        total = gated.detach() if total is None else total + gated.detach()
    return Differentiated(torch.zeros(()) if total is None else total, elements)


def gate_losses(
    log_probs: Tensor, micro: MicroBatch, loss: Loss, *, sequences: bool = False
) -> Gated:
    """Return the weighted losses of the kept elements, 0 elsewhere.

    What is not kept cannot leak NaN out of the loss.

    Args:
        log_probs: of the micro-batch.
        micro: whose rows these are.
        loss: one value per element.
        sequences: whether the loss must be told which sequence each element belongs to.
    """
    raw = log_probs
    home = log_probs.device
    keep, weight = (None if part is None else part.to(home) for part in (micro.keep, micro.weight))
    if micro.filler:
        keep = torch.zeros_like(log_probs, dtype=torch.bool)
    advantages = expand_rows("advantages", micro.advantages.to(home), log_probs.shape)
    inputs = {name: value.to(home) for name, value in micro.loss_inputs.items()}
    if keep is not None:
        # where() lets no gradient out of what is not kept, whatever the loss makes of it.
        log_probs = torch.where(keep, log_probs, 0.0)
        # A loss that multiplies ratios over a row then finds ratios of 1 there.
        skipped = ~keep
        inputs = {
            name: value.masked_fill(skipped, 0) if value.shape == keep.shape else value
            for name, value in inputs.items()
        }
    if sequences:
        inputs[SEQUENCE_INDEX] = sequence_index(log_probs, micro, keep)
    losses = loss(log_probs, advantages, **inputs)
    if losses.shape != log_probs.shape:
        raise ValueError(
            f"loss must return one value per unit, {list(log_probs.shape)}, got "
            f"{list(losses.shape)}; leave masking and averaging to kondo.backward."
        )
    losses = at_least_float32(losses)
    losses = losses if weight is None else losses * weight
    losses = losses if keep is None else torch.where(keep, losses, 0.0)
    return Gated(raw, log_probs, losses, keep)


def _graph_log_probs(log_prob: Callable[[Any], Tensor], micro: MicroBatch) -> Tensor:
    log_probs = check_float("log_prob(rows)", log_prob(micro.rows))
    if micro.keep is not None and log_probs.shape != micro.keep.shape:
        raise ValueError(
            f"log_prob(rows) must return shape {list(micro.keep.shape)} for these rows, as the "
            f"screen did, or as unit, mask and advantages say where there was none, got "
            f"{list(log_probs.shape)}; check unit=, and that no row depends on other rows."
        )
    if micro.keep is None and (log_probs.ndim not in (1, 2) or not _has_rows(log_probs, micro)):
        raise ValueError(
            f"log_prob(rows) must have shape [{micro.num_rows}] or [{micro.num_rows}, T], one row "
            f"per row of the batch, got {list(log_probs.shape)}; return the log-prob of each taken "
            f"action, not of all."
        )
    if not log_probs.requires_grad:
        raise ValueError(
            "log_prob(rows) must be differentiable, got a detached tensor; remove no_grad, "
            "inference_mode or detach from it, and check that some parameter requires grad."
        )
    return log_probs


def _has_rows(log_probs: Tensor, micro: MicroBatch) -> bool:
    # Kept tokens of a pack stand in one dimension, and advantages with them.
    return micro.filler or log_probs.shape[0] in (micro.num_rows, micro.advantages.shape[0])
