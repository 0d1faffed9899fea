"""What the step gives to a loss: its inputs, and which sequence each element belongs to."""

import functools
import math

import pytest
import torch

import kondo
import zoo
from kondo.engine.differentiate import MicroBatch, sequence_index
from no_reads import NoReads
from oracles import engine as oracle
from oracles.sequences import sequence_loss
from steps import run_step
from tolerances import assert_close

CAPPED = functools.partial(kondo.losses.sequence_is_pg, max_weight=1.5)


def problem():
    """A policy of [N, T] log-probs, and stale ones: some rows above the cap, some below."""
    net, log_prob, batch = zoo.build("lstm")
    draws = torch.Generator().manual_seed(1)
    advantages = torch.randn(zoo.N, dtype=torch.float64, generator=draws)
    mask = torch.rand((zoo.N, zoo.T), generator=draws) > 0.2
    mask[0] = True
    noise = torch.randn((zoo.N, zoo.T), dtype=torch.float64, generator=draws)
    return net, log_prob, batch, advantages, mask, log_prob(batch).detach() + 0.4 * noise


def assert_gradient(net, log_probs, advantages, behaviour, mask, keep):
    loss = sequence_loss(log_probs, advantages, behaviour, mask, 1.5, keep, mask.sum())
    for name, gradient in oracle.gradients(net, loss).items():
        found = dict(net.named_parameters())[name].grad
        assert_close(torch.zeros_like(gradient) if found is None else found, gradient)


def test_a_dense_step_without_a_mask_weighs_whole_rows():
    net, log_prob, batch, advantages, mask, behaviour = problem()
    everything = torch.ones_like(mask)
    inputs = {"behaviour_log_probs": behaviour}
    run_step(log_prob, batch, advantages, loss=CAPPED, loss_inputs=inputs, micro_batch=2)
    assert_gradient(net, log_prob(batch), advantages, behaviour, everything, everything)


def test_a_gate_by_chosen_rows_and_weights_multiplies_the_sequence_s_weight():
    net, log_prob, batch, advantages, mask, behaviour = problem()
    rows, weight = torch.arange(zoo.N) % 2 == 0, torch.linspace(1, 3, zoo.N).double()
    run_step(
        log_prob,
        batch,
        advantages,
        gate=kondo.Choice.of(rows)._replace(weight=weight),
        mask=mask,
        unit="sequence",
        loss=CAPPED,
        loss_inputs={"behaviour_log_probs": behaviour},
    )
    keep = rows[:, None] & mask
    assert_gradient(net, log_prob(batch), weight * advantages, behaviour, mask, keep)


def test_single_decisions_are_sequences_of_one():
    net, log_prob, batch = zoo.build("mlp")
    advantages = torch.linspace(-1, 1, zoo.N, dtype=torch.float64)
    inputs = {"behaviour_log_probs": log_prob(batch).detach() + advantages}
    found = []
    for loss in (kondo.losses.sequence_is_pg, functools.partial(kondo.losses.is_pg, max_weight=2)):
        net.zero_grad()
        run_step(log_prob, batch, advantages, loss=loss, loss_inputs=inputs)
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_a_loss_of_one_s_own_gets_the_index_if_it_says_that_it_needs_it():
    _, log_prob, batch, advantages, mask, _ = problem()
    seen = []

    def loss(log_probs, advantages, *, sequence_index):
        seen.append(sequence_index)
        return kondo.losses.pg(log_probs, advantages)

    loss.needs_sequence_index = True
    given = {"mask": mask, "unit": "sequence", "micro_batch": zoo.N - 1}
    run_step(log_prob, batch, advantages, loss=loss, **given)
    rows = torch.arange(zoo.N - 1)[:, None].expand(zoo.N - 1, zoo.T)
    assert torch.equal(seen[0], torch.where(mask[:-1], rows, -1))
    assert torch.equal(seen[1], torch.where(mask[-1:], 0, -1))
    bound = functools.partial(loss, sequence_index=None)  # the step gives it all the same
    run_step(log_prob, batch, advantages, loss=bound, **given)
    assert len(seen) == 4


class Weighed(torch.nn.Module):
    """A loss with an index of sequences, as a module."""

    needs_sequence_index = True

    def forward(self, log_probs, advantages, behaviour_log_probs, *, sequence_index=None):
        found = (log_probs, advantages, behaviour_log_probs)
        return CAPPED(*found, sequence_index=sequence_index)


def test_a_loss_that_is_a_module_is_asked_for_its_forward():
    net, log_prob, batch, advantages, mask, behaviour = problem()
    given = {"loss": Weighed(), "mask": mask, "unit": "sequence"}
    hidden = {"behaviour_log_probs": torch.where(mask, behaviour, math.nan)}
    run_step(log_prob, batch, advantages, loss_inputs=hidden, **given)
    assert_gradient(net, log_prob(batch), advantages, behaviour, mask, mask)
    with pytest.raises(ValueError, match=r"what Weighed.* takes .*'behaviour_log_probs'"):
        run_step(log_prob, batch, advantages, **given)


