"""The gated step on one page:  screen -> select -> compact -> differentiate.

`kondo.backward` replaces `loss.backward()`: afterwards `.grad` holds the gradient of the gated
loss, and only the kept rows were ever differentiated.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kondo.core import losses
from kondo.core._checks import check_float
from kondo.core.delight import delight
from kondo.core.diagnostics import diagnostics
from kondo.engine import rows
from kondo.engine.compact import Compact, MicroBatch, micro_batches
from kondo.engine.differentiate import BackwardFn, Loss, differentiate
from kondo.engine.promising import Screened, screen_promising
from kondo.engine.report import Report, StageClock
from kondo.engine.screen import LogProb, devices_of, screen_log_probs
from kondo.engine.select import (
    Counts,
    GateLike,
    Priority,
    Selection,
    Unit,
    needs_log_probs,
    select,
)

# The no-grad screen stores no activations: its chunks can be this much larger.
SCREEN_CHUNK_FACTOR = 4

_T = TypeVar("_T")


def backward(
    log_prob: LogProb,
    batch: Any,
    advantages: Tensor,
    *,
    gate: GateLike,
    mask: Tensor | None = None,
    screen: Tensor | LogProb | None = None,
    loss: Loss = losses.pg,
    micro_batch: int | None = None,
    denominator: Literal["full", "kept"] | float = "full",
    unit: Unit = "sample",
    generator: torch.Generator | None = None,
    loss_inputs: dict[str, Tensor] | None = None,
    priority: Priority = delight,
    screen_chunk: int | None = None,
    screen_rows: Literal["all", "promising"] = "all",
    backward_fn: BackwardFn = Tensor.backward,
    compact: Compact | None = None,
) -> Report:
    """Add to `.grad` the gradient of the gated loss, differentiating only what is kept.

    L = 1/D * sum over kept elements of  w * loss(log pi(a|s), U)

    with w the gate's weight and D the denominator. The gradient equals that of the same loss
    computed on the whole batch and masked.

    Args:
        log_prob: rows -> [n] or [n, T] log-probs of the taken actions, differentiated with respect
            to whatever requires grad inside. A row's log-probs must not depend on other rows.
        batch: any nest (dict, list, tuple, dataclass, TensorDict) of tensors with N rows.
        advantages: [N] or [N, T] float, not differentiated; centred only.
        gate: `kondo.Gate`, or any callable (delight, mask, generator) -> `kondo.Choice`.
        mask: [N] or [N, T] bool, True means "counts".
        screen: None for a no-grad forward; [N] or [N, T] log-probs that already exist; or a draft
            to call instead of log_prob. With None and a priority that needs no log-probs, as those
            by advantage alone, there is no forward, if the unit is "sample" or advantages or mask
            tell how many tokens a row has (more than one). A NaN in a row that is not kept is then
            not noticed, and one that is kept only in its own micro-batch: give screen=log_prob.
        loss: (log_probs, advantages, **loss_inputs) -> one value per element; see `kondo.losses`.
        micro_batch: rows per forward/backward; all kept rows at once if None.
        denominator: "full" divides by the elements that count in the whole batch, so a learning
            rate means what it means for dense; "kept" by the kept elements; a number by itself,
            for batches that are spread over ranks or calls.
        unit: what is gated: "sample" for [N]; "token" or "sequence" for [N, T], see
            `kondo.engine.select.select`.
        generator: for the gate's draws.
        loss_inputs: further tensors with N rows that the loss takes by name, e.g.
            {"old_log_probs": ...}; gathered with the rows, not differentiated.
        priority: what the gate looks at, delight by default; see `kondo.signals`.
        screen_chunk: rows per screening forward; by default four micro-batches.
        screen_rows: "promising" leaves out of a screening forward the rows that have no positive
            advantage, wherever the gate says that they cannot be kept (a hard rate or price). What
            is kept stays the same; NaN in a row that was left out is not noticed, and diagnostics
            are those of the rows that were screened.
        backward_fn: how to differentiate a loss; `lambda loss: scaler.scale(loss).backward()` for
            gradient scaling, `accelerator.backward` for Accelerate.
        compact: another compaction of the kept rows, called like
            `kondo.engine.compact.micro_batches`; its micro-batches go to log_prob.

    Returns:
        A `Report`. If nothing was kept `report.empty` is True, `.grad` is untouched, and the
        caller decides whether to step the optimiser.

    Raises:
        ValueError: for every argument that cannot be right, naming it.

    Example:
        >>> import torch, kondo
        >>> policy = torch.nn.Linear(4, 3)
        >>> states, actions = torch.randn(100, 4), torch.randint(3, (100,))
        >>> def log_prob(rows):
        ...     states, actions = rows
        ...     return policy(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        >>> report = kondo.backward(
        ...     log_prob, (states, actions), torch.randn(100), gate=kondo.Gate(rate=0.1)
        ... )
        >>> report.kept, report.rows_trained
        (10, 10)

    Reference: https://arxiv.org/abs/2603.20526, Algorithm 1
    """
    check_sizes(micro_batch=micro_batch, screen_chunk=screen_chunk)
    check_denominator(denominator)
    loss_inputs = loss_inputs or {}
    size = rows.num_rows(batch)
    if loss_inputs and rows.num_rows(loss_inputs, "loss_inputs") != size:
        raise ValueError(f"loss_inputs must have {size} rows like batch; got another number.")
    if screen_chunk is None and micro_batch is not None:
        screen_chunk = SCREEN_CHUNK_FACTOR * micro_batch
    device = main_device(log_prob, batch)
    advantages = check_float("advantages", advantages).detach().to(device)
    loss_inputs = {name: value.detach() for name, value in loss_inputs.items()}
    mask = mask.to(device) if isinstance(mask, Tensor) else mask
    clock = StageClock(device)
    if screen is None and callable(log_prob) and not needs_log_probs(priority):
        screen = _unseen(size, advantages, mask, unit)

    with clock.stage("screen"):
        run_screen = _Screen(log_prob, screen, screen_chunk)
        if _leaves_out(screen_rows, screen, priority):
            screened = screen_promising(
                run_screen, batch, advantages, gate=gate, unit=unit, mask=mask
            )
        else:
            screened = Screened(run_screen(batch), None)
    with clock.stage("select"):
        chosen = select(
            screened.log_probs.to(device),
            advantages,
            gate=gate,
            priority=priority,
            unit=unit,
            mask=mask,
            generator=generator,
        )
    if compact is None:
        compact = micro_batches
    counted = Counted(
        compact(batch, advantages, chosen, loss_inputs=loss_inputs, size=micro_batch)
        if chosen.rows.numel()
        else ()
    )
    total = differentiate(
        log_prob,
        timed(counted, clock),
        loss=loss,
        denominator=_denominator(denominator, chosen.counts),
        backward_fn=backward_fn,
        clock=clock,
    )
    diagnose = partial(_diagnose, chosen, screened, eta=getattr(gate, "eta", 0.0) or 1.0)
    return _report(chosen, run_screen.rows, counted, total, clock, diagnose)


def _leaves_out(screen_rows: str, screen: Any, priority: Priority) -> bool:
    if screen_rows not in ("all", "promising"):
        raise ValueError(f'screen_rows must be "all" or "promising", got {screen_rows!r}.')
    if screen_rows == "promising" and priority is not delight:
        raise ValueError(
            'screen_rows="promising" must go with the priority delight, whose sign is that of the '
            'advantage, got another priority; use screen_rows="all".'
        )
    return screen_rows == "promising" and not isinstance(screen, Tensor)


def _unseen(size: int, advantages: Tensor, mask: Tensor | None, unit: Unit) -> Tensor | None:
    """Return zeros in the shape of log-probs that nobody looks at; None where it is not known."""
    given = [part.shape for part in (advantages, mask) if isinstance(part, Tensor)]
    if unit == "sample":
        return advantages.new_zeros(size) if all(len(shape) == 1 for shape in given) else None
    # One column stands for a value per row, whatever their tokens.
    widths = [shape[1] for shape in given if len(shape) == 2 and shape[1] > 1]
    return advantages.new_zeros(size, widths[0]) if widths else None


class _Screen:
    """Screens some rows of the batch, and counts those that a forward was made for."""

    def __init__(self, log_prob: LogProb, screen: Tensor | LogProb | None, chunk: int | None):
        self._log_prob, self._screen, self._chunk = log_prob, screen, chunk
        self.rows = 0

    def __call__(self, some: Any) -> Tensor:
        if not isinstance(self._screen, Tensor):
            self.rows += rows.num_rows(some)
        return screen_log_probs(self._log_prob, some, screen=self._screen, chunk=self._chunk)


def _diagnose(chosen: Selection, screened: Screened, *, eta: float) -> dict[str, float]:
    """Judge the gate at its own temperature; a hard one at 1. Count the NaN the mask hid."""
    mask = chosen.unit_mask
    if screened.rows is not None:
        known = screened.rows.to(mask.device)
        mask = mask & (known if mask.ndim == 1 else known.unsqueeze(1))
    numbers = diagnostics(chosen.delight, chosen.gate, mask=mask, eta=eta)
    return numbers | {"nan_count": float(chosen.hidden_nan)}


class Counted:
    """Passes micro-batches on and counts what really went through."""

    def __init__(self, micros: Iterable[MicroBatch]):
        self._micros = micros
        self.calls = 0
        self.rows = 0
        self.tokens: int | Tensor = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in self._micros:
            self.calls += 1
            self.rows += micro.num_rows
            self.tokens = micro.num_tokens + self.tokens
            yield micro


def timed(items: Iterable[_T], clock: StageClock) -> Iterator[_T]:
    """Count the time spent waiting for each item as the stage "compact"."""
    iterator = iter(items)
    while True:
        with clock.stage("compact"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


def _report(
    chosen: Selection,
    rows_screened: int,
    counted: Counted,
    total: Tensor,
    clock: StageClock,
    diagnose: Callable[[], dict[str, float]],
) -> Report:
    with clock.stage("select"):
        tokens_trained, loss = _read(counted.tokens, total)
    return Report(
        seen=chosen.counts.units,
        kept=chosen.counts.units_kept,
        rate=float(chosen.gate.rate),
        price=float(chosen.gate.price),
        loss=loss,
        rows_seen=chosen.mask.shape[0],
        rows_screened=rows_screened,
        rows_trained=counted.rows,
        tokens_seen=chosen.counts.elements,
        tokens_trained=tokens_trained,
        calls=counted.calls,
        seconds=clock.seconds(),
        _diagnose=diagnose,
    )


def _read(tokens: int | Tensor, total: Tensor) -> tuple[int, float]:
    """Return a count and the loss as numbers; one device sync."""
    if not isinstance(tokens, Tensor):
        return tokens, float(total)
    # float64 holds every count below 2^53.
    count, loss = torch.stack([tokens.double(), total.to(tokens.device).double()]).tolist()
    return int(count), loss


def _denominator(denominator: str | float, counts: Counts) -> float:
    counted = {"full": counts.elements, "kept": counts.elements_kept}
    if isinstance(denominator, str):
        return max(1.0, float(counted[denominator]))
    return float(denominator)


def check_denominator(denominator: str | float) -> None:
    """Raise a ValueError unless it is a word we know or a positive number."""
    if denominator in ("full", "kept"):
        return
    if isinstance(denominator, str) or not 0 < denominator < float("inf"):
        raise ValueError(
            f'denominator must be "full", "kept" or a positive number, got {denominator!r}; '
            f'"full" keeps the dense learning rate.'
        )


def check_sizes(**sizes: int | None) -> None:
    """Raise a ValueError unless each is None or at least one row."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1 row, got {size}; None takes all at once.")


def main_device(log_prob: LogProb, batch: Any) -> torch.device:
    """Return where the work happens: CUDA if any row or parameter lives there."""
    cpu = torch.device("cpu")
    found = rows.devices(batch)
    # The search for parameters follows references, which takes long: only where rows do not settle.
    if not any(device.type == "cuda" for device in found):
        found = devices_of(log_prob, batch)
    return max(found, key=lambda device: device.type == "cuda", default=cpu)
