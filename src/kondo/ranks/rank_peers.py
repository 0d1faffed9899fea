"""A step of many ranks: what they exchange between the stages of `kondo.backward`.

    agree -> screen -> all values, one gate -> assign and move kept rows -> compact -> differentiate

Each rank brings rows of its own. Afterwards `.grad` holds what one process with all rows would put
there, and every rank has made the same number of calls.
"""

import contextlib
import dataclasses
import struct
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kondo.core.contract import BaseGate
from kondo.engine import rows
from kondo.engine.compact import MicroBatch
from kondo.engine.differentiate import Differentiated, differentiate
from kondo.engine.finite import FiniteCheck
from kondo.engine.inputs import Inputs
from kondo.engine.partial_screen import Forward, Screened
from kondo.engine.peers import (
    Alone,
    Counted,
    Trained,
    denominator,
    diagnose,
    eta_of,
    finite_check,
    own_counts,
    report_fields,
    timed,
)
from kondo.engine.report import Late, Report, StageClock
from kondo.engine.select import Counts, Selection
from kondo.ranks import placement
from kondo.ranks.agreement import agree, describe
from kondo.ranks.communicator import Ranks
from kondo.ranks.global_gate import GlobalGate
from kondo.ranks.gradients import Gradients
from kondo.ranks.placement import Placed
from kondo.ranks.rank_report import RankClock, RankReport
from kondo.ranks.rebalance import structure

Denominator = float | Callable[[Tensor], float]

# Fields of `Counts` that are numbers of things, which are added up, and those that are sums of
# floats, which are too. Between them are price and rate, which ranks must have in common.
_SUMMED = Counts._fields.index("price")
_WATCHED = ("surprisal", "advantage", "abs_advantage")


class _Done(NamedTuple):
    """What was differentiated, by all ranks and by this one; named as in the report."""

    loss: float
    rows_trained: int
    tokens_trained: int
    calls: int
    elements: int
    rank_loss: float
    rank_rows_trained: int
    rank_tokens_trained: int
    rank_fillers: int
    rows_moved: int
    bytes_moved: int


_NOTHING = _Done(0.0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0)