class Capped(Weighed):
    def forward(self, *args, cap=2.0, behaviour_log_probs=None, sequence_index=None):
        found = {"behaviour_log_probs": behaviour_log_probs, "sequence_index": sequence_index}
        return kondo.losses.sequence_is_pg(*args, max_weight=cap, **found)


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(Capped(), cap=1.5),
        torch.compile(Weighed(), backend="eager"),
        functools.partial(torch.compile(Capped(), backend="eager"), cap=1.5),
        torch.compile(CAPPED.func, backend="eager"),
        lambda log_probs, advantages, **others: CAPPED(log_probs, advantages, **others),
    ],
    ids=["bound module", "compiled module", "bound compiled module", "compiled", "wrapper"],
)
def test_a_loss_behind_a_wrapper_leaves_masked_tokens_out_of_the_product(loss):
    net, log_prob, batch, advantages, mask, behaviour = problem()
    if getattr(loss, "__name__", "") == "sequence_is_pg":
        loss = functools.partial(loss, max_weight=1.5)
    hidden = {"behaviour_log_probs": torch.where(mask, behaviour, math.nan)}
    run_step(
        *(log_prob, batch, advantages),
        loss=loss,
        loss_inputs=hidden,
        mask=mask,
        unit="sequence",
    )
    assert_gradient(net, log_prob(batch), advantages, behaviour, mask, mask)


def flat(batch, advantages, selection, *, loss_inputs, size, row_of=True):
    """All kept elements in one micro-batch, [K]."""
    row, column = selection.keep.nonzero().unbind(1)
    yield MicroBatch(
        rows=(batch[0], row, column),
        advantages=advantages[row],
        loss_inputs={name: value[row, column] for name, value in loss_inputs.items()},
        keep=None,
        weight=None,
        num_rows=len(row.unique()),
        num_tokens=len(row),
        row_of=row if row_of else None,
    )


def test_a_compaction_that_flattens_says_which_row_an_element_belongs_to():
    net, log_prob, batch, advantages, mask, behaviour = problem()
    keep = (torch.arange(zoo.N) >= zoo.N - 2)[:, None] & mask  # rows beyond the number of elements

    def flat_log_prob(rows):
        return log_prob([rows[0]])[rows[1], rows[2]] if isinstance(rows, tuple) else log_prob(rows)

    given = {
        "gate": kondo.Choice.of(keep.any(1)),
        "mask": mask,
        "unit": "sequence",
        "loss": CAPPED,
        "loss_inputs": {"behaviour_log_probs": behaviour},
    }
    run_step(flat_log_prob, batch, advantages, compact=flat, **given)
    assert_gradient(net, log_prob(batch), advantages, behaviour, mask, keep)
    untold = functools.partial(flat, row_of=False)
    with pytest.raises(ValueError, match=r"compact must say which row .* Set MicroBatch.row_of"):
        run_step(flat_log_prob, batch, advantages, compact=untold, **given)


def test_numbers_of_flat_elements_read_nothing_and_start_at_zero():
    rows = torch.tensor([7, 7, 2, 9, 9])
    micro = MicroBatch(None, rows, {}, None, None, 3, 5, row_of=rows)
    with NoReads():
        number = sequence_index(torch.zeros(5), micro, None)
    assert number.tolist() == [0, 0, 1, 2, 2]


def test_a_filler_has_a_row_of_its_own_though_it_counts_none():
    micro = MicroBatch(None, torch.zeros(1), {}, None, None, 0, 0, filler=True)
    keep = torch.zeros(1, 3, dtype=torch.bool)
    assert sequence_index(torch.zeros(1, 3), micro, keep).tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "token"}, r'unit must be "sequence" for partial\(sequence_is_pg.*got "token"'),
        ({"loss_inputs": {}}, r"loss_inputs must hold .*: missing .*'behaviour_log_probs'"),
        (
            {"loss_inputs": {"old_log_probs": torch.zeros(zoo.N, zoo.T)}},
            r"got \['old_log_probs'\]: .*loss_inputs=\{name: tensor\}",
        ),
        ({"loss": kondo.losses.ppo, "loss_inputs": {}}, r"ppo .*'old_log_probs'"),
        (
            {"loss_inputs": {"sequence_index": torch.zeros(zoo.N, zoo.T, dtype=torch.int64)}},
            "loss_inputs must not hold 'sequence_index'",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_forward(changes, message):
    _, _, batch, advantages, mask, behaviour = problem()

    def never(rows):
        raise AssertionError("a forward was made")

    given = {"loss": CAPPED, "loss_inputs": {"behaviour_log_probs": behaviour}, "mask": mask}
    given |= {"gate": kondo.Gate(rate=0.5), "unit": "sequence"} | changes
    with pytest.raises(ValueError, match=message):
        run_step(never, batch, advantages, **given)


def test_a_dense_step_of_tokens_is_fine():
    net, log_prob, batch, advantages, mask, behaviour = problem()
    inputs = {"behaviour_log_probs": behaviour}
    run_step(log_prob, batch, advantages, mask=mask, unit="token", loss=CAPPED, loss_inputs=inputs)
    assert_gradient(net, log_prob(batch), advantages, behaviour, mask, mask)
