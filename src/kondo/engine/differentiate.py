"""Stages 3 and 4: kept rows -> micro-batches -> forward with a graph -> backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, expand_rows
from kondo.engine.compact import MicroBatch
from kondo.engine.finite import FiniteCheck, Gated
from kondo.engine.loss_arguments import SEQUENCE_INDEX, sequence_index
from kondo.engine.policy import Policy
from kondo.engine.selection import Counts, KeptRows
from kondo.stage_clock import StageClock

if TYPE_CHECKING:
    from kondo.engine.inputs import Inputs

Loss = Callable[..., Tensor]
BackwardFn = Callable[[Tensor], Any]
_T = TypeVar("_T")


class Trained(NamedTuple):
    """What was differentiated; named as in the report."""

    read: Callable[[], tuple[int, float]]
    """Return the tokens that were trained, and the loss; one device sync."""
    rows_trained: int
    calls: int
    elements: int
    """Elements of log-probs of a dense step without a mask, which nobody could count before."""
    own: dict[str, Any] = {}  # noqa: RUF012  # never written to
    """What only ranks have: fields of `kondo.ranks.RankReport`."""


def micro_batches_of(
    inputs: "Inputs",
    batch: Any,
    advantages: Tensor,
    loss_inputs: dict[str, Tensor],
    kept: KeptRows,
) -> Iterable[MicroBatch]:
    """Return kept rows in micro-batches, by the compaction of the options or of the policy."""
    if not kept.rows.numel():
        return ()
    compact = inputs.options.compact or inputs.policy.compact
    size = inputs.micro_batch
    return compact(batch, advantages, kept, loss_inputs=loss_inputs, size=size)


def train(
    inputs: "Inputs",
    kept: KeptRows,
    counts: Counts,
    micro_batches: Iterable[MicroBatch],
    clock: StageClock,
    *,
    scale: int = 1,
    moved: bool = False,
    backward_fn: BackwardFn | None = None,
) -> Trained:
    """Differentiate micro-batches, and count what really went through.

    Args:
        inputs: of the step.
        kept: what was kept of this process's rows.
        counts: of all ranks; what the sum of losses is divided by.
        micro_batches: by a compaction.
        clock: of the step.
        scale: factor of the loss.
        moved: whether rows went to other ranks before.
        backward_fn: how to differentiate a loss; by default as the options say.
    """
    asked = inputs.options.denominator
    divide: float | Callable[[Tensor], float]
    if kept.whole and isinstance(asked, str):
        divide = partial(_by_length, counts.rows_kept, scale)
    else:
        divide = counts.denominator(asked) / scale
    counted = _Counted(micro_batches)
    done = differentiate(
        inputs.log_prob,
        _timed(counted, clock),
        loss=inputs.loss,
        sequences=inputs.sequences,
        denominator=divide,
        backward_fn=backward_fn or inputs.options.backward_fn,
        clock=clock,
        check=_finite_check(inputs, kept, moved=moved),
    )
    elements = done.elements if kept.whole else 0
    read = partial(counted.read, done.loss, elements)
    return Trained(read, counted.rows, counted.calls, elements)


def _by_length(num_rows: int, scale: int, log_probs: Tensor) -> float:
    """Return the elements of all rows, each as long as those of these log-probs."""
    return float(max(1, num_rows * log_probs[0].numel())) / scale


def _finite_check(inputs: "Inputs", kept: KeptRows, *, moved: bool) -> FiniteCheck | None:
    """Return what refuses NaN in kept units; a dense step has none, as `loss.backward()`."""
    if inputs.gate is None:
        return None
    plain = inputs.options.compact is None and type(inputs.policy).compact is Policy.compact
    return FiniteCheck(inputs.rows.loss_inputs, kept, in_order=plain and not moved)


class _Counted:
    """Passes micro-batches on and counts what really went through."""

    def __init__(self, micro_batches: Iterable[MicroBatch]):
        self._micro_batches = micro_batches
        self.calls = 0
        self.rows = 0
        self.tokens: int | Tensor = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in self._micro_batches:
            self.calls += 1
            self.rows += micro.num_rows
            self.tokens = micro.num_tokens + self.tokens
            yield micro

    def read(self, loss: Tensor, elements: int) -> tuple[int, float]:
        """Return the tokens, or else `elements`, and a loss as numbers; one device sync."""
        if not isinstance(self.tokens, Tensor):
            return self.tokens or elements, float(loss)
        # float64 holds every count below 2^53.
        both = [self.tokens.double(), loss.to(self.tokens.device).double()]
        count, value = torch.stack(both).tolist()
        return int(count), value


def _timed(items: Iterable[_T], clock: StageClock) -> Iterator[_T]:
    """Count the time spent waiting for each item as the stage "compact"."""
    iterator = iter(items)
    while True:
        with clock.stage("compact"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


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
    sequences: bool,
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
        loss: (log_probs, advantages, **loss_inputs) -> one value per element.
        sequences: whether the loss also gets `sequence_index`.
        denominator: a number, or what gives it for the log-probs of a micro-batch.
        backward_fn: how to differentiate a loss.
        clock: for the stages forward and backward.
        check: refuses what is not finite in kept units; the host waits for the device. None for a
            dense step.
    """
    total: Tensor | None = None
    elements = 0
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
