"""The gated step on one page:  prepare -> screen -> select -> compact -> differentiate.

`kondo.backward` replaces `loss.backward()`: afterwards `.grad` holds the gradient of the gated
loss, and only the kept rows were ever differentiated. It is written against `Group`: who makes a
step together. `LocalGroup` has nobody to agree with; the ranks' side is
`kondo.ranks.rank_group.RankGroup`, which exchanges what must be known between the stages.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kondo.core import losses
from kondo.core.adapters import adapter_of
from kondo.core.base_gate import AnyGate, Unit
from kondo.core.diagnostics import diagnostics
from kondo.core.unit_values import value_name
from kondo.engine.differentiate import Loss, Trained, micro_batches_of, train
from kondo.engine.inputs import Inputs, Rows, prepare
from kondo.engine.monitor import monitor
from kondo.engine.options import Options
from kondo.engine.policy import Policy
from kondo.engine.report import Late, Report
from kondo.engine.screen import Forward, Screened
from kondo.engine.screen import screen as screen_rows
from kondo.engine.select import Chosen, choose_rows
from kondo.stage_clock import STAGES, StageClock


def backward(
    policy: Policy | Callable[[Any], Tensor],
    batch: Any,
    advantages: Tensor,
    *,
    gate: AnyGate = None,
    mask: Tensor | None = None,
    unit: Unit | None = None,
    screen: Any = None,
    loss: Loss = losses.pg,
    loss_inputs: dict[str, Tensor] | None = None,
    micro_batch: int | None = None,
    group: "AnyGroup" = None,
    options: Options | None = None,
) -> Report:
    """Add to `.grad` the gradient of the gated loss, differentiating only what is kept.

    L = 1/D * sum over kept elements of  w * loss(log pi(a|s), U)

    with w the gate's weight and D the elements that count in the whole batch (see
    `kondo.Options.denominator`). The gradient equals that of the same loss computed on the whole
    batch and masked.

    Args:
        policy: rows -> [n] or [n, T] log-probs of the taken actions, differentiated with respect to
            whatever requires grad inside; a row's log-probs must not depend on other rows. Or a
            `kondo.DistributionPolicy`, for a batch (observations, actions). Or a
            `kondo.lm.CausalLM`, for a batch of `kondo.lm.TokenRows`: it brings mask and unit.
        batch: any nest (dict, list, tuple, dataclass, TensorDict) of tensors with N rows, and of
            lists or tuples of N other things, such as strings. All are gathered with the rows;
            constants, such as a number, are passed on.
        advantages: [N] or [N, T] float, not differentiated; centred only.
        gate: `kondo.Gate`, another `kondo.BaseGate`, or a callable (values, mask, generator) ->
            `kondo.Choice`, which is shown delight. Or a `kondo.Choice` that was made elsewhere;
            with a group it is of the units of all ranks, the same on each. None is dense: what
            `loss.backward()` does, which checks nothing for NaN either.
        mask: [N] or [N, T] bool, True means "counts".
        unit: what is gated: "sample" for [N]; "token" or "sequence" for [N, T]. By default
            "sample", and "sequence" for a language model.
        screen: where log-probs come from before the backward. None: a no-grad forward, and none
            where the gate's signal does not read log-probs and the number of tokens of a row is
            known. A tensor [N] or [N, T]: log-probs that already exist, such as the rollout's. A
            callable: a draft to call instead of the policy. For densities (continuous actions) a
            pair of tensors (log_probs, mode_log_probs): the gate sees their difference. Without a
            forward, a NaN in a row that is not kept is not noticed.
        loss: (log_probs, advantages, **loss_inputs) -> one value per element; see `kondo.losses`.
            One with the attribute `needs_sequence_index = True`, such as
            `kondo.losses.sequence_is_pg`, is also given `sequence_index`, int64 like log_probs: the
            sequence of each element, -1 for elements that are not kept.
        loss_inputs: further tensors with N rows that the loss takes by name, e.g.
            {"old_log_probs": ...}; gathered with the rows, not differentiated. With a gate they
            must be finite in kept units.
        micro_batch: rows per forward/backward; all kept rows at once if None.
        group: a torch.distributed process group: `batch` is then this rank's rows, which may be
            none, and every rank calls. The gate chooses among the rows of all ranks, and gradient,
            kept set and price are those of one process with all rows, in the order of the ranks.
            "world" is all processes, "local" this one alone. Must be given where torch.distributed
            has several processes.
        options: what few people set: denominator, generator, chunks, ranks. See `kondo.Options`.

    Returns:
        A `Report`, with a group a `kondo.ranks.RankReport`. If nothing was kept `report.empty` is
        True, `.grad` is untouched, and the caller decides whether to step the optimiser.

    Raises:
        ValueError: an argument cannot be right, or differs between ranks; the message names it.
        kondo.ranks.RankError: another rank failed; the message is its own.

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
    together = group_of(group)
    with together.together():
        inputs = prepare(
            policy,
            gate,
            Rows(batch, advantages, mask, {} if loss_inputs is None else loss_inputs, screen),
            unit=unit,
            loss=loss,
            micro_batch=micro_batch,
            options=options,
            may_be_empty=together.may_be_empty,
        )
        clock = StageClock(inputs.device, together.stages)
        inputs = together.agree(inputs, clock)
        screened: Screened | None = None
        if inputs.gate is not None:
            with clock.stage("screen"):
                screened = screen_rows(inputs, together)
        with clock.stage("select"):
            chosen = together.choose(inputs, screened, clock)
        if together.rank == 0:
            density = screened is not None and screened.at_mode is not None
            monitor(inputs.gate, chosen.counts, density=density)
        trained = together.train(inputs, chosen, clock)
        return together.report(_fields(inputs, chosen, trained, clock), chosen, trained)


