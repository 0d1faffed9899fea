"""A step of many ranks: what they exchange between the stages of `kondo.backward`.

    agree -> screen -> all values, one gate -> assign and move kept rows -> compact -> differentiate

Each rank brings rows of its own. Afterwards `.grad` holds what one process with all rows would put
there, and every rank has made the same number of calls.
"""

import contextlib
import dataclasses
import math
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kondo import rows
from kondo.core.fingerprint import in_words
from kondo.engine.differentiate import MicroBatch, Trained, micro_batches_of, train
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.report import Report
from kondo.engine.screen import Forward, Screened
from kondo.engine.select import Chosen, Judged, choose_rows
from kondo.engine.selection import Counts, KeptRows
from kondo.ranks.communicator import Ranks
from kondo.ranks.global_gate import GlobalGate
from kondo.ranks.gradients import Gradients
from kondo.ranks.rebalance import deal, move, structure
from kondo.stage_clock import STAGES, StageClock

RANK_STAGES = (*STAGES, "coordinate", "wait", "reduce")

# Fields of `Counts` that are numbers of things, which are added up, and those that are sums of
# floats, which are too. Between them are price and rate, which ranks must have in common.
_SUMMED = Counts._fields.index("price")
_WATCHED = ("surprisal", "advantage", "abs_advantage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport(Report):
    """The outcome of `kondo.backward(..., group=...)` on one rank.

    What `kondo.Report` has is that of all ranks together, as one process with all rows would report
    it, and the same on every rank; but `calls`, which every rank makes alike, and `seconds`, this
    rank's own. Beside the engine's stages these are: "coordinate" (gathering values, assigning and
    moving rows), "wait" (agreeing, which includes waiting for slower ranks) and "reduce" (our own
    sum of gradients).
    """

    ranks: int
    """Ranks of the group."""
    rank_kept: int
    """Units kept among this rank's own, wherever they were trained."""
    rank_rows_trained: int
    """Rows this rank trained, wherever they came from."""
    rank_tokens_trained: int
    """Tokens this rank trained; see `tokens_trained`."""
    rank_loss: float
    """This rank's part of the loss; the parts add up to `loss`."""
    rank_fillers: int
    """Calls of this rank with a row of weight zero, made only to keep step."""
    rows_moved: int
    """Rows trained on another rank than their own."""
    bytes_moved: int
    """Bytes of those rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankInputs(Inputs):
    """The inputs of one of many ranks."""

    gradients: Gradients
    """How those of all ranks become one."""


class _Share(NamedTuple):
    """What this rank trains of the kept rows of all."""

    micro_batches: Iterator[MicroBatch]
    calls: Sequence[int]
    """Micro-batches of every rank."""
    rows_moved: int
    """Rows that changed rank, over all ranks."""
    bytes_moved: int
    """Bytes of those rows, over all ranks."""


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

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""
        return self._ranks.total(*numbers)

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
        told = {name: _describe(value) for name, value in alike.items()}
        told["screen"] = "a callable" if callable(local.screen) else _describe(local.screen)
        told["screen, of densities or not,"] = str(inputs.density)
        for name, part in local._asdict().items():
            told |= structure(part, name)
        # Where every element of a row counts, rows that move must not be filled up.
        shapes = [list(part.shape[1:]) for part in rows.leaves(local.batch)]
        widths = {"batch, beside its rows (or give a mask per token),": str(shapes)}
        if inputs.gate is None and local.mask is None:
            told |= widths
        with clock.stage("wait"):
            found = self._ranks.agree(told, local.size, inputs.masks_rows)
            # One column beside wider masks of other ranks is the one token of these rows.
            of_rows = all(one_per_row for size, one_per_row in found if size)
            if inputs.gate is None and inputs.unit != "sample" and of_rows:
                among = [rank for rank, (size, _) in enumerate(found) if size]
                self._ranks.agree(widths, among=among)
        with clock.stage("coordinate"):
            spare = self._with_a_row(local, [size for size, _ in found])
        # None of the lent rows, but their sizes.
        own = local if local.size else rows.take(spare, slice(0, 0))
        known = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        known |= {"rows": own, "spare": spare, "masks_rows": of_rows, "gradients": gradients}
        return RankInputs(**known)

    def _with_a_row(self, local: Rows, sizes: Sequence[int]) -> Rows:
        """Return the local rows, or a copy of another rank's first one where there are none.

        Ranks without rows need one to run, wherever a forward is a collective: under FSDP2, and
        under DDP with buffers.
        """
        if all(sizes):
            return local
        if not any(sizes):
            raise ValueError(
                "batch must not be empty on all ranks, got 0 rows; skip the step instead."
            )
        lender = next(rank for rank, size in enumerate(sizes) if size)
        empty = torch.tensor([rank for rank, size in enumerate(sizes) if not size])
        nothing = torch.zeros(0, dtype=torch.int64)
        lent = rows.take(local, torch.zeros_like(empty) if self.rank == lender else nothing)
        targets = [empty if rank == lender else nothing for rank in range(len(sizes))]
        moved = move(self._ranks, lent, targets)
        return local if local.size else Rows(*moved.nest)

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
        kept, own, _, judged, _ = choose_rows(inputs, screened, gate)
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
        rows_kept = Counts._fields.index("rows_kept")
        return Chosen(kept, own, total, judged, [theirs[rows_kept] for theirs in told])

    def train(self, inputs: Inputs, chosen: Chosen, clock: StageClock) -> Trained:
        """Share the kept rows among the ranks, and differentiate them in step."""
        assert isinstance(inputs, RankInputs)
        ranks, gradients, kept = self._ranks, inputs.gradients, chosen.kept
        if chosen.counts.units_kept:
            with clock.stage("coordinate"):
                share = self._share(inputs, kept, chosen.kept_of)
            calls, own_calls = max(share.calls), share.calls[self.rank]
        else:  # earlier calls may have left gradients that wait for an exchange
            calls = int(any(owed for (owed,) in ranks.say(int(gradients.owes_exchange()))))
            share, own_calls = _Share(iter(()), (), 0, 0), 0

        def in_step() -> Generator[MicroBatch]:
            """Yield as many micro-batches as every rank, each while its gradients are held."""
            for number in range(calls):
                micro = next(share.micro_batches, None)
                with gradients.call(last=number == calls - 1):
                    yield _filler(inputs, kept) if micro is None else micro

        def backward(gated: Tensor) -> None:
            """Differentiate in step: nobody waits in one for a rank whose forward failed."""
            with clock.stage("wait"):
                ranks.say()
            gradients.note_leaves(gated)
            inputs.options.backward_fn(gated)

        own_rows, own_tokens, own_loss, told = 0, 0, 0.0, [[0, 0, _to_word(0.0), 0]]
        if calls:
            with gradients.step(clock):
                with contextlib.closing(in_step()) as steps:
                    trained = train(
                        inputs,
                        kept,
                        chosen.counts,
                        steps,
                        clock,
                        scale=gradients.scale,
                        moved=True,
                        backward_fn=backward,
                    )
                gradients.refuse_outside()
                own_tokens, scaled = trained.read()
                own_rows, own_loss = trained.rows_trained, scaled / gradients.scale
                with clock.stage("wait"):
                    told = ranks.say(own_rows, own_tokens, _to_word(own_loss), trained.elements)
        num_rows, num_tokens, losses, elements = zip(*told, strict=True)
        tokens, loss = sum(num_tokens), sum(map(_to_float, losses))
        own = {
            "rank_loss": own_loss,
            "rank_rows_trained": own_rows,
            "rank_tokens_trained": own_tokens,
            "rank_fillers": calls - own_calls,
            "rows_moved": share.rows_moved,
            "bytes_moved": share.bytes_moved,
        }
        return Trained(lambda: (tokens, loss), sum(num_rows), calls, sum(elements), own)

    def _share(self, inputs: Inputs, kept: KeptRows, kept_of: Sequence[int]) -> _Share:
        """Give every rank kept rows of about the same cost; return what this one trains."""
        ranks, local = self._ranks, inputs.rows
        batch, advantages, loss_inputs = local.batch, local.advantages, local.loss_inputs
        rows_of, rows_moved, bytes_moved = list(kept_of), 0, 0
        if inputs.options.rebalance:
            targets = deal(ranks.gather(inputs.policy.row_costs(local.batch, kept), kept_of))
            rows_moved = sum(int((own != rank).sum()) for rank, own in enumerate(targets))
        if rows_moved:
            every = torch.cat(targets)
            rows_of = [int((every == rank).sum()) for rank in range(ranks.size)]
            going = (batch, advantages, loss_inputs, kept.mask, kept.weight, kept.keep)
            moved = move(ranks, rows.take(going, kept.rows), targets)
            batch, advantages, loss_inputs, mask, weight, keep = moved.nest
            bytes_moved = moved.num_bytes
            everything = torch.arange(moved.num_rows, device=keep.device)
            # What the host knew of the rows is about those before the move.
            here = {"mask": mask, "weight": weight, "keep": keep, "rows": everything}
            kept = kept._replace(**here, host_rows=None)
        made = micro_batches_of(inputs, batch, advantages, loss_inputs, kept)
        if inputs.options.compact is None and inputs.policy.plain:
            size = inputs.micro_batch
            calls = [math.ceil(n / (size or n)) if n else 0 for n in rows_of]
        else:
            made = list(made)  # all of them now: only then is their number known
            calls = [number for (number,) in ranks.say(len(made))]
        return _Share(iter(made), calls, rows_moved, bytes_moved)

    def report(self, fields: dict[str, Any], chosen: Chosen, trained: Trained) -> Report:
        """Say what all ranks did, and what this one did."""
        # Without a mask per token rows were counted, all of one length.
        each = trained.elements // max(1, trained.rows_trained) if chosen.kept.whole else 1
        kept = chosen.own.units_kept * each
        return RankReport(**fields, ranks=self._ranks.size, rank_kept=kept, **trained.own)


def _filler(inputs: Inputs, kept: KeptRows) -> MicroBatch:
    """Return a micro-batch of one row of which nothing is kept: its gradient is exactly zero.

    Args:
        inputs: this rank's.
        kept: what was kept of this rank's rows; for its shapes.
    """
    spare = inputs.spare
    assert spare is not None
    policy, compact = inputs.policy, inputs.options.compact
    row = policy.cheapest_row(spare.batch)
    batch, advantages, loss_inputs = rows.take(
        (spare.batch, spare.advantages, spare.loss_inputs), slice(row, row + 1)
    )
    if compact is None and policy.plain:
        return MicroBatch(batch, advantages, loss_inputs, None, None, 0, 0, filler=True)
    # A compaction lays out kept elements: it is shown one, which is then not kept after all.
    width = kept.keep.shape[1:]
    shape = width if spare.mask is None or spare.mask.ndim == 1 else spare.mask.shape[1:]
    nothing = torch.zeros(1, *shape, dtype=torch.bool, device=kept.keep.device)
    one = policy.one_element(batch, nothing)
    only = torch.zeros(1, dtype=torch.int64, device=one.device)
    this = kept._replace(mask=one, weight=None, keep=one, rows=only, host_rows=None)
    (micro,) = (compact or policy.compact)(batch, advantages, this, loss_inputs=loss_inputs, size=1)
    return micro._replace(keep=None, weight=None, num_rows=0, num_tokens=0, filler=True)


def _describe(value: Any) -> str:
    """Say what an option or a field is; of rows the kind alone, since ranks have their own."""
    if isinstance(value, Tensor):
        return f"a {value.ndim}-d tensor of {value.dtype}"
    return in_words(value)


def _to_word(value: float) -> int:
    """Return the bits of a float as an integer, which a message can carry exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _to_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
