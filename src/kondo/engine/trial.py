"""Run a policy on a few rows in several ways, for `kondo.check` to compare.

    as it is given      twice; with other random numbers
    without dropout     twice; with other rows beside these
    as it is screened   twice; in another order; half of the rows; one row alone
    gradients           of the masked dense loss; of the gated loss, which leaves rows out

Every rank makes the same number of forwards, whatever its policy answers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.core.base_gate import Choice
from kondo.engine.compact import MicroBatch
from kondo.engine.differentiate import gate_losses
from kondo.engine.finite import leaves_of
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.loss_arguments import takes_sequences
from kondo.engine.policy import evaluation
from kondo.engine.preserved import calm, reshard
from kondo.engine.screen import from_mode
from kondo.engine.selection import KeptRows

MOST_ROWS = 8
DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_SEED, _OTHER_SEED = 0, 1
_SAMPLED = 65_536
"""Numbers of one tensor that are compared."""
NAME_THEM = (
    "A plain function runs as it is, with dropout and batch norm of training: name its modules, "
    "options=kondo.Options(module=net), and they are in evaluation mode during a screen."
)


class Answers(NamedTuple):
    """Log-probs of a few rows, each [n] or [n, T] in the order of the rows."""

    given: Tensor
    """Of the policy as it is given, with a graph."""
    again: Tensor
    """Once more, with the same random numbers."""
    other_draws: Tensor
    """With other random numbers."""
    calm: Tensor
    """As given, but for its dropout layers, which are off."""
    calm_again: Tensor
    """Once more, with other random numbers."""
    beside_others: Tensor
    """Without dropout, with every second row replaced by the one before it."""
    screened: Tensor
    """In evaluation mode, without a graph; densities measured from the mode."""
    screened_again: Tensor
    """Once more, with other random numbers."""
    backwards: Tensor
    """In the opposite order, put back in order."""
    half: Tensor
    """Every second row, without the others."""
    alone: Tensor
    """The last row by itself."""


class Trial(NamedTuple):
    """What a policy answered, and what its forwards changed."""

    answers: Answers
    edited: list[str]
    """Fields of the rows that a forward wrote to, by path."""
    changed: list[str]
    """Parameters and buffers, of floats, that a forward of the policy as given changes, by name."""
    moved: list[str]
    """Those that a forward in evaluation mode changes, as a screen makes."""
    leaves: list[Tensor]
    """Leaves of the graph that two forwards had in common, so that neither made them."""


def few_rows(inputs: Inputs) -> tuple[Rows, Tensor]:
    """Return up to `MOST_ROWS` rows that count, short ones and long ones, and which they are.

    As many as one forward of a language model takes, also with every second row in place of the one
    after it: every rank then makes the same number.
    """
    given = inputs.rows
    counted = torch.ones(given.size, 1) if given.mask is None else given.mask
    lengths = (counted if counted.ndim == 1 else counted.sum(1)).cpu()
    useful = lengths.nonzero().squeeze(1)
    by_length = useful[lengths[useful].argsort(stable=True)]
    most = min(MOST_ROWS, len(by_length))
    draft = None if isinstance(given.screen, Tensor) else given.screen
    parts = given if draft is None else given._replace(screen=None)
    while True:
        places = torch.linspace(0, len(by_length) - 1, most).round().long()
        index = by_length[places].sort().values
        some = Rows(*rows.take(tuple(parts), index))
        tried = (some.batch, rows.take(some.batch, _beside(most)))
        if most <= 1 or all(inputs.policy.screen_calls(each, most, None) <= 1 for each in tried):
            break
        most //= 2
    # A row without an advantage has no gradient to compare.
    advantages = torch.where(some.advantages == 0, 1.0, some.advantages)
    screen = some.screen if draft is None else draft
    return some._replace(advantages=advantages, screen=screen), index


def _beside(size: int) -> Tensor:
    """Return the rows in which every second one is replaced by the one before it."""
    order = torch.arange(size)
    return order - order % 2


def try_policy(
    inputs: Inputs,
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    in_step: Callable[[], None],
) -> Trial:
    """Run the policy on a few rows, eleven times.

    Args:
        inputs: of the few rows.
        modules: of the policy, with their parts.
        devices: CUDA devices whose random numbers may be drawn; those of others are left alone.
        in_step: waits for all ranks after every forward.
    """
    policy, batch, size = inputs.policy, inputs.rows.batch, inputs.rows.size
    order = torch.arange(size)
    pick = partial(rows.take, batch)
    leaves: list[list[Tensor]] = []

    def given(what: str, rows_of: Any, seed: int = _SEED) -> Tensor:
        _seed(seed, devices)
        with torch.enable_grad():
            found = _log_probs(what, partial(inputs.log_prob, rows_of))
        if not found.requires_grad:
            raise ValueError(
                "log_prob(rows) must be differentiable, got a detached tensor; remove no_grad, "
                "inference_mode or detach from it, and check that some parameter requires grad."
            )
        if len(leaves) < 2:
            leaves.append(leaves_of(found))
        in_step()
        return found.detach()

    def screened(what: str, rows_of: Any, seed: int = _SEED) -> Tensor:
        _seed(seed, devices)

        def call() -> Any:
            return from_mode((policy.screen or inputs.log_prob)(rows_of), "screen(rows)")[0]

        with torch.no_grad(), evaluation(inputs.modules):
            found = _log_probs(what, call, "" if inputs.modules else NAME_THEM)
        in_step()
        return found

    before, contents = _state(modules), _contents(batch)
    as_given = (
        given("a few rows", batch),
        given("the same rows again", batch),
        given("the same rows again", batch, _OTHER_SEED),
    )
    with calm([module for module in modules if isinstance(module, DROPOUT)]):
        without_dropout = (
            given("a few rows", batch),
            given("the same rows again", batch, _OTHER_SEED),
            given("other rows beside these", pick(_beside(size))),
        )
    between = _state(modules)
    as_screened = (
        screened("a few rows without a graph", batch),
        screened("the same rows again", batch, _OTHER_SEED),
        screened("rows in another order", pick(order.flip(0))).flip(0),
        screened("half of the rows", pick(order[::2])),
        screened("one row alone", pick(order[-1:])),
    )
    return Trial(
        Answers(*as_given, *without_dropout, *as_screened),
        edited=changes(contents, _contents(batch)),
        changed=changes(before, between),
        moved=changes(between, _state(modules)),
        leaves=[leaf for leaf in leaves[0] if id(leaf) in {id(other) for other in leaves[1]}],
    )


def _seed(seed: int, devices: Sequence[torch.device]) -> None:
    """Seed the CPU and these CUDA devices; torch.manual_seed would seed every device there is."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _log_probs(what: str, call: Callable[[], Any], hint: str = "") -> Tensor:
    try:
        found = call()
    except Exception as error:
        error.add_note(f"It was called with {what}. {hint}".strip())
        raise
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim not in (1, 2):
        kind = type(found).__name__
        shape = f" of {found.dtype}, {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"log_prob(rows) must return a float tensor [n] or [n, T], the log-prob of each taken "
            f"action, got a {kind}{shape} for {what}; take the action's entry of log_softmax(...)."
        )
    return found


