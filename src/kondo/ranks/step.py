"""The gated step of many ranks on one page: the engine's stages, and agreement between them.

    agree -> screen -> all delight, one gate -> deal and move kept rows -> compact -> differentiate

Each rank brings rows of its own. Afterwards `.grad` holds what `kondo.backward` in one process
would put there for all rows together, and every rank has made the same number of calls.
"""

import contextlib
import struct
from collections.abc import Generator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kondo.core import losses
from kondo.core._checks import check_float
from kondo.core.delight import delight
from kondo.core.diagnostics import diagnostics
from kondo.engine import rows
from kondo.engine import step as engine
from kondo.engine.compact import Compact, MicroBatch
from kondo.engine.differentiate import BackwardFn, Loss, differentiate
from kondo.engine.screen import LogProb, screen_log_probs
from kondo.engine.select import GateLike, Priority, Selection, Unit, select
from kondo.lm.model import check_rows
from kondo.lm.rows import TokenRows
from kondo.ranks import placement, tokens
from kondo.ranks.agreement import agree, describe
from kondo.ranks.exchange import structure
from kondo.ranks.gradients import Gradients, When
from kondo.ranks.placement import LocalRows
from kondo.ranks.prices import GlobalGate
from kondo.ranks.ranks import Ranks
from kondo.ranks.report import RankClock, RankReport

# Beyond this many units over all ranks a sketch sets the price: 16 MB of float32 on every rank.
EXACT_UNITS = 2**22


def backward(
    log_prob: LogProb,
    batch: Any,
    advantages: Tensor,
    *,
    gate: GateLike,
    group: dist.ProcessGroup | None = None,
    module: nn.Module | None = None,
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
    backward_fn: BackwardFn = Tensor.backward,
    compact: Compact | None = None,
    rebalance: bool = True,
    all_reduce: bool | None = None,
    sync: When = "last",
    exact_units: int = EXACT_UNITS,
) -> RankReport:
    """Add to `.grad` the gradient of the gated loss of all ranks' rows; call it on every rank.

    L = 1/D * sum over ranks, and their kept elements, of  w * loss(log pi(a|s), U)

    with one gate and one D for all ranks: the gradient, keep and price are those of
    `kondo.backward` on all rows, in the order of the ranks. Arguments that are not named here are
    those of `kondo.backward`; all but the tensors' values and sizes must be the same on all ranks.

    Args:
        log_prob: as for `kondo.backward`, through the wrapped module. For a `CausalLM` wrap
            `TokenLogProb`.
        batch: this rank's rows; may have none. Sizes beside the rows may differ between ranks:
            rows that move are filled up with zeros at the end.
        advantages: [N] or [N, T] float of this rank's rows.
        gate: called on the delight of all ranks, so its running state stays the same on all.
        group: the ranks; None for all processes. For DDP and FSDP2 those of the wrapped module.
        module: what is trained, where it cannot be found in log_prob: in DDP, sharded by
            `fully_shard`, or plain.
        mask: as for `kondo.backward`; by default the completion_mask of `kondo.lm.TokenRows`.
        denominator: counts those of all ranks; a number is that of all ranks too, and of all calls
            of an accumulation.
        generator: rank 0's is used, and those of the others are set to it.
        compact: as for `kondo.backward`; by default that of the `CausalLM`, where it is one.
        rebalance: move kept rows between ranks until each has about the same number of tokens.
        all_reduce: for plain modules, where it must be given: True sums over ranks what this call
            adds to `.grad`; False leaves each rank its part, and the parts add up to the gradient.
        sync: in which forward/backward calls wrapped modules exchange gradients: the "last" of this
            step; "each", so that FSDP2 holds no unsharded gradients; or "never", for all but the
            last step of an accumulation. DDP's own `no_sync` around this call is respected.
        exact_units: see `kondo.ranks.prices`.

    Returns:
        A `RankReport`. If no rank kept anything `report.empty` is True on all, and no `.grad` was
        touched.

    Raises:
        ValueError: for every argument that cannot be right, or differs between ranks.
        RankError: another rank failed; the message is its own.

    Example:
        >>> policy = DistributedDataParallel(torch.nn.Linear(2, 1))  # doctest: +SKIP
        >>> report = kondo.ranks.backward(  # doctest: +SKIP
        ...     lambda rows: -policy(rows).squeeze(1).square(),
        ...     torch.randn(100, 2), torch.ones(100), gate=kondo.Gate(rate=0.03),
        ... )
        >>> report.ranks, report.seen, report.kept  # doctest: +SKIP
        (2, 200, 6)
    """
    ranks = Ranks(group)
    with ranks.together():
        engine.check_sizes(micro_batch=micro_batch, screen_chunk=screen_chunk)
        engine.check_denominator(denominator)
        if screen_chunk is None and micro_batch is not None:
            screen_chunk = engine.SCREEN_CHUNK_FACTOR * micro_batch
        device = engine.main_device(log_prob, batch)
        local = _local(log_prob, batch, advantages, mask, screen, loss_inputs, device)
        if compact is None and (lm := tokens.causal_lm(log_prob)) is not None:
            compact = lm.compact
        gradients = Gradients(log_prob, ranks, module=module, all_reduce=all_reduce, when=sync)
        clock = RankClock(device)
        alike = {
            "gate": gate,
            "unit": unit,
            "loss": loss,
            "micro_batch": micro_batch,
            "denominator": denominator,
            "generator": None if generator is None else generator.device.type,
            "priority": priority,
            "compact": compact,
            "rebalance": rebalance,
            "all_reduce": all_reduce,
            "sync": sync,
            "exact_units": exact_units,
        }
        stand_in, screened = _screen(ranks, log_prob, local, alike, screen_chunk, clock)
        if not local.size:  # none of its rows, but their sizes
            local = rows.take(stand_in, slice(0, 0))
        decide = GlobalGate(gate, local.batch, ranks, clock, exact_units=exact_units)
        with clock.stage("select"):
            chosen = select(
                screened[: local.size].to(device),
                local.advantages,
                gate=decide,
                priority=priority,
                unit=unit,
                mask=local.mask,
                generator=generator,
            )
        with clock.stage("wait"):
            counts = _count(ranks, chosen, decide)
        trained = _NOTHING
        if counts.kept:
            with clock.stage("coordinate"):
                placed = placement.place(ranks, local, chosen, counts.kept_rows, rebalance)
                micros, own, calls = placement.planned(ranks, placed, compact, micro_batch)
            fill = partial(placement.filler, stand_in, screened, chosen, compact)
            trained = _train(
                ranks,
                log_prob,
                placement.in_step(micros, calls, fill, gradients),
                gradients=gradients,
                loss=loss,
                denominator=counts.denominator(denominator),
                backward_fn=backward_fn,
                clock=clock,
            )._replace(
                rank_fillers=calls - own,
                rows_moved=placed.rows_moved,
                bytes_moved=placed.bytes_moved,
            )
    return RankReport(
        seen=counts.units,
        kept=counts.kept,
        rate=float(chosen.gate.rate),
        price=float(chosen.gate.price),
        rows_seen=counts.rows,
        rows_screened=0 if isinstance(screen, Tensor) else counts.rows,
        tokens_seen=counts.elements,
        ranks=ranks.size,
        rank_kept=counts.rank_kept,
        **trained._asdict(),
        seconds=clock.seconds(),
        _diagnose=partial(_diagnose, decide, counts.hidden_nan, gate),
    )


