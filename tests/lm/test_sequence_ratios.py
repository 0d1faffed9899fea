"""Losses of whole answers for language models: one weight per answer in any packing."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kondo
from kondo.lm import CausalLM
from lm import models
from oracles import causal
from oracles import engine as oracle
from oracles.sequences import delight_weights, sequence_loss, sequence_weights, weighted_loss
from steps import run_step
from tolerances import assert_close

CAPPED = functools.partial(kondo.losses.sequence_is_pg, max_weight=1.5)


@functools.cache
def problem(padding, seed):
    """A model, rows, advantages, and log-probs of an older policy, NaN where none was sampled."""
    model, rows = models.build(models.llama), models.rows(padding, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(rows.input_ids), dtype=torch.float64, generator=draws)
    with torch.no_grad():
        log_probs = causal.padded(model, *models.inside(rows))
    noise = torch.randn(log_probs.shape, dtype=torch.float64, generator=draws)
    behaviour = torch.where(rows.completion_mask, log_probs + 0.6 * noise, torch.nan)
    return model, rows, advantages, behaviour


def expected(model, rows, advantages, behaviour, mask, kept_rows):
    log_probs = causal.padded(model, *models.inside(rows))
    keep = kept_rows[:, None] & mask
    known = torch.where(mask, behaviour, 0.0)
    loss = sequence_loss(log_probs, advantages, known, mask, 1.5, keep, mask.sum())
    return oracle.gradients(model, loss), float(loss.detach())


def assert_step(problem, kept_rows, *, lm=None, mask=None, **given):
    model, rows, advantages, behaviour = problem
    counted = rows.completion_mask if mask is None else rows.completion_mask & mask
    wanted, loss = expected(model, rows, advantages, behaviour, counted, kept_rows)
    model.zero_grad()
    report = run_step(
        CausalLM(model, **(lm or {})),
        rows,
        advantages,
        gate=None if bool(kept_rows.all()) else kondo.Choice.of(kept_rows),
        mask=mask,
        loss=CAPPED,
        loss_inputs={"behaviour_log_probs": behaviour},
        **given,
    )
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name])
    assert_close(report.loss, loss)
    return report


def test_the_problem_has_weights_on_both_sides_of_the_cap():
    model, rows, _, behaviour = problem("left", 0)
    log_probs = causal.padded(model, *models.inside(rows))
    known = torch.where(rows.completion_mask, behaviour, 0.0)
    weights = sequence_weights(log_probs, known, rows.completion_mask, 1.5)
    assert 0 < int((weights == 1.5).sum()) < len(weights)


@settings(max_examples=30, deadline=None)
@given(
    padding=st.sampled_from(["left", "right", "none"]),
    attention=st.sampled_from(["varlen", "padded"]),
    max_tokens=st.sampled_from([1, 14, 25, 16_384]),
    micro_batch=st.sampled_from([None, 1, 2]),
    kept=st.integers(1, 2**6 - 1),
    seed=st.integers(0, 3),
)
def test_any_packing_has_the_weights_of_whole_answers(
    padding, attention, max_tokens, micro_batch, kept, seed
):
    made = problem(padding, seed)
    rows = torch.tensor([bool(kept >> row & 1) for row in range(len(made[2]))])
    lm = {"attention": attention, "max_tokens": max_tokens}
    assert_step(made, rows, lm=lm, micro_batch=micro_batch)


@pytest.mark.parametrize("max_tokens", [1, 25, 16_384])
@pytest.mark.parametrize("kept", [0b111111, 0b010110])
def test_any_packing_has_the_delight_of_whole_answers(max_tokens, kept):
    model, rows, advantages, _ = problem("left", 2)
    kept_rows = torch.tensor([bool(kept >> row & 1) for row in range(len(advantages))])
    mask = rows.completion_mask
    log_probs = causal.padded(model, *models.inside(rows))
    weights = delight_weights(log_probs, advantages, mask, 2.0).to(log_probs.dtype)
    keep = kept_rows[:, None] & mask
    loss = weighted_loss(log_probs, advantages, weights, keep, mask.sum())
    wanted = oracle.gradients(model, loss)
    model.zero_grad()
    run_step(
        CausalLM(model, max_tokens=max_tokens),
        rows,
        advantages,
        gate=None if bool(kept_rows.all()) else kondo.Choice.of(kept_rows),
        loss=functools.partial(kondo.losses.sequence_dg, eta=2.0),
    )
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name])


@pytest.mark.parametrize("padding", ["left", "none"])
def test_tokens_that_a_mask_leaves_out_are_not_in_the_product(padding):
    made = problem(padding, 1)
    narrower = torch.arange(made[1].input_ids.shape[1]) % 3 != 0
    mask = narrower.expand(made[1].input_ids.shape)
    rows = torch.ones(len(made[2]), dtype=torch.bool)
    assert_step(made, rows, mask=mask)
    rows[::2] = False
    assert_step(made, rows, mask=mask, lm={"max_tokens": 14})


def test_a_gate_of_tokens_is_refused():
    model, rows, advantages, behaviour = problem("left", 0)
    inputs = {"behaviour_log_probs": behaviour}
    with pytest.raises(ValueError, match='unit must be "sequence" for partial'):
        run_step(
            CausalLM(model),
            rows,
            advantages,
            gate=kondo.Gate(rate=0.5),
            unit="token",
            loss=CAPPED,
            loss_inputs=inputs,
        )
