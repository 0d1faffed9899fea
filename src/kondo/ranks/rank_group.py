"""A step of many ranks: what they exchange between the stages of `kondo.backward`.

    agree -> screen -> all values, one gate -> assign and move kept rows -> compact -> differentiate

Each rank brings rows of its own. Afterwards `.grad` holds what one process with all rows would put
there, and every rank has made the same number of calls.
"""

import contextlib
import dataclasses
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kondo import rows
from kondo.engine.compact import MicroBatch
from kondo.engine.differentiate import Trained, train
from kondo.engine.group import Chosen, Judged, choose_rows, judged_of
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.report import Report
from kondo.engine.screen import Forward, Screened
from kondo.engine.selection import Counts
from kondo.ranks import placement
from kondo.ranks.agreement import agree, describe
from kondo.ranks.communicator import Ranks
from kondo.ranks.global_gate import GlobalGate
from kondo.ranks.gradients import Gradients
from kondo.ranks.rank_report import RANK_STAGES, RankReport
from kondo.ranks.rebalance import structure
from kondo.stage_clock import StageClock

# Fields of `Counts` that are numbers of things, which are added up, and those that are sums of
# floats, which are too. Between them are price and rate, which ranks must have in common.
_SUMMED = Counts._fields.index("price")
_WATCHED = ("surprisal", "advantage", "abs_advantage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankInputs(Inputs):
    """The inputs of one of many ranks."""

    gradients: Gradients
    """How those of all ranks become one."""


class RankGroup:
    """The ranks of a process group, as one of them sees it.

    Args:
        group: a process group that holds this process; None for all processes.
    """

    stages: tuple[str, ...] = RANK_STAGES
    may_be_empty = True

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._ranks = Ranks(group)
        self.rank = self._ranks.rank

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Tell an error to all ranks, which then raise it too."""
        return self._ranks.together()

    def agree(self, inputs: Inputs, clock: StageClock) -> Inputs:
        """Compare what all must have in common; lend a row to ranks that have none."""
        options, local = inputs.options, inputs.rows
        gradients = Gradients(
            options.modules or inputs.modules,
            self._ranks,
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
        with clock.stage("coordinate"):
            spare = placement.with_a_row(self._ranks, local, sizes)
        # None of the lent rows, but their sizes.
        own = local if local.size else rows.take(spare, slice(0, 0))
        known = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        known |= {"rows": own, "spare": spare, "masks_rows": of_rows, "gradients": gradients}
        return RankInputs(**known)

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""
        return [sum(column) for column in zip(*self._ranks.say(*numbers), strict=True)]

    def forwards(self, run: Forward, some: Any, calls: int, spare: Rows | None) -> Tensor | None:
        """Run some rows, in as many forwards as every rank; 0 rows run a spare one."""
        most = max(number for (number,) in self._ranks.say(calls))
        if most == 0:
            return None
        assert spare is not None
        first = rows.take(spare.batch, slice(0, 1))
        found = run(some) if calls else run(first, count=False)[:0]
        for _ in range(most - max(calls, 1)):
            run(first, count=False)
        return found

    def choose(self, inputs: Inputs, screened: Screened | None, clock: StageClock) -> Chosen:
        """Let one gate choose among the units of all ranks; make sure that they chose the same."""
        gate = None
        if inputs.gate is not None:
            most = inputs.options.exact_units
            batch = inputs.rows.batch
            gate = GlobalGate(inputs.gate, batch, self._ranks, clock, exact_units=most)
        kept, own, selection = choose_rows(inputs, screened, gate)
        judged = judged_of(selection, screened)
        decided = (0, 0, 0)
        if gate is not None:
            decided = (_to_word(own.price), gate.num_kept, gate.digest)
            own_rows = None if gate.gathered or judged is None else judged.rows
            judged = Judged(*gate.all_units, own_rows)
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
        counted = zip(*(each[:_SUMMED] for each in told), strict=True)
        watched = zip(*(map(_to_float, each[end:]) for each in told), strict=True)
        names = (*Counts._fields[:_SUMMED], *_WATCHED)
        added: dict[str, Any] = dict(zip(names, map(sum, (*counted, *watched)), strict=True))
        total = own._replace(**added)
        if gate is None:
            total = total._replace(rate=float(total.units > 0))
        return Chosen(kept, own, total, judged, [theirs[5] for theirs in told])

    def train(self, inputs: Inputs, chosen: Chosen, clock: StageClock) -> Trained:
        """Share the kept rows among the ranks, and differentiate them in step."""
        assert isinstance(inputs, RankInputs)
        ranks, gradients = self._ranks, inputs.gradients
        micros: Iterator[MicroBatch] = iter(())
        own_calls, rows_moved, bytes_moved = 0, 0, 0
        if chosen.counts.units_kept:
            with clock.stage("coordinate"):
                placed = placement.place(ranks, inputs, chosen.kept, chosen.kept_of)
                micros, own_calls, calls = placement.planned(ranks, inputs, placed)
            rows_moved, bytes_moved = placed.rows_moved, placed.bytes_moved
        else:  # earlier calls may have left gradients that wait for an exchange
            calls = int(any(owed for (owed,) in ranks.say(int(gradients.owes_exchange()))))
        fill = partial(placement.filler, inputs, chosen.kept)
        trained = Trained(lambda: (0, 0.0), 0, 0, 0)
        own_tokens, own_loss, told = 0, 0.0, [[0, 0, _to_word(0.0), 0]]
        if calls:
            with gradients.step(clock):
                with contextlib.closing(placement.in_step(micros, calls, fill, gradients)) as steps:
                    trained = train(
                        inputs,
                        chosen.kept,
                        chosen.counts,
                        steps,
                        clock,
                        scale=gradients.scale,
                        moved=True,
                        backward_fn=partial(self._agreed_backward, inputs, clock),
                    )
                gradients.refuse_outside()
                own_tokens, scaled = trained.read()
                own_loss = scaled / gradients.scale
                with clock.stage("wait"):
                    told = ranks.say(
                        trained.rows_trained, own_tokens, _to_word(own_loss), trained.elements
                    )
        num_rows, num_tokens, losses, elements = zip(*told, strict=True)
        tokens, loss = sum(num_tokens), sum(map(_to_float, losses))
        own = {
            "rank_loss": own_loss,
            "rank_rows_trained": trained.rows_trained,
            "rank_tokens_trained": own_tokens,
            "rank_fillers": calls - own_calls,
            "rows_moved": rows_moved,
            "bytes_moved": bytes_moved,
        }
        return Trained(lambda: (tokens, loss), sum(num_rows), calls, sum(elements), own)

    def _agreed_backward(self, inputs: RankInputs, clock: StageClock, gated: Tensor) -> None:
        """Differentiate in step: nobody waits in a backward for one whose forward failed."""
        with clock.stage("wait"):
            self._ranks.say()
        inputs.gradients.note_leaves(gated)
        inputs.options.backward_fn(gated)

    def report(self, fields: dict[str, Any], chosen: Chosen, trained: Trained) -> Report:
        """Say what all ranks did, and what this one did."""
        # Without a mask per token rows were counted, all of one length.
        each = trained.elements // max(1, trained.rows_trained) if chosen.kept.whole else 1
        kept = chosen.own.units_kept * each
        return RankReport(**fields, ranks=self._ranks.size, rank_kept=kept, **trained.own)


def _to_word(value: float) -> int:
    """Return the bits of a float as an integer, which a message can carry exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _to_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
