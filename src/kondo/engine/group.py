"""Who makes a step together: this process alone, or the ranks of a group.

`kondo.backward` is written against `Group`. `LocalGroup` has nobody to agree with; the ranks' side
is `kondo.ranks.rank_group.RankGroup`, which exchanges what must be known between the stages.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from kondo.core.base_gate import BaseGate, Choice
from kondo.engine.dense import everything
from kondo.engine.differentiate import Trained, micro_batches_of, train
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.report import Report
from kondo.engine.screen import Forward, Screened
from kondo.engine.select import choose, kept_rows, units_of
from kondo.engine.selection import Counts, KeptRows, Selection
from kondo.engine.validate import check_shape
from kondo.stage_clock import STAGES, StageClock


class Judged(NamedTuple):
    """What diagnostics look at: values and choice, of all ranks where they came together."""

    values: Tensor
    mask: Tensor
    choice: Choice
    rows: Tensor | None
    """[N] bool, rows of known value; None for all."""


class Chosen(NamedTuple):
    """What was chosen of this process's rows, and how much of the rows of all."""

    kept: KeptRows
    own: Counts
    """Of this process."""
    counts: Counts
    """Of all ranks."""
    judged: Judged | None
    """None for a dense step."""
    kept_of: Sequence[int] = ()
    """Rows kept by every rank; of many ranks alone."""


@runtime_checkable
class Group(Protocol):
    """What a step asks of those who make it together."""

    rank: int
    """Of this process; the first one warns for all."""
    stages: tuple[str, ...]
    """Whose seconds a report has."""
    may_be_empty: bool
    """Whether this process may have 0 rows."""

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which an error of one is an error of all."""

    def agree(self, inputs: Inputs, clock: StageClock) -> Inputs:
        """Compare what all must have in common, and return the inputs to go on with."""

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""

    def forwards(self, run: Forward, some: Any, calls: int, spare: Rows | None) -> Tensor | None:
        """Run some rows, as many forwards as every rank; None where no rank has any."""

    def choose(self, inputs: Inputs, screened: Screened | None, clock: StageClock) -> Chosen:
        """Let one gate choose among the units of all; where `screened` is None, keep all."""

    def train(self, inputs: Inputs, chosen: Chosen, clock: StageClock) -> Trained:
        """Differentiate what was kept."""

    def report(self, fields: dict[str, Any], chosen: Chosen, trained: Trained) -> Report:
        """Return a report of these fields, with what only this kind of group has."""


class LocalGroup:
    """One process: what it has is all there is."""

    rank = 0
    stages: tuple[str, ...] = STAGES
    may_be_empty = False

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def agree(self, inputs: Inputs, clock: StageClock) -> Inputs:
        """Return the inputs."""
        return inputs

    def total(self, *numbers: int) -> list[int]:
        """Return the numbers."""
        return list(numbers)

    def forwards(self, run: Forward, some: Any, calls: int, spare: Rows | None) -> Tensor | None:
        """Run the rows."""
        return run(some)

    def choose(self, inputs: Inputs, screened: Screened | None, clock: StageClock) -> Chosen:
        """Let the gate choose, bound to the rows where it has to be."""
        gate = inputs.gate
        if gate is not None and (facts := gate.row_facts(inputs.rows.batch)) is not None:
            gate = gate.bind(facts)
        kept, own, selection = choose_rows(inputs, screened, gate)
        return Chosen(kept, own, own, judged_of(selection, screened))

    def train(self, inputs: Inputs, chosen: Chosen, clock: StageClock) -> Trained:
        """Compact the kept rows, and differentiate them."""
        rows = inputs.rows
        kept = micro_batches_of(inputs, rows.batch, rows.advantages, rows.loss_inputs, chosen.kept)
        return train(inputs, chosen.kept, chosen.counts, kept, clock)

    def report(self, fields: dict[str, Any], chosen: Chosen, trained: Trained) -> Report:
        """Return the report."""
        return Report(**fields)


def choose_rows(
    inputs: Inputs, screened: Screened | None, gate: BaseGate | None
) -> tuple[KeptRows, Counts, Selection | None]:
    """Return this process's kept rows, their number, and the selection; without a gate all rows."""
    rows = inputs.rows
    if screened is None or gate is None:
        known = inputs.policy.num_counted(rows.batch) if inputs.own_mask else None
        of_rows = inputs.unit != "sample" and rows.mask is not None and inputs.masks_rows
        kept, counts = everything(rows.size, rows.mask, inputs.device, known, of_rows=of_rows)
        return kept if inputs.own_mask else kept._replace(host_rows=None), counts, None
    log_probs = screened.log_probs
    check_shape(inputs.unit, log_probs)
    units = units_of(
        gate.signal,
        log_probs,
        rows.advantages,
        inputs.unit,
        rows.mask,
        density=screened.density,
    ).on_host(gate)
    selection = choose(units, gate, inputs.options.generator)
    kept = kept_rows(selection, log_probs.device)
    if not inputs.own_mask:  # what the policy knows of its rows is about its own mask
        kept = kept._replace(host_rows=None)
    return kept, screened.counts(selection.counts, kept.mask), selection


def judged_of(selection: Selection | None, screened: Screened | None) -> Judged | None:
    """Return what diagnostics look at in a selection of this process."""
    if selection is None or screened is None:
        return None
    return Judged(selection.values, selection.mask, selection.choice, screened.rows)


def group_of(group: Any) -> Group:
    """Return who makes a step together.

    Raises:
        ValueError: there are several processes, and the caller does not say which.
    """
    if group is None and (count := _num_processes()) > 1:
        raise ValueError(
            f"group must be given where torch.distributed has several processes, {count} here, got "
            f'None; give "world", or a process group, for one step of the rows of all its ranks, '
            f'and call on every rank. Give "local" for this process alone: a process that keeps '
            f"nothing then makes no backward, and others that exchange gradients wait for it."
        )
    if group is None or (isinstance(group, str) and group == "local"):
        return LocalGroup()
    if isinstance(group, Group):
        return group
    if not (group == "world" if isinstance(group, str) else _is_process_group(group)):
        raise ValueError(
            f'group must be "world", "local", a torch.distributed process group, a kondo.Group or '
            f"None, got {group!r}."
        )
    # Imported when a group is given: the layer of ranks stands above this one, and takes seconds.
    from kondo.ranks.rank_group import RankGroup

    return RankGroup(None if isinstance(group, str) else group)


def _is_process_group(group: Any) -> bool:
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def _num_processes() -> int:
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if ready else 1
