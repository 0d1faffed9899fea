"""Stage 4, differentiate: forward with a graph and backward on the compact rows only."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, expand_rows, first_unit
from kondo.engine.compact import MicroBatch
from kondo.engine.report import StageClock
from kondo.engine.screen import LogProb

Loss = Callable[..., Tensor]
BackwardFn = Callable[[Tensor], Any]


def differentiate(
    log_prob: LogProb,
    micro_batches: Iterable[MicroBatch],
    *,
    loss: Loss,
    denominator: float,
    backward_fn: BackwardFn,
    clock: StageClock,
) -> Tensor:
    """Add the gradient of the gated loss to `.grad`; return the loss, 0-d and detached.

    loss = sum over kept elements of weight * loss(log_prob, advantage) / denominator, summed over
    micro-batches, so accumulation equals one large batch.
    """
    total: Tensor | None = None
    for micro in micro_batches:
        with clock.stage("forward"):
            log_probs = _graph_log_probs(log_prob, micro)
            gated = gated_sum(log_probs, micro, loss) / denominator
        with clock.stage("backward"):
            backward_fn(gated)
        total = gated.detach() if total is None else total + gated.detach()
    return torch.zeros(()) if total is None else total


def gated_sum(log_probs: Tensor, micro: MicroBatch, loss: Loss) -> Tensor:
    """Return the sum of weighted losses over kept elements. What is not kept cannot leak NaN."""
    home = log_probs.device
    keep, weight = micro.keep.to(home), micro.weight.to(home)
    advantages = expand_rows("advantages", micro.advantages.to(home), keep.shape)
    inputs = {name: value.to(home) for name, value in micro.loss_inputs.items()}
    # where() lets no gradient out of what is not kept, whatever the loss makes of it.
    log_probs = torch.where(keep, log_probs, 0.0)
    _check_finite(log_probs.detach())
    losses = loss(log_probs, advantages, **inputs)
    if losses.shape != keep.shape:
        raise ValueError(
            f"loss must return one value per unit, {list(keep.shape)}, got {list(losses.shape)}; "
            f"leave masking and averaging to kondo.backward."
        )
    return torch.where(keep, at_least_float32(losses) * weight, 0.0).sum()


def _check_finite(log_probs: Tensor) -> None:
    """Refuse a kept element that a free or draft screen did not show to be broken.

    One device sync, more only where something is broken: what is not finite makes no finite sum.
    """
    if math.isfinite(float(log_probs.sum(dtype=torch.float64))):
        return
    broken = ~log_probs.isfinite()
    if bool(broken.any()):
        raise ValueError(
            f"log_prob(rows) must be finite in kept units, got {int(broken.sum())} that are not, "
            f"first {first_unit(broken)} of this micro-batch; nothing of it was differentiated. "
            f"Look for NaN weights, or for actions of probability zero, and mask those."
        )


def _graph_log_probs(log_prob: LogProb, micro: MicroBatch) -> Tensor:
    log_probs = check_float("log_prob(rows)", log_prob(micro.rows))
    if log_probs.shape != micro.keep.shape:
        raise ValueError(
            f"log_prob(rows) must return shape {list(micro.keep.shape)} for these rows, as the "
            f"screen did, or as unit, mask and advantages say where there was none, got "
            f"{list(log_probs.shape)}; check unit=, and that no row depends on other rows."
        )
    if not log_probs.requires_grad:
        raise ValueError(
            "log_prob(rows) must be differentiable, got a detached tensor; remove no_grad, "
            "inference_mode or detach from it, and check that some parameter requires grad."
        )
    return log_probs
