"""The gated step on one page:  screen -> select -> compact -> differentiate.

`kondo.backward` replaces `loss.backward()`: afterwards `.grad` holds the gradient of the gated
loss, and only the kept rows were ever differentiated.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kondo.core import losses
from kondo.engine.differentiate import Loss
from kondo.engine.inputs import Rows, prepare
from kondo.engine.modules import exclusively
from kondo.engine.options import Options
from kondo.engine.partial_screen import Screened, screen
from kondo.engine.peers import Alone
from kondo.engine.report import Report
from kondo.engine.select import Unit, everything, select
from kondo.engine.untraced import with_grad_mode_kept
from kondo.engine.watch import watch


def backward(
    policy: Any,
    batch: Any,
    advantages: Tensor,
    *,
    gate: Any = None,
    mask: Tensor | None = None,
    unit: Unit | None = None,
    screen: Any = None,
    loss: Loss = losses.pg,
    loss_inputs: dict[str, Tensor] | None = None,
    micro_batch: int | None = None,
    group: Any = None,
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
            `kondo.Choice`, which is shown delight. None is dense: what `loss.backward()` does,
            which checks nothing for NaN either; `report.loss` shows it.
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
    step = partial(
        _step,
        peers_of(group),
        policy,
        gate,
        Rows(batch, advantages, mask, {} if loss_inputs is None else loss_inputs, screen),
        unit=unit,
        loss=loss,
        micro_batch=micro_batch,
        options=options or Options(),
    )
    # A step changes training flags for a while, and adds to `.grad`: one at a time on a model.
    return exclusively(partial(with_grad_mode_kept, step), policy, screen)


def _step(peers: Alone, policy: Any, gate: Any, given: Rows, **settings: Any) -> Report:
    with peers.together():
        inputs = prepare(policy, gate, given, may_be_empty=peers.may_be_empty, **settings)
        clock = peers.clock(inputs.device)
        inputs = peers.agree(inputs, clock)
        screened: Screened | None = None
        if inputs.gate is None:
            given = inputs.rows
            known = inputs.policy.num_counted(given.batch) if inputs.own_mask else None
            of_rows = inputs.unit != "sample" and given.mask is not None and inputs.masks_rows
            chosen = everything(given.size, given.mask, inputs.device, known, of_rows=of_rows)
        else:
            with clock.stage("screen"):
                screened = screen(inputs, peers)
            with clock.stage("select"):
                chosen = select(
                    screened.log_probs,
                    inputs.rows.advantages,
                    gate=peers.gate(inputs, clock),
                    unit=inputs.unit,
                    mask=inputs.rows.mask,
                    generator=inputs.options.generator,
                    density=screened.density,
                )
        if not inputs.own_mask:  # what the policy knows of its rows is about its own mask
            chosen = chosen._replace(host_rows=None)
        counts = peers.count(chosen, screened, clock)
        if peers.first:
            watch(inputs.gate, counts, density=screened is not None and screened.density)
        trained = peers.train(inputs, chosen, counts, clock)
        return peers.report(inputs, chosen, screened, counts, trained, clock)


def peers_of(group: Any) -> Alone:
    """Return who makes a step together: this process alone, or the ranks of a group.

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
        return Alone()
    if isinstance(group, str) and group != "world":
        raise ValueError(
            f'group must be "world", "local", a torch.distributed process group or None, got '
            f"{group!r}."
        )
    # Imported when a group is given: the layer of ranks stands above this one, and takes seconds.
    from kondo.ranks.rank_peers import RankPeers

    return RankPeers(None if isinstance(group, str) else group)


def _num_processes() -> int:
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if ready else 1