def _state(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return numbers of every parameter and buffer, by name; counts of calls alone are no state."""
    reshard(modules)
    floats = ((name, value) for name, value in named(modules) if value.is_floating_point())
    return {name: sample(value) for name, value in floats if value.device.type != "meta"}


def named(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of modules, each once, by their names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for module in modules:  # roots come before their parts, so full names come first
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(id(value), (name, value))
    return list(found.values())


def _contents(batch: Any) -> dict[str, Any]:
    """Return copies of the fields of a few rows, by path."""
    return {
        path: list(map(repr, leaf)) if rows.is_sequence(leaf) else leaf.clone()
        for path, leaf in rows.fields(batch, "batch")
    }


def samples(batch: Any) -> dict[str, Tensor]:
    """Return numbers of every tensor of a batch, by path."""
    return {
        path: torch.cat(list(map(sample, rows.leaves(leaf))))
        for path, leaf in rows.tensors(batch, "batch")
    }


def taken_otherwise(batch: Any, index: Tensor) -> list[str]:
    """Return the fields that are not what rows of them are when the rows of a batch are taken."""
    taken = dict(rows.fields(rows.take(batch, index), "batch"))
    plain = {path: rows.take(leaf, index) for path, leaf in rows.fields(batch, "batch")}
    return [path for path, leaf in plain.items() if not _same(taken.get(path), leaf)]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of values that are not what they were."""
    return [name for name, value in after.items() if not _same(before.get(name), value)]


def _same(one: Any, other: Any) -> bool:
    if rows.is_sequence(one) or rows.is_sequence(other):
        return bool(one == other)
    if one is None or one.shape != other.shape:
        return False
    alike = (one == other) | ((one != one) & (other != other))  # NaN equals NaN
    return bool(alike.all())


class Gradient(NamedTuple):
    """The gradient of one leaf of a graph."""

    leaf: Tensor
    numbers: Tensor
    """See `sample`."""


def gradients_of(loss: Tensor) -> dict[int, Gradient]:
    """Return the gradient of every leaf of the graph, by its identity; `.grad` is not touched."""
    leaves = leaves_of(loss)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = ((leaf, each) for leaf, each in zip(leaves, found, strict=True) if each is not None)
    return {id(leaf): Gradient(leaf, sample(each)) for leaf, each in pairs}


def summed(parts: Sequence[dict[int, Gradient]]) -> dict[int, Gradient]:
    """Return the sums over micro-batches."""
    total: dict[int, Gradient] = {}
    for part in parts:
        for key, (leaf, numbers) in part.items():
            known = total.get(key)
            total[key] = Gradient(leaf, numbers if known is None else known.numbers + numbers)
    return total


def dense_gradients(
    inputs: Inputs, chosen: KeptRows, in_step: Callable[[], None]
) -> dict[int, Gradient]:
    """Differentiate the masked loss of all rows: what is skipped has a factor of 0."""
    some, size = inputs.rows, inputs.rows.size
    kept = (chosen.keep, chosen.weight)
    micro = MicroBatch(some.batch, some.advantages, some.loss_inputs, *kept, size, size)
    log_probs = inputs.log_prob(some.batch)
    sequences = takes_sequences(inputs.loss)
    losses = gate_losses(log_probs, micro, inputs.loss, sequences=sequences).losses
    in_step()
    return gradients_of(losses.sum())


def every_other(values: Tensor, mask: Tensor, generator: torch.Generator | None = None) -> Choice:
    """Keep every second unit that counts, from the first on, with weights of 1 and 2 in turn.

    Of tokens, [N, T], those of every second row: whole rows are then left out.
    """
    place = mask.flatten().cumsum(0).view_as(mask)
    keep = mask & (place % 2 == 1)
    if mask.ndim == 2:
        keep[1::2] = False
    weight = torch.where(place % 4 == 1, 1.0, 2.0) * keep
    choice = Choice.of(keep.flatten(), mask.flatten()).reshape(mask.shape)
    return choice._replace(weight=weight.to(values.dtype))


def sample(values: Tensor) -> Tensor:
    """Return numbers of a tensor, evenly spaced: a float64 copy on the CPU, of this rank's part."""
    local: Any = values.detach()  # a DTensor, here or there
    local = local.to_local() if hasattr(local, "to_local") else local
    local = local.to_dense() if local.layout != torch.strided else local
    flat = local.reshape(-1)
    numbers: Tensor = flat[:: max(1, -(-flat.numel() // _SAMPLED))]
    return numbers.to("cpu", torch.float64, copy=True)