class RankPeers(Alone):
    """This process in one step of the ranks of a group.

    Args:
        group: a process group that holds this process; None for all processes.
    """

    may_be_empty = True

    def __init__(self, group: dist.ProcessGroup | None):
        self._ranks = Ranks(group)
        self.first = self._ranks.rank == 0
        self._gate: GlobalGate | None = None
        self._kept_rows: list[int] = []
        self._gradients: Gradients | None = None
        self._done = _NOTHING

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Tell an error to all ranks, which then raise it too."""
        return self._ranks.together()

    def clock(self, device: torch.device) -> RankClock:
        """Return a fresh clock with the ranks' own stages."""
        return RankClock(device)

    def agree(self, inputs: Inputs, clock: StageClock) -> Inputs:
        """Compare what all must have in common; lend a row to ranks that have none."""
        options, local = inputs.options, inputs.rows
        self._gradients = Gradients(
            inputs.policy.log_prob,
            self._ranks,
            module=options.module,
            all_reduce=options.all_reduce,
            when=options.sync,
        )
        alike: dict[str, Any] = {"gate": inputs.gate, "unit": inputs.unit, "loss": inputs.loss}
        alike |= {"micro_batch": inputs.micro_batch, **options.alike()}
        alike |= {"policy": type(inputs.policy).__name__}
        told = {name: describe(value) for name, value in alike.items()}
        told["screen"] = "a callable" if callable(local.screen) else describe(local.screen)
        told["screen, of densities or not,"] = str(inputs.density)
        for name, part in local._asdict().items():
            told |= structure(part, name)
        # Where every element of a row counts, rows that move must not be filled up.
        shapes = [list(part.shape[1:]) for part in rows.leaves(local.batch)]
        widths = {"batch, beside its rows (or give a mask per token),": str(shapes)}
        if inputs.gate is None and local.mask is None:
            told |= widths
        with clock.stage("wait"):
            found = agree(self._ranks, told, local.size, inputs.masks_rows)
            # One column beside wider masks of other ranks is the one token of these rows.
            of_rows = all(one_per_row for size, one_per_row in found if size)
            if inputs.gate is None and inputs.unit != "sample" and of_rows:
                among = [rank for rank, (size, _) in enumerate(found) if size]
                agree(self._ranks, widths, among=among)
        sizes = [size for size, _ in found]
        inputs = dataclasses.replace(inputs, masks_rows=of_rows)
        with clock.stage("coordinate"):
            self.spare = placement.with_a_row(self._ranks, local, sizes)
        if local.size:
            return inputs
        # None of the lent rows, but their sizes.
        return dataclasses.replace(inputs, rows=rows.take(self.spare, slice(0, 0)))

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""
        return [sum(column) for column in zip(*self._ranks.say(*numbers), strict=True)]

    def forwards(self, run: Forward, some: Any, calls: int) -> Tensor | None:
        """Run some rows, in as many forwards as every rank; 0 rows run a spare one."""
        most = max(number for (number,) in self._ranks.say(calls))
        if most == 0:
            return None
        assert self.spare is not None
        first = rows.take(self.spare.batch, slice(0, 1))
        found = run(some) if calls else run(first, count=False)[:0]
        for _ in range(most - max(calls, 1)):
            run(first, count=False)
        return found

    def gate(self, inputs: Inputs, clock: StageClock) -> BaseGate:
        """Return the gate that chooses among the units of all ranks."""
        assert inputs.gate is not None
        self._gate = GlobalGate(
            inputs.gate,
            inputs.rows.batch,
            self._ranks,
            clock,
            exact_units=inputs.options.exact_units,
        )
        return self._gate

    def count(self, chosen: Selection, screened: Screened | None, clock: StageClock) -> Counts:
        """Add up what the ranks screened, saw and kept; make sure that they chose the same."""
        own = own_counts(chosen, screened)
        decided = (0, 0, 0)
        if self._gate is not None:
            decided = (_to_word(own.price), self._gate.num_kept, self._gate.digest)
        with clock.stage("wait"):
            numbers = (int(number) for number in own[:_SUMMED])
            sums_to_watch = (_to_word(getattr(own, name)) for name in _WATCHED)
            told = self._ranks.say(*numbers, *decided, *sums_to_watch)
        end = -len(_WATCHED)
        if any(theirs[_SUMMED:end] != told[0][_SUMMED:end] for theirs in told):
            prices = [_to_float(theirs[_SUMMED]) for theirs in told]
            raise RuntimeError(
                f"gate decided differently on different ranks: prices {prices}; it must depend on "
                f"nothing but the values, the mask and the generator it is given."
            )
        self._kept_rows = [theirs[5] for theirs in told]
        counted = zip(*(each[:_SUMMED] for each in told), strict=True)
        watched = zip(*(map(_to_float, each[end:]) for each in told), strict=True)
        names = (*Counts._fields[:_SUMMED], *_WATCHED)
        added: dict[str, Any] = dict(zip(names, map(sum, (*counted, *watched)), strict=True))
        total = own._replace(**added)
        return total if self._gate is not None else total._replace(rate=float(total.units > 0))

    def train(
        self, inputs: Inputs, chosen: Selection, counts: Counts, clock: StageClock
    ) -> Trained:
        """Share the kept rows among the ranks, and differentiate them in step."""
        if counts.units_kept:
            with clock.stage("coordinate"):
                placed = placement.place(self._ranks, inputs, chosen, self._kept_rows)
                micros, own, calls = placement.planned(self._ranks, inputs, placed)
            assert self._gradients is not None
            assert self.spare is not None
            fill = partial(placement.filler, inputs, self.spare, chosen)
            in_step = placement.in_step(micros, calls, fill, self._gradients)
            self._done = self._train(inputs, chosen, counts, in_step, placed, clock)._replace(
                rank_fillers=calls - own
            )
        else:
            self._exchange_held(inputs, chosen, clock)
        done = self._done
        return Trained(
            lambda: (done.tokens_trained, done.loss), done.rows_trained, done.calls, done.elements
        )

    def _train(
        self,
        inputs: Inputs,
        chosen: Selection,
        counts: Counts,
        micros: Generator[MicroBatch],
        placed: Placed,
        clock: StageClock,
    ) -> _Done:
        """Differentiate the micro-batches in step with all ranks, and add up what was done."""
        ranks, gradients = self._ranks, self._gradients
        assert gradients is not None
        scale, divide = gradients.scale, denominator(inputs, chosen, counts)
        with gradients.step(clock):
            with contextlib.closing(micros):
                counted = Counted(micros)
                done = self._differentiate(
                    inputs,
                    timed(counted, clock),
                    (lambda lp: divide(lp) / scale) if callable(divide) else divide / scale,
                    clock,
                    finite_check(inputs, chosen, moved=True),
                )
            own_elements = done.elements if chosen.whole else 0
            tokens, scaled = counted.read(done.loss, own_elements)
            own_loss = scaled / gradients.scale
            with clock.stage("wait"):
                told = ranks.say(counted.rows, tokens, _to_word(own_loss), own_elements)
        num_rows, num_tokens, losses, elements = zip(*told, strict=True)
        return _Done(
            loss=sum(_to_float(theirs) for theirs in losses),
            rows_trained=sum(num_rows),
            tokens_trained=sum(num_tokens),
            calls=counted.calls,
            elements=sum(elements),
            rank_loss=own_loss,
            rank_rows_trained=counted.rows,
            rank_tokens_trained=tokens,
            rank_fillers=0,
            rows_moved=placed.rows_moved,
            bytes_moved=placed.bytes_moved,
        )

    def _exchange_held(self, inputs: Inputs, chosen: Selection, clock: StageClock) -> None:
        """Run a filler on all ranks if earlier calls left gradients that wait for an exchange."""
        gradients = self._gradients
        assert gradients is not None
        assert self.spare is not None
        if not any(owed for (owed,) in self._ranks.say(int(gradients.owes_exchange()))):
            return
        fill = partial(placement.filler, inputs, self.spare, chosen)
        with contextlib.closing(placement.in_step(iter(()), 1, fill, gradients)) as micros:
            self._differentiate(inputs, micros, 1.0, clock, None)
        self._done = _NOTHING._replace(calls=1, rank_fillers=1)

    def _differentiate(
        self,
        inputs: Inputs,
        micros: Iterable[MicroBatch],
        divide: Denominator,
        clock: StageClock,
        check: FiniteCheck | None,
    ) -> Differentiated:
        """Differentiate in step: nobody waits in a backward for one whose forward failed."""

        def agreed_backward(gated: Tensor) -> None:
            with clock.stage("wait"):
                self._ranks.say()
            inputs.options.backward_fn(gated)

        return differentiate(
            inputs.policy.log_prob,
            micros,
            loss=inputs.loss,
            denominator=divide,
            backward_fn=agreed_backward,
            clock=clock,
            check=check,
        )

    def report(
        self,
        inputs: Inputs,
        chosen: Selection,
        screened: Screened | None,
        counts: Counts,
        trained: Trained,
        clock: StageClock,
    ) -> Report:
        """Say what all ranks did, and what this one did."""
        done = self._done._asdict()
        late = Late(done.pop("loss"), done.pop("tokens_trained"), clock.seconds())
        # Without a mask per token rows were counted, all of one length.
        elements = done.pop("elements")
        each = elements // max(1, trained.rows_trained) if chosen.whole else 1
        seen = chosen if self._gate is None else self._gate.of_all_ranks(chosen)
        known = None if self._gate is not None and self._gate.gathered else screened
        return RankReport(
            **report_fields(counts, trained),
            ranks=self._ranks.size,
            rank_kept=chosen.counts.units_kept * each,
            **done,
            _late=lambda: late,
            _diagnose=partial(diagnose, inputs.gate, seen, known, counts, eta_of(inputs.gate)),
        )


def _to_word(value: float) -> int:
    """Return the bits of a float as an integer, which a message can carry exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _to_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
