"""The gated step on one page:  screen -> select -> compact -> differentiate.

`kondo.backward` replaces `loss.backward()`: afterwards `.grad` holds the gradient of the gated
loss, and only the kept rows were ever differentiated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from kondo.core import losses
from kondo.core.base_gate import AnyGate, BaseGate, Unit, value_name
from kondo.core.diagnostics import diagnostics
from kondo.engine.differentiate import Loss, Trained
from kondo.engine.group import Chosen, Group, group_of
from kondo.engine.inputs import Inputs, Rows, prepare
from kondo.engine.monitor import monitor
from kondo.engine.options import Options
from kondo.engine.policy import Policy
from kondo.engine.report import Late, Report
from kondo.engine.screen import Screened
from kondo.engine.screen import screen as screen_rows
from kondo.stage_clock import StageClock

AnyGroup = Group | ProcessGroup | Literal["world", "local"] | None


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
    group: AnyGroup = None,
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
            `kondo.lm.CausalLM`, for a batch of `kondo.lm.TokenRows`: it brings mask and unit, cuts
            rows after their last kept token and packs them.
        batch: any nest (dict, list, tuple, dataclass, TensorDict) of tensors with N rows, and of
            lists or tuples of N other things, such as strings. All are gathered with the rows;
            constants, such as a number, are passed on.
        advantages: [N] or [N, T] float, not differentiated; centred only.
        gate: `kondo.Gate`, another `kondo.BaseGate`, or a callable (values, mask, generator) ->
            `kondo.Choice`, which is shown delight. Or a `kondo.Choice` that was made elsewhere;
            with a group it is of the units of all ranks, the same on each. None is dense: what
            `loss.backward()` does, which checks nothing for NaN either; `report.loss` shows it.
        mask: [N] or [N, T] bool, True means "counts".
        unit: what is gated: "sample" for [N]; "token" or "sequence" for [N, T]. By default
            "sample", and "sequence" for a language model.
        screen: where log-probs come from before the backward. None: a no-grad forward, and none
            where the gate's signal does not read log-probs and the number of tokens of a row is
            known. A tensor [N] or [N, T]: log-probs that already exist, such as the rollout's. A
            callable: a draft to call instead of the policy. For densities (continuous actions) a
            pair (log_probs, mode_log_probs), or a callable that returns one: the gate then sees
            log pi(a) - log pi(mode). Without a forward, a NaN in a row that is not kept is not
            noticed.
        loss: (log_probs, advantages, **loss_inputs) -> one value per element; see `kondo.losses`.
            One with a parameter `sequence_index`, such as `kondo.losses.sequence_is_pg`, also gets
            that: which row each element belongs to.
        loss_inputs: further tensors with N rows that the loss takes by name, e.g.
            {"old_log_probs": ...}; gathered with the rows, not differentiated. With a gate they
            must be finite in kept units.
        micro_batch: rows per forward/backward; all kept rows at once if None.
        group: a torch.distributed process group: `batch` is then this rank's rows, which may be
            none, and every rank calls. The gate chooses among the rows of all ranks, and gradient,
            kept set and price are those of one process with all rows, in the order of the ranks.
            "world" is all processes; torch's own group.WORLD is None before it is initialised.
            "local" is this process alone. Must be given where torch.distributed has several
            processes.
        options: what few people set: denominator, generator, chunks, ranks. See `kondo.Options`.

    Returns:
        A `Report`, with a group a `kondo.ranks.RankReport`. If nothing was kept `report.empty` is
        True, `.grad` is untouched, and the caller decides whether to step the optimiser.

    Raises:
        ValueError: for every argument that cannot be right, naming it, or that differs between
            ranks.
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
            monitor(inputs.gate, chosen.counts, density=screened is not None and screened.density)
        trained = together.train(inputs, chosen, clock)
        return together.report(_fields(inputs, chosen, trained, clock), chosen, trained)


def _fields(inputs: Inputs, chosen: Chosen, trained: Trained, clock: StageClock) -> dict[str, Any]:
    """Return the fields of a report: what all ranks saw and kept."""
    counts, dense_elements = chosen.counts, trained.elements  # where no mask had told them before
    return {
        "seen": dense_elements or counts.units,
        "kept": dense_elements or counts.units_kept,
        "rate": counts.rate,
        "price": counts.price,
        "rows_seen": counts.rows,
        "rows_screened": counts.rows_screened,
        "tokens_seen": dense_elements or counts.elements,
        "rows_trained": trained.rows_trained,
        "calls": trained.calls,
        "_late": partial(_late, trained, clock),
        "_diagnose": partial(_diagnose, inputs.gate, chosen, _eta(inputs.gate)),
    }


def _late(trained: Trained, clock: StageClock) -> Late:
    tokens, loss = trained.read()
    return Late(loss, tokens, clock.seconds())


def _eta(gate: BaseGate | None) -> float:
    """Return the gate's temperature of this step, at which diagnostics judge it; a hard one's is 1.

    A running scale moves on with the next step.
    """
    return 1.0 if gate is None else gate.eta or 1.0


def _diagnose(gate: BaseGate | None, chosen: Chosen, eta: float) -> dict[str, float]:
    """Judge the gate at its own temperature; a hard one at 1. Count the NaN the mask hid."""
    counts, judged = chosen.counts, chosen.judged
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