@runtime_checkable
class Group(Protocol):
    """What a step asks of those who make it together."""

    rank: int
    """Place of this process; the first one warns for all."""
    stages: tuple[str, ...]
    """Names of the stages whose seconds a report has."""
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


AnyGroup = Group | ProcessGroup | Literal["world", "local"] | None


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
        if gate is not None:
            known = adapter_of(gate)
            if (facts := known.row_facts(inputs.rows.batch)) is not None:
                gate = known.bind(facts)
        return choose_rows(inputs, screened, gate)

    def train(self, inputs: Inputs, chosen: Chosen, clock: StageClock) -> Trained:
        """Compact the kept rows, and differentiate them."""
        rows = inputs.rows
        made = micro_batches_of(inputs, rows.batch, rows.advantages, rows.loss_inputs, chosen.kept)
        return train(inputs, chosen.kept, chosen.counts, made, clock)

    def report(self, fields: dict[str, Any], chosen: Chosen, trained: Trained) -> Report:
        """Return the report."""
        return Report(**fields)


def group_of(group: Any) -> Group:
    """Return who makes a step together; refuse None where there are several processes."""
    ready = dist.is_available() and dist.is_initialized()
    if group is None and ready and (count := dist.get_world_size()) > 1:
        raise ValueError(
            f"group must be given where torch.distributed has several processes, {count} here, got "
            f'None; give "world", or a process group, on every rank for one step of all their '
            f'rows. "local" is this process alone: where it keeps nothing it makes no backward, '
            f"for which others that exchange gradients wait."
        )
    if group is None or (isinstance(group, str) and group == "local"):
        return LocalGroup()
    if isinstance(group, Group):
        return group
    named = isinstance(group, str) and group == "world"
    if not (named or (dist.is_available() and isinstance(group, dist.ProcessGroup))):
        raise ValueError(
            f'group must be "world", "local", a torch.distributed process group, a kondo.Group or '
            f"None, got {group!r}."
        )
    # Imported when a group is given: the layer of ranks stands above this one, and takes seconds.
    from kondo.ranks.rank_group import RankGroup

    return RankGroup(None if named else group)


def _fields(inputs: Inputs, chosen: Chosen, trained: Trained, clock: StageClock) -> dict[str, Any]:
    """Return the fields of a report: what all ranks saw and kept."""
    gate, counts, judged = inputs.gate, chosen.counts, chosen.judged
    eta = 1.0 if gate is None else adapter_of(gate).eta or 1.0  # a hard gate is judged at 1

    def late() -> Late:
        tokens, loss = trained.read()
        return Late(loss, tokens, clock.seconds())

    def diagnose() -> dict[str, float]:
        hidden = {"nan_count": float(counts.hidden_nan)}
        if gate is None or judged is None:
            return {"rate": counts.rate, "price": counts.price} | hidden
        mask = judged.mask
        if judged.rows is not None:
            known = judged.rows.to(mask.device)
            mask = mask & (known if mask.ndim == 1 else known.unsqueeze(1))
        name = value_name(gate.signal)
        numbers = diagnostics(judged.values, judged.choice, mask=mask, eta=eta, name=name)
        return numbers | {"entropy": counts.entropy} | hidden

    elements = trained.elements  # where no mask had told them before
    return {
        "seen": elements or counts.units,
        "kept": elements or counts.units_kept,
        "rate": counts.rate,
        "price": counts.price,
        "rows_seen": counts.rows,
        "rows_screened": counts.rows_screened,
        "tokens_seen": elements or counts.elements,
        "rows_trained": trained.rows_trained,
        "calls": trained.calls,
        "_late": late,
        "_diagnose": diagnose,
    }