class _Counts(NamedTuple):
    """What all ranks saw and kept together."""

    rows: int
    units: int
    kept: int
    elements: int
    """Elements of log_probs that count."""
    kept_elements: int
    hidden_nan: int
    kept_rows: list[int]
    """Rows with a kept element, of each rank."""
    rank_kept: int
    """Units kept of this rank's own."""

    def denominator(self, asked: str | float) -> float:
        """Return what the sum of losses is divided by."""
        counted = {"full": self.elements, "kept": self.kept_elements}
        return max(1.0, float(counted[asked])) if isinstance(asked, str) else float(asked)


class _Trained(NamedTuple):
    """What was differentiated; named as in the report."""

    loss: float
    rows_trained: int
    tokens_trained: int
    calls: int
    rank_loss: float
    rank_rows_trained: int
    rank_tokens_trained: int
    rank_fillers: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0


_NOTHING = _Trained(0.0, 0, 0, 0, 0.0, 0, 0)


def _local(
    log_prob: LogProb,
    batch: Any,
    advantages: Tensor,
    mask: Tensor | None,
    screen: Tensor | LogProb | None,
    loss_inputs: dict[str, Tensor] | None,
    device: torch.device,
) -> LocalRows:
    """Check what this rank was given; bring what the gate looks at to one device."""
    size = placement.count_rows(batch, "batch")
    advantages = check_float("advantages", advantages).detach().to(device)
    loss_inputs = {name: value.detach() for name, value in (loss_inputs or {}).items()}
    if mask is None and isinstance(batch, TokenRows):
        mask = batch.completion_mask
    given = {"advantages": advantages, "mask": mask, "screen": screen, **loss_inputs}
    for name, value in given.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != size):
            raise ValueError(
                f"{name} must have {size} rows like batch, got shape {list(value.shape)}."
            )
    lm = tokens.causal_lm(log_prob)
    if lm is not None and size:
        check_rows(batch).check(lm.vocab_size)
    mask = mask.to(device) if isinstance(mask, Tensor) else mask
    return LocalRows(batch, advantages, mask, loss_inputs, screen)


