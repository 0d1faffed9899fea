"""Stages 3 and 4: kept rows -> micro-batches -> forward with a graph -> loss -> backward."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, expand_rows, first_unit
from kondo.engine.selection import Counts, KeptRows
from kondo.stage_clock import StageClock

if TYPE_CHECKING:
    from kondo.engine.inputs import Inputs

Loss = Callable[..., Tensor]
"""(log_probs, advantages, **loss_inputs) -> one value per element."""
BackwardFn = Callable[[Tensor], Any]


class MicroBatch(NamedTuple):
    """Kept rows, ready to be differentiated. n rows, T tokens (absent for unit "sample").

    A compaction that knows more of the model may flatten [n, T] to [K], one per kept token.
    """

    rows: Any
    """The nest log_prob takes."""
    advantages: Tensor
    """[n] or [n, T]."""
    loss_inputs: dict[str, Tensor]
    """Further tensors of the loss, [n, ...]."""
    keep: Tensor | None
    """bool [n] or [n, T]; None where every element is kept."""
    weight: Tensor | None
    """float like keep; None where it is 1 for what is kept."""
    num_rows: int
    """Rows that enter the forward."""
    num_tokens: int | Tensor
    """Tokens that enter the forward, an int or 0-d: here the elements of these rows that count.
    0 where `keep` is None, and the log-probs tell."""
    filler: bool = False
    """Nothing of it is kept: it is run only because other ranks make a call."""
    row_of: Tensor | None = None
    """int64 [K]: the row of each element, where [n, T] was flattened; for losses that weigh whole
    sequences. Elements of a row must stand together, and all of them in one micro-batch."""


Compact = Callable[..., Iterable[MicroBatch]]
"""Called like `kondo.Policy.compact`."""


def micro_batches_of(
    inputs: "Inputs",
    batch: Any,
    advantages: Tensor,
    loss_inputs: dict[str, Tensor],
    kept: KeptRows,
) -> Iterable[MicroBatch]:
    """Compact kept rows as the options or the policy say."""
    if not kept.rows.numel():
        return ()
    compact = inputs.options.compact or inputs.policy.compact
    return compact(batch, advantages, kept, loss_inputs=loss_inputs, size=inputs.micro_batch)


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
    """Add the gradient of the gated loss to `.grad`, and count what really went through.

    loss = sum over kept elements of weight * loss(log_prob, advantage) / denominator, summed over
    micro-batches, so accumulation equals one large batch.

    Args:
        inputs: of the step.
        kept: what was kept of this process's rows.
        counts: of all ranks, for the denominator.
        micro_batches: by a compaction.
        clock: of the step.
        scale: factor of the loss.
        moved: whether rows went to other ranks before.
        backward_fn: how to differentiate a loss; by default as the options say.
    """
    gate, asked, denominator = inputs.gate, inputs.options.denominator, None
    if not (kept.whole and isinstance(asked, str)):
        denominator = counts.denominator(asked) / scale
    differentiate = backward_fn or inputs.options.backward_fn
    # A dense step refuses no NaN, as `loss.backward()`. Loss inputs are looked at with the first
    # micro-batch, so that a broken one is refused before anything is added to `.grad`.
    judged, others = ({}, []) if gate is None else _judged_inputs(inputs, kept)
    in_order = inputs.options.compact is None and inputs.policy.plain and not moved
    total: Tensor | None = None
    tokens: int | Tensor = 0
    calls = rows_trained = elements = 0
    waiting = iter(micro_batches)
    while True:
        with clock.stage("compact"):
            micro = next(waiting, None)
        if micro is None:
            break
        index = kept.rows[rows_trained:] if in_order else None
        calls += 1
        rows_trained += micro.num_rows
        tokens = micro.num_tokens + tokens
        with clock.stage("forward"):
            log_probs = _log_probs(inputs.log_prob, micro)
            divide = denominator
            if divide is None:  # all rows are as long as these
                divide = float(max(1, counts.rows_kept * log_probs[0].numel())) / scale
            parts = gate_losses(log_probs, micro, inputs.loss, sequences=inputs.sequences)
            gated = parts.losses.sum() / divide
            # After the loss is launched: the device has work to do while the host waits.
            hidden = gate is not None and _refuse_broken(parts, judged, others, index)
            judged = {}
        leaks = _refuse_leaks(parts, index) if hidden else nullcontext()
        with clock.stage("backward"), leaks:
            differentiate(gated)
        if kept.whole and micro.keep is None and not micro.filler:
            elements += log_probs.numel()
        total = gated.detach() if total is None else total + gated.detach()
    loss = torch.zeros(()) if total is None else total

    def read() -> tuple[int, float]:
        if not isinstance(tokens, Tensor):
            return tokens or elements, float(loss)
        # float64 holds every count below 2^53.
        count, value = torch.stack([tokens.double(), loss.to(tokens.device).double()]).tolist()
        return int(count), value

    return Trained(read, rows_trained, calls, elements)


def _log_probs(log_prob: Callable[[Any], Tensor], micro: MicroBatch) -> Tensor:
    """Return log-probs with a graph, in the shape that these rows have."""
    log_probs = check_float("log_prob(rows)", log_prob(micro.rows))
    if micro.keep is None:  # kept tokens of a pack stand in one dimension, and advantages with them
        check_log_probs("log_prob(rows)", log_probs, micro.advantages.shape[0])
    elif log_probs.shape != micro.keep.shape:
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


def check_log_probs(name: str, log_probs: Any, size: int) -> Tensor:
    """Return `log_probs` if it is a floating-point tensor [size] or [size, T]."""
    found = check_float(name, log_probs)
    if found.ndim not in (1, 2) or found.shape[0] != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, T], one row per row of the batch, got "
            f"{list(found.shape)}; return the log-prob of each taken action, not of all."
        )
    return found


class Gated(NamedTuple):
    """One micro-batch after its forward. n rows, T tokens, as in `MicroBatch`."""

    raw: Tensor
    """[n] or [n, T]: log-probs as the policy gave them."""
    log_probs: Tensor
    """Like raw, 0 where not kept, as are losses."""
    losses: Tensor
    keep: Tensor | None
    """bool like raw; None where every element is kept."""


def gate_losses(
    log_probs: Tensor, micro: MicroBatch, loss: Loss, *, sequences: bool = False
) -> Gated:
    """Return the weighted losses of the kept elements; what is not kept leaks no NaN out of them.

    `sequences` says whether the loss must be told which sequence each element belongs to.
    """
    raw, home = log_probs, log_probs.device
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
        inputs["sequence_index"] = sequence_index(log_probs, micro, keep)
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


def sequence_index(log_probs: Tensor, micro: MicroBatch, keep: Tensor | None) -> Tensor:
    """Return the sequence of each log-prob of a micro-batch, -1 where it is not kept.

    A row is a sequence. Nothing is read from the device.
    """
    if micro.row_of is not None:
        of_row = micro.row_of.to(log_probs.device)
        # Rows of the batch, counted anew: there may be more of them than elements here.
        starts = torch.ones_like(of_row)
        starts[1:] = of_row[1:] != of_row[:-1]
        number = starts.cumsum(0) - 1
    elif micro.filler or log_probs.shape[0] == micro.num_rows:
        number = torch.arange(log_probs.shape[0], device=log_probs.device)
        if log_probs.ndim == 2:
            number = number.unsqueeze(1).expand_as(log_probs)
    else:
        raise ValueError(
            f"compact must say which row each element belongs to, for a loss that weighs whole "
            f"sequences: got {list(log_probs.shape)} log-probs of {micro.num_rows} rows. Set "
            f"MicroBatch.row_of, or use a loss of tokens."
        )
    return number if keep is None else torch.where(keep, number, -1)


def _judged_inputs(inputs: "Inputs", kept: KeptRows) -> tuple[dict[str, Tensor], list[str]]:
    """Return floats of the loss, 0 where not kept, and the names of those that the loss judges.

    Of a tensor with one value per element or per row it is known which numbers the loss uses.
    """
    judged, others = {}, []
    for name, part in inputs.rows.loss_inputs.items():
        if not part.is_floating_point():
            continue
        keep = kept.keep
        if part.shape != keep.shape and part.shape in (keep.shape[:1], (len(keep), 1)):
            # One value per row is kept with its row.
            keep = (keep if keep.ndim == 1 else keep.any(dim=1)).view(part.shape)
        if part.shape == keep.shape:
            judged[f"loss_inputs[{name!r}]"] = torch.where(keep.to(part.device), part, 0.0)
        else:
            others.append(name)
    return judged, others


def _refuse_broken(
    gated: Gated, judged: dict[str, Tensor], others: list[str], index: Tensor | None
) -> bool:
    """Refuse NaN and infinity in kept units; one device sync.

    They never leave a sum finite. So the sums of everything that must be finite are read together,
    and only a broken one is looked at closely. Returns whether an element that is not kept has a
    log-prob that is not finite.
    """
    must = {**judged, "log_prob(rows)": gated.log_probs.detach()}
    if others:
        must["loss"] = gated.losses.detach()
    parts, home = [gated.raw.detach(), *must.values()], gated.raw.device
    sums = torch.stack([part.sum(dtype=torch.float64).to(home) for part in parts]).tolist()
    for (name, part), total in zip(must.items(), sums[1:], strict=True):
        if math.isfinite(total) or not bool((broken := ~part.isfinite()).any()):
            continue
        unit = first_unit(broken) if name in judged else _unit_of(broken, index)
        advice = "Look for NaN weights, and mask actions of probability zero."
        if name != "log_prob(rows)":
            advice = f"Look at loss_inputs {others or ''}, or for a ratio that overflows."
        raise ValueError(
            f"{name} must be finite in kept units, got {part[broken][0].item()} in {unit} "
            f"({int(broken.sum())} in all); nothing of this micro-batch was differentiated. "
            f"{advice}"
        )
    return gated.keep is not None and not math.isfinite(sums[0])


@contextmanager
def _refuse_leaks(gated: Gated, index: Tensor | None) -> Iterator[None]:
    """Refuse, after a backward, NaN in it that came out of what is not kept.

    An element that is not kept has a gradient of 0, and 0 * NaN inside the policy is NaN. Only the
    gradients of what is trained say whether that happens. The error comes after the backward,
    because other ranks may be waiting in it.
    """
    found: list[Tensor] = []

    def note(gradient: Any) -> None:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local = local.coalesce().values() if local.is_sparse else local
        found.append(local.isnan().any())

    handles = [leaf.register_hook(note) for leaf in leaves_of(gated.raw)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    home = gated.raw.device
    if found and bool(torch.stack([each.to(home) for each in found]).any()):
        assert gated.keep is not None
        broken = ~gated.raw.detach().isfinite() & ~gated.keep
        raise ValueError(
            f"log_prob(rows) must have a finite gradient, got NaN, and a log-prob that is not "
            f"finite in {_unit_of(broken, index)}, which is not kept but stands in a row that is. "
            f"Clear .grad, and give the policy finite inputs at elements that are masked."
        )


def _unit_of(where: Tensor, index: Tensor | None) -> str:
    """Name the first unit of a micro-batch: in the batch, where that is known."""
    if index is None:
        return f"{first_unit(where)} of this micro-batch"
    row, *rest = where.nonzero()[0].tolist()
    position = [int(index[row]), *rest]
    return f"unit {position[0] if len(position) == 1 else tuple(position)}"


def leaves_of(output: Tensor) -> list[Any]:
    """Return the tensors whose `.grad` a backward from `output` adds to."""
    found = []
    seen = {output.grad_fn}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # a node that accumulates
            found.append(node.variable)
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        stack.extend(new)
    return found
