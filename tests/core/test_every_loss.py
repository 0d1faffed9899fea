"""What holds for every loss: one suite, which a loss joins by an entry in `core.entries.LOSSES`."""

import functools
import inspect
import math

import pytest
import torch

import kondo
import zoo
from core.entries import LOSSES
from core.strategies import loss_batch as batch
from oracles import core as oracle
from oracles import engine
from steps import run_step
from tolerances import assert_close

NAN = math.nan

every_loss = pytest.mark.parametrize("name", LOSSES)


def some_mask():
    return torch.rand((7, 5), generator=torch.Generator().manual_seed(2)) < 0.7


def needs_index(name):
    call = LOSSES[name].call
    return getattr(getattr(call, "func", call), "needs_sequence_index", False)


def called(name, log_probs, advantages, old, mask=None):
    """Return the loss of a batch; `mask` says which elements belong to their row's sequence."""
    entry, further = LOSSES[name], {}
    if entry.other:
        further[entry.other] = old
    if mask is not None and needs_index(name):
        rows = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        further["sequence_index"] = torch.where(mask, rows, -1)
    return entry.call(log_probs, advantages, **further)


def test_every_loss_is_here():
    called = {getattr(entry.call, "func", entry.call) for entry in LOSSES.values()}
    losses = [name for name in kondo.losses.__all__ if not name.endswith("_weight")]
    assert called == {getattr(kondo.losses, name) for name in losses}


@every_loss
def test_value_and_gradient_against_the_oracle(name, device):
    log_probs, advantages, old = (part.to(device) for part in batch())
    mask = torch.ones(7, 5, dtype=torch.bool, device=device)
    expected, slope = LOSSES[name].oracle(log_probs, advantages, old, mask)
    log_probs.requires_grad_()
    actual = called(name, log_probs, advantages, old)
    assert actual.shape == log_probs.shape
    assert_close(actual, expected)
    # Elements weighed differently, so that a derivative leaking between them would show.
    weights = torch.linspace(1, 2, actual.numel(), dtype=torch.float64).reshape(actual.shape)
    (actual * weights.to(device)).sum().backward()
    assert_close(log_probs.grad, slope.to(device) * weights.to(device))


@every_loss
def test_only_log_probs_are_differentiated(name):
    log_probs, advantages, old = (part.requires_grad_() for part in batch())
    called(name, log_probs, advantages, old).sum().backward()
    assert log_probs.grad.abs().sum() > 0
    assert advantages.grad is None
    assert old.grad is None


@every_loss
def test_one_advantage_per_row_serves_every_token(name):
    log_probs, advantages, old = batch()
    rows = advantages[:, 0]
    whole = called(name, log_probs, rows.unsqueeze(1).expand_as(log_probs), old)
    assert_close(called(name, log_probs, rows, old), whole)


@every_loss
def test_permuting_and_splitting_rows_change_nothing(name):
    tensors = batch()
    whole = called(name, *tensors)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    assert_close(called(name, *(part[order] for part in tensors)), whole[order])
    parts = [called(name, *(part[rows] for part in tensors)) for rows in (slice(3), slice(3, 7))]
    assert_close(torch.cat(parts), whole)


@every_loss
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, half):
    log_probs, advantages, old = batch(half)
    truth, slope = LOSSES[name].oracle(log_probs, advantages, old, torch.ones(7, 5).bool())
    log_probs.requires_grad_()
    loss = called(name, log_probs, advantages, old)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert_close(loss, truth)
    assert log_probs.grad.dtype == half
    assert_close(log_probs.grad, slope)


@every_loss
@pytest.mark.parametrize("place", ["log_probs", "advantages", "old"])
def test_what_does_not_count_neither_leaks_nor_weighs(name, place):
    """The step writes 0 over elements that do not count; whole sequences must be told of them."""
    mask, tensors = some_mask(), dict(zip(("log_probs", "advantages", "old"), batch(), strict=True))
    expected, slope = LOSSES[name].oracle(*tensors.values(), mask)
    if needs_index(name):
        tensors[place] = torch.where(mask, tensors[place], NAN)
    log_probs = tensors["log_probs"].requires_grad_()
    loss = called(name, *tensors.values(), mask)
    torch.where(mask, loss, 0.0).sum().backward()
    assert_close(loss[mask], expected[mask])
    assert_close(log_probs.grad, torch.where(mask, slope, 0.0))
    if needs_index(name):
        assert not loss[~mask].any()


@every_loss
def test_it_says_whether_it_needs_to_know_sequences(name):
    call = LOSSES[name].call
    takes = "sequence_index" in inspect.signature(call).parameters
    assert needs_index(name) == takes
    single = batch(shape=(6,))
    if takes:
        with pytest.raises(ValueError, match="sequence_index must say which sequence"):
            called(name, *single)
    else:
        assert called(name, *single).shape == (6,)


@every_loss
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_step_has_the_gradient_of_the_masked_loss(name, rate, micro_batch):
    module, log_prob, rows = zoo.build("lstm")
    _, advantages, old = batch(shape=(zoo.N, zoo.T))
    advantages, mask = advantages[:, 0], some_mask()
    mask[0] = True
    found = log_prob(rows)
    keep = mask
    if rate is not None:
        keep = engine.element_keep(found, advantages, mask, "sequence", rate)
    wide = advantages[:, None].expand(old.shape)
    expected, slope = LOSSES[name].oracle(found, wide, old, mask)
    # What the mask hides must neither enter the loss nor, of a sequence, its weight.
    given = {LOSSES[name].other: torch.where(mask, old, NAN)} if LOSSES[name].other else {}
    report = run_step(
        log_prob,
        rows,
        advantages,
        gate=None if rate is None else kondo.Gate(rate=rate),
        mask=mask,
        unit="sequence",
        loss=functools.partial(LOSSES[name].call),
        loss_inputs=given,
        micro_batch=micro_batch,
    )
    assert_close(report.loss, torch.where(keep, expected, 0.0).sum() / mask.sum())
    masked = (found * torch.where(keep, slope, 0.0)).sum() / mask.sum()
    for key, gradient in engine.gradients(module, masked).items():
        assert_close(dict(module.named_parameters())[key].grad, gradient)


def test_the_oracle_of_units_is_that_of_the_papers():
    values, slopes = oracle.elementwise(oracle.pg, torch.tensor([-2.0]), torch.tensor([3.0]))
    assert (values.item(), slopes.item()) == (6.0, -3.0)