def _screen(
    ranks: Ranks,
    log_prob: LogProb,
    local: LocalRows,
    alike: dict[str, Any],
    chunk: int | None,
    clock: RankClock,
) -> tuple[LocalRows, Tensor]:
    """Agree on the options and screen this rank's rows, in as many forwards as every other rank.

    Returns:
        The rows that were screened, at least one, and their log-probs.
    """
    screen = local.screen
    calls = least = 0
    if not isinstance(screen, Tensor):
        calls = tokens.screen_calls(screen or log_prob, local.batch, local.size, chunk)
        least = 1  # also where the only row is another rank's
    with clock.stage("wait"):
        options = {name: describe(value) for name, value in alike.items()}
        options |= {"screen": "a callable" if callable(screen) else describe(screen)}
        for name, part in local._asdict().items():
            options |= structure(part, name)
        told = agree(ranks, options, local.size, calls)
    with clock.stage("coordinate"):
        stand_in = placement.with_a_row(ranks, local, [size for size, _ in told])
    with clock.stage("screen"):
        screened = screen_log_probs(log_prob, stand_in.batch, screen=stand_in.screen, chunk=chunk)
        missing = max(most for _, most in told) - max(calls, least)
        for _ in range(missing):
            first = rows.take(stand_in.batch, slice(0, 1))
            screen_log_probs(log_prob, first, screen=screen)
    return stand_in, screened


def _count(ranks: Ranks, chosen: Selection, decide: GlobalGate) -> _Counts:
    """Add up what the ranks saw and kept; make sure that they decided the same."""
    numbers = (
        chosen.unit_mask.sum(),
        chosen.gate.keep.sum(),
        chosen.mask.sum(),
        chosen.keep.sum(),
        chosen.hidden_nan,
    )
    own = torch.stack([number.long() for number in numbers]).tolist()  # one device sync
    price = _to_word(float(chosen.gate.price))
    decided = (price, decide.num_kept, decide.digest)
    told = ranks.say(*own, chosen.mask.shape[0], chosen.rows.numel(), *decided)
    if any(theirs[7:] != told[0][7:] for theirs in told):
        raise RuntimeError(
            f"gate decided differently on different ranks: prices "
            f"{[_to_float(theirs[7]) for theirs in told]}; it must depend on nothing but the "
            f"delight, the mask and the generator it is given."
        )
    units, kept, elements, kept_elements, hidden_nan, num_rows = (
        sum(theirs[place] for theirs in told) for place in range(6)
    )
    kept_rows = [theirs[6] for theirs in told]
    return _Counts(
        num_rows, units, kept, elements, kept_elements, hidden_nan, kept_rows, rank_kept=own[1]
    )


def _train(
    ranks: Ranks,
    log_prob: LogProb,
    micros: Generator[MicroBatch],
    *,
    gradients: Gradients,
    loss: Loss,
    denominator: float,
    backward_fn: BackwardFn,
    clock: RankClock,
) -> _Trained:
    """Differentiate the micro-batches in step with all ranks, and add up what was done."""

    def agreed_backward(gated: Tensor) -> None:
        with clock.stage("wait"):
            ranks.say()  # nobody waits in a backward for one whose forward failed
        backward_fn(gated)

    with gradients.step(clock):
        with contextlib.closing(micros):
            done = engine.Counted(micros)
            total = differentiate(
                log_prob,
                engine.timed(done, clock),
                loss=loss,
                denominator=denominator / gradients.scale,
                backward_fn=agreed_backward,
                clock=clock,
            )
        own_loss = float(total) / gradients.scale
        with clock.stage("wait"):
            told = ranks.say(done.rows, int(done.tokens), _to_word(own_loss))
    return _Trained(
        loss=sum(_to_float(theirs) for *_, theirs in told),
        rows_trained=sum(theirs for theirs, *_ in told),
        tokens_trained=sum(theirs for _, theirs, _ in told),
        calls=done.calls,
        rank_loss=own_loss,
        rank_rows_trained=done.rows,
        rank_tokens_trained=int(done.tokens),
    )


def _diagnose(decide: GlobalGate, hidden_nan: int, gate: GateLike) -> dict[str, float]:
    """Judge the gate at its own temperature; a hard one at 1. Count the NaN the mask hid."""
    eta = getattr(gate, "eta", 0.0) or 1.0
    numbers = diagnostics(decide.delight, decide.decision, mask=decide.mask, eta=eta)
    return numbers | {"nan_count": float(hidden_nan)}


def _to_word(value: float) -> int:
    """Return the bits of a float as an integer, which `say` can carry exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _to_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
