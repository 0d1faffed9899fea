"""`kondo.backward`: the gradient of the dense gated loss, from the kept tokens alone."""

import contextlib
import copy
import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kondo
import kondo.lm
from kondo.lm import CausalLM, TokenLogProb
from lm import models
from oracles import causal
from oracles import engine as oracle
from oracles.variance import best_sets
from steps import run_step
from tolerances import assert_close

RATES = [1.0, 0.5, 0.2]


def advantages_for(rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows.input_ids.shape[0], dtype=torch.float64, generator=generator)


def dense(model, rows, advantages, unit, rate, temperature=1.0, position_ids=None):
    """Gradients, loss and kept tokens of the dense gated loss: all logits, all tokens, masked."""
    log_probs = causal.padded(
        model, *models.inside(rows), temperature=temperature, position_ids=position_ids
    )
    mask = rows.completion_mask
    keep = oracle.element_keep(log_probs, advantages, mask, unit, rate)
    loss = oracle.dense_gated_loss(log_probs, advantages, keep, mask.sum())
    return oracle.gradients(model, loss), float(loss.detach()), keep


def assert_grads(model, expected):
    for name, grad in models.grads(model).items():
        assert_close(grad, expected[name])


@pytest.mark.parametrize("max_tokens", [16_384, 14])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("attention", ["varlen", "padded"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("make", [models.llama, models.gpt2])
def test_equals_the_dense_gated_gradient(make, padding, attention, unit, rate, max_tokens):
    model, rows = models.build(make), models.rows(padding)
    advantages = advantages_for(rows)
    expected, loss, keep = dense(model, rows, advantages, unit, rate, temperature=0.8)
    lm = CausalLM(model, attention=attention, max_tokens=max_tokens, temperature=0.8)
    report = run_step(lm, rows, advantages, gate=kondo.Gate(rate=rate), unit=unit)
    assert_grads(model, expected)
    assert_close(report.loss, loss)
    assert report.rows_trained == int(keep.any(1).sum())
    assert report.tokens_seen == int(rows.completion_mask.sum())
    assert (report.calls > 1) == (max_tokens == 14 and report.tokens_trained > 14)


@pytest.mark.parametrize("rate", [None, 0.5])
def test_rows_whose_memory_numpy_rewrites_are_those_of_now(rate):
    """A rollout buffer is filled anew; torch counts no write of NumPy."""
    model, rows = models.build(models.llama), models.rows("right", seed=1)
    lm, advantages = CausalLM(model), advantages_for(rows)
    given = {} if rate is None else {"gate": kondo.Gate(rate=rate)}
    run_step(lm, rows, advantages, **given)
    model.zero_grad()
    fresh = models.rows("left", seed=2)
    for name in ("input_ids", "attention_mask", "completion_mask"):
        getattr(rows, name).numpy()[:] = getattr(fresh, name).numpy()
    expected, loss, _ = dense(model, fresh, advantages, "sequence", rate or 1.0)
    report = run_step(lm, rows, advantages, **given)
    assert_grads(model, expected)
    assert_close(report.loss, loss)


@pytest.mark.parametrize("max_tokens", [16_384, 25])
@pytest.mark.parametrize("attention", ["varlen", "padded"])
@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("make", [models.llama, models.gpt2])
def test_no_gate_is_the_dense_gradient(make, padding, attention, max_tokens):
    model, rows = models.build(make), models.rows(padding, seed=3)
    advantages = advantages_for(rows)
    log_probs = causal.padded(model, *models.inside(rows))
    mask = rows.completion_mask
    loss = oracle.dense_gated_loss(log_probs, advantages, mask, mask.sum())
    expected = oracle.gradients(model, loss)
    report = run_step(CausalLM(model, attention=attention, max_tokens=max_tokens), rows, advantages)
    assert_grads(model, expected)
    assert_close(report.loss, float(loss.detach()))
    assert (report.kept, report.rows_trained, report.rows_screened) == (int(mask.sum()), 6, 0)
    assert (report.calls > 1) == (max_tokens == 25)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_given_mask_narrows_the_completion(padding, gated):
    model, rows = models.build(models.llama), models.rows(padding, seed=3)
    advantages = advantages_for(rows)
    some = torch.rand(rows.input_ids.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    mask = rows.completion_mask & some
    log_probs = causal.padded(model, *models.inside(rows))
    loss = oracle.dense_gated_loss(log_probs, advantages, mask, mask.sum())
    expected = oracle.gradients(model, loss)
    gate = kondo.Gate(rate=1.0) if gated else None
    report = run_step(CausalLM(model), rows, advantages, gate=gate, mask=some)
    assert_grads(model, expected)
    assert report.tokens_seen == int(mask.sum())


def test_dense_rows_with_little_padding_are_not_packed(monkeypatch):
    model, rows = models.build(models.llama), models.rows("none")
    lm, seen = CausalLM(model, attention="varlen"), []
    monkeypatch.setattr(
        lm, "log_prob", lambda pack: seen.append(pack) or CausalLM.log_prob(lm, pack)
    )
    report = run_step(lm, rows, advantages_for(rows))
    (pack,) = seen
    # Nothing is read from a row's last token, so it does not enter the forward.
    assert (pack.layout, list(pack.input_ids.shape)) == ("padded", [6, 11])
    assert report.tokens_trained == 66


@pytest.mark.parametrize("rate", [0.34, 0.6])
@pytest.mark.parametrize("attention", ["varlen", "padded"])
def test_rows_whose_rewards_vary_most_are_trained_without_a_screen(attention, rate):
    model, rows = models.build(models.llama), models.rows("left")
    rewards = torch.tensor([1.0, 0.2, 0.0, 0.7, 0.7, 0.7], dtype=torch.float64)
    advantages = kondo.advantage.group_mean(rewards, 3)
    (best,) = best_sets(advantages.tolist(), [True] * 6, rate)
    keep = torch.tensor([row in best for row in range(6)])[:, None] & rows.completion_mask
    log_probs = causal.padded(model, *models.inside(rows))
    loss = oracle.dense_gated_loss(log_probs, advantages, keep, rows.completion_mask.sum())
    expected = oracle.gradients(model, loss)
    lm, graphs = CausalLM(model, attention=attention), []
    model.model.register_forward_pre_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    report = run_step(
        lm,
        rows,
        advantages,
        gate=kondo.VarianceGate(rate=rate),
    )
    assert_grads(model, expected)
    assert_close(report.loss, float(loss.detach()))
    assert graphs
    assert all(graphs)
    assert (report.rows_screened, report.rows_trained, report.kept) == (0, len(best), len(best))


@settings(max_examples=15)
@given(
    padding=st.sampled_from(["left", "right", "both", "none"]),
    unit=st.sampled_from(["sequence", "token"]),
    attention=st.sampled_from(["varlen", "padded"]),
    rate=st.floats(0.05, 1.0),
    max_tokens=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_equals_the_dense_gated_gradient_for_any_rows(
    padding, unit, attention, rate, max_tokens, seed
):
    model, rows = models.build(models.llama), models.rows(padding, num_rows=5, seed=seed)
    advantages = advantages_for(rows, seed)
    expected, _, _ = dense(model, rows, advantages, unit, rate)
    lm = CausalLM(model, attention=attention, max_tokens=max_tokens)
    run_step(lm, rows, advantages, gate=kondo.Gate(rate=rate), unit=unit)
    assert_grads(model, expected)


@pytest.mark.parametrize("attention", ["varlen", "padded"])
def test_given_positions(attention):
    model, rows = models.build(models.gpt2), models.rows("left")
    positions = 2 * causal.positions(rows.attention_mask) + 3
    advantages = advantages_for(rows)
    expected, _, _ = dense(model, rows, advantages, "token", 0.3, position_ids=positions)
    rows = dataclasses.replace(rows, position_ids=positions)
    lm = CausalLM(model, attention=attention)
    run_step(lm, rows, advantages, gate=kondo.Gate(rate=0.3), unit="token")
    assert_grads(model, expected)


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_keeping_nothing_leaves_the_gradient_alone(unit):
    model, rows = models.build(models.llama), models.rows()
    gate = kondo.Gate(price=1e9)
    report = run_step(CausalLM(model), rows, torch.ones(6), gate=gate, unit=unit)
    assert report.empty
    assert (report.rows_trained, report.tokens_trained, report.calls) == (0, 0, 0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("screen", ["free", "draft"])
def test_screens_decide_and_the_model_is_differentiated(screen):
    model, rows = models.build(models.llama), models.rows("left")
    advantages = advantages_for(rows)
    expected, _, _ = dense(model, rows, advantages, "token", 0.3)
    lm = CausalLM(model)
    known = lm.log_prob(rows).detach()
    draft = CausalLM(copy.deepcopy(model)).log_prob
    calls = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run_step(
        lm,
        rows,
        advantages,
        gate=kondo.Gate(rate=0.3),
        unit="token",
        screen=known if screen == "free" else draft,
    )
    assert_grads(model, expected)
    assert calls == [True]


def test_a_gate_that_weights_every_token():
    model, rows = models.build(models.llama), models.rows("both")
    advantages = advantages_for(rows)
    log_probs = causal.padded(model, *models.inside(rows))
    mask = rows.completion_mask
    delight = oracle.unit_delight(log_probs, advantages, mask, "token")
    weight = torch.sigmoid(delight / 0.7)
    loss = oracle.dense_gated_loss(log_probs, advantages, mask, mask.sum(), weight)
    expected = oracle.gradients(model, loss)

    def soft(values, mask, generator=None):
        return kondo.Choice.of(mask)._replace(weight=torch.sigmoid(values / 0.7) * mask)

    lm = CausalLM(model, attention="varlen", max_tokens=20)
    run_step(lm, rows, advantages, gate=soft, unit="token")
    assert_grads(model, expected)


@pytest.mark.parametrize("shape", ["rows", "tokens"])
def test_losses_with_inputs_and_advantages_per_token(shape):
    """Old log-probs and advantages follow their tokens into the packs."""
    model, rows = models.build(models.llama), models.rows("left")
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(rows.input_ids.shape, dtype=torch.float64, generator=generator)
    log_probs = causal.padded(model, *models.inside(rows))
    old = log_probs.detach() + 0.3 * advantages.flip(0)
    if shape == "rows":
        advantages = advantages[:, 0]
    mask = rows.completion_mask
    keep = oracle.element_keep(log_probs, advantages, mask, "token", 0.4)
    spread = advantages[:, None].expand_as(old) if shape == "rows" else advantages
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(0.8, 1.2) * spread
    surrogate = torch.minimum(ratio * spread, clipped)
    expected = oracle.gradients(model, -surrogate[keep].sum() / mask.sum())
    lm = CausalLM(model, attention="varlen", max_tokens=15)
    run_step(
        lm,
        rows,
        advantages,
        gate=kondo.Gate(rate=0.4),
        unit="token",
        loss=kondo.losses.ppo,
        loss_inputs={"old_log_probs": old},
    )
    assert_grads(model, expected)


def test_a_number_as_denominator_and_a_scaled_backward():
    model, rows = models.build(models.llama), models.rows()
    advantages = advantages_for(rows)
    expected, _, _ = dense(model, rows, advantages, "sequence", 0.5)
    run_step(
        CausalLM(model),
        rows,
        advantages,
        gate=kondo.Gate(rate=0.5),
        denominator=2.0 * float(rows.completion_mask.sum()),
        backward_fn=lambda loss: (8.0 * loss).backward(),
    )
    assert_grads(model, {name: 4.0 * grad for name, grad in expected.items()})


def test_micro_batches_bound_the_rows_of_a_pack():
    """kondo.backward itself takes the compaction, and its micro_batch counts rows."""
    model, rows = models.build(models.llama), models.rows("left")
    advantages = advantages_for(rows)
    expected, _, _ = dense(model, rows, advantages, "sequence", 0.5)
    lm = CausalLM(model, attention="varlen")
    report = run_step(
        lm.log_prob,
        rows,
        advantages,
        gate=kondo.Gate(rate=0.5),
        mask=rows.completion_mask,
        unit="sequence",
        compact=lm.compact,
        micro_batch=2,
    )
    assert (report.rows_trained, report.calls) == (3, 2)
    assert_grads(model, expected)


def test_without_the_compaction_the_gradient_is_the_same():
    model, rows = models.build(models.llama), models.rows("left")
    advantages = advantages_for(rows)
    expected, _, _ = dense(model, rows, advantages, "token", 0.3)
    lm = CausalLM(model)
    run_step(
        lm.log_prob,
        rows,
        advantages,
        gate=kondo.Gate(rate=0.3),
        mask=rows.completion_mask,
        unit="token",
    )
    assert_grads(model, expected)


def test_dropout_is_off_in_the_screen_and_on_in_training():
    model = models.build(models.gpt2, resid_pdrop=0.5).train()
    rows, modes = models.rows(), []
    model.transformer.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    lm = CausalLM(model)
    modes.clear()
    run_step(lm, rows, torch.ones(6), gate=kondo.Gate(rate=0.5))
    assert modes == [False, True]
    assert model.training


WAYS = {
    "adapter": lambda lm: (lm, {}),
    "method": lambda lm: (lm.log_prob, {}),
    "module": lambda lm: (TokenLogProb(lm), {}),
    "named": lambda lm: (lambda rows: lm.log_prob(rows), {"module": lm.module}),
    "screen": lambda lm: (lm, {"screen": lm.log_prob}),
    "draft": lambda lm: (lm, {"screen": lambda rows: lm.log_prob(rows)}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("in_screen", [True, False])
def test_a_model_that_was_given_is_in_evaluation_mode_during_the_screen(way, error, in_screen):
    """Whatever ends the step: a part that was not in training mode before is not put into it."""
    model = models.build(models.gpt2).train()
    model.transformer.h[0].eval()
    lm, rows, seen = CausalLM(model), models.rows(), []
    before = [part.training for part in model.modules()]
    policy, options = WAYS[way](lm)

    def see(*_):
        screens = not torch.is_grad_enabled()
        seen.append((screens, [part.training for part in model.modules()]))
        if error is not None and screens == in_screen:
            raise error("the forward ends")

    model.transformer.h[1].register_forward_hook(see)
    given = {"gate": kondo.Gate(rate=0.5), "mask": rows.completion_mask, "unit": "sequence"}
    with contextlib.nullcontext() if error is None else pytest.raises(error, match="forward ends"):
        run_step(policy, rows, torch.ones(6), **given, **options)
    assert [screens for screens, _ in seen] == [True] + [False] * (error is None or not in_screen)
    for screens, modes in seen:
        assert not any(modes) if screens else modes == before
    assert [part.training for part in model.modules()] == before
    assert torch.is_grad_enabled()


def test_a_plain_function_runs_as_it_is():
    model = models.build(models.gpt2).train()
    lm, rows, modes = CausalLM(model), models.rows(), []
    model.transformer.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    given = {"gate": kondo.Gate(rate=0.5), "mask": rows.completion_mask, "unit": "sequence"}
    run_step(lambda rows: lm.log_prob(rows), rows, torch.ones(6), **given)
    assert modes == [True, True]


def test_a_plain_model_needs_torch_alone():
    # In a process of its own where every optional package is missing.
    script = """
        import sys, warnings
        warnings.simplefilter("ignore")  # torch itself regrets the absence of numpy
        for name in ("numpy", "transformers", "peft", "torchao", "liger_kernel"):
            sys.modules[name] = None  # any import of it raises ImportError
        import torch, kondo, kondo.lm

        class Bigram(torch.nn.Embedding):
            def forward(self, input_ids, attention_mask, position_ids):
                return super().forward(input_ids)

        lm = kondo.lm.CausalLM(Bigram(9, 4), head=torch.nn.Linear(4, 9))
        ids, ones = torch.arange(8).reshape(2, 4), torch.ones(2, 2, dtype=torch.bool)
        rows = kondo.lm.TokenRows.join(ids[:, :2], ones, ids[:, 2:], ones)
        report = kondo.backward(lm, rows, torch.ones(2), gate=kondo.Gate(rate=0.5))
        print("trained", report.tokens_trained)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["trained", "4"]


@pytest.fixture(scope="module")
def policy():
    return CausalLM(models.build(models.llama))


def step(policy, rows, advantages=None, **options):
    advantages = torch.ones(len(rows.input_ids)) if advantages is None else advantages
    options = {"gate": kondo.Gate(rate=0.5)} | options
    return run_step(policy, rows, advantages, **options)


def test_screens_of_completions_alone_are_refused(policy):
    rows = models.rows("left")
    with pytest.raises(
        ValueError, match=r"screen must have shape \[6, 12\].*pad\(screen, \(4, 0\)"
    ):
        step(policy, rows, screen=-torch.ones(6, 8))
    with pytest.raises(ValueError, match=r"screen must have shape.*cut it"):
        step(policy, rows, screen=-torch.ones(6, 13))
    with pytest.raises(ValueError, match=r"one log-prob per token, \[6, 12\], got \[6\]"):
        step(policy, rows, screen=-torch.ones(6))
    with pytest.raises(ValueError, match=r"screen must have shape \[6\] or \[6, T\]|got \[5, 12\]"):
        step(policy, rows, screen=-torch.ones(5, 12))


def test_other_tensors_of_completions_alone_are_refused(policy):
    rows = models.rows("left")
    with pytest.raises(ValueError, match=r"advantages must have shape \[6, 12\].*pad\(advantages"):
        step(policy, rows, torch.ones(6, 8))
    old = {"old_log_probs": -torch.ones(6, 8)}
    with pytest.raises(
        ValueError, match=r"old_log_probs must have shape \[6, 12\].*pad\(old_log_probs"
    ):
        step(policy, rows, loss=kondo.losses.ppo, loss_inputs=old)


def test_screens_that_are_no_log_probs_are_refused(policy):
    rows = models.rows("left")
    screen = -torch.ones(6, 12)
    screen[2, 11] = 0.7
    with pytest.raises(ValueError, match=r"log-probs, at most 0, got 1 .*\[2, 11\].*tokenisation"):
        step(policy, rows, screen=screen)
    with pytest.raises(ValueError, match=r"got 0 for every one.*other columns"):
        step(policy, rows, screen=-1.0 * ~rows.completion_mask)


def test_screens_may_be_anything_outside_the_completion_and_a_little_above_zero(policy):
    rows = models.rows("left")
    screen = torch.where(rows.completion_mask, -1.0, 9.0)
    screen[2, 11] = 0.01
    assert step(policy, rows, screen=screen).kept == 3


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.float64, 0.009, 0.02),
        (torch.float32, 0.009, 0.02),
        (torch.float16, 0.04, 0.06),
        (torch.bfloat16, 0.24, 0.3),
    ],
)
def test_a_screen_may_exceed_zero_by_the_rounding_that_surprisal_allows(policy, dtype, least, most):
    rows = models.rows("left")
    screen = -torch.ones(6, 12, dtype=dtype)
    screen[2, 11] = least
    assert kondo.surprisal(screen)[2, 11] == 0
    assert step(policy, rows, screen=screen).kept == 3
    screen[2, 11] = most
    with pytest.raises(ValueError, match="excess"):
        kondo.surprisal(screen)
    with pytest.raises(ValueError, match="screen must hold log-probs, at most 0"):
        step(policy, rows, screen=screen)


@pytest.mark.parametrize("as_draft", [False, True])
@pytest.mark.parametrize(("by", "side"), [(-1, "left"), (1, "right")])
@pytest.mark.parametrize("holes", [False, True])
def test_a_screen_that_stands_a_column_aside_is_refused(policy, by, side, holes, as_draft):
    rows = models.rows("both", holes=holes)
    shifted = torch.roll(policy.log_prob(rows).detach(), by, 1)
    screen = (lambda _: shifted) if as_draft else shifted
    with pytest.raises(ValueError, match=f"a column to the {side} in [456] of 6 rows"):
        step(policy, rows, screen=screen, screen_rows="all")


def test_certain_tokens_at_the_ends_of_completions_are_no_shift(policy):
    """A log-prob of exactly 0 is what a certain token has, recorded prompts or not."""
    rows = models.rows("both", holes=False)
    sampled = rows.completion_mask
    true = policy.log_prob(rows).detach()
    for end in (sampled.byte().argmax(1), 11 - sampled.flip(1).byte().argmax(1)):
        for prompts in (0.0, -1.0):
            screen = torch.where(sampled, true, prompts)
            screen[torch.arange(6), end] = 0.0
            assert step(policy, rows, screen=screen).kept == 3


def test_what_a_draft_returns_is_checked_like_a_screen(policy):
    rows = models.rows("left")
    with pytest.raises(ValueError, match=r"screen must have shape \[6, 12\].*pad\(screen, \(4, 0"):
        step(policy, rows, screen=lambda rows: -torch.ones(6, 8))
    with pytest.raises(ValueError, match="got 0 for every one"):
        step(policy, rows, screen=lambda rows: torch.zeros(rows.input_ids.shape))
    with pytest.raises(ValueError, match="at most 0, got"):
        step(policy, rows, screen=lambda rows: torch.ones(rows.input_ids.shape))


def test_a_broken_screen_or_advantage_is_named(policy):
    rows = models.rows("left")
    screen = -torch.ones(6, 12)
    screen[1, 11] = float("nan")
    with pytest.raises(ValueError, match=r"log_prob must not hold NaN.*\(1, 11\)"):
        step(policy, rows, screen=screen)
    advantages = torch.ones(6)
    advantages[4] = float("nan")
    with pytest.raises(ValueError, match=r"advantages must not hold NaN"):
        step(policy, rows, advantages, screen=-torch.ones(6, 12))


def test_rows_are_checked_before_anything_is_computed(policy):
    rows = models.rows("left")
    nothing = rows.completion_mask.clone()
    nothing[2] = False
    with pytest.raises(ValueError, match=r"no completion token.*row 2"):
        step(policy, dataclasses.replace(rows, completion_mask=nothing), screen=-torch.ones(6, 12))
    foreign = rows.input_ids.clone()
    foreign[0, 11] = models.VOCAB
    with pytest.raises(ValueError, match=r"tokeniser.*row 0"):
        step(policy, dataclasses.replace(rows, input_ids=foreign), screen=-torch.ones(6, 12))
    with pytest.raises(ValueError, match=r"must be kondo.lm.TokenRows, got Tensor"):
        run_step(policy, rows.input_ids, torch.ones(6), gate=kondo.Gate(rate=0.5))


def test_units_are_sequences_or_tokens(policy):
    with pytest.raises(ValueError, match=r'unit must be "sequence" or "token", got \'sample\''):
        step(policy, models.rows(), unit="sample")


def test_a_head_that_is_larger_than_the_embedding_bounds_nothing():
    """Ids need an embedding and a logit: the smaller of the two vocabularies counts."""
    backbone = models.build(models.llama).model
    lm = CausalLM(backbone, head=nn.Linear(16, models.VOCAB + 5).double())
    assert lm.vocab_size == models.VOCAB
    lm = CausalLM(backbone, head=nn.Linear(16, models.VOCAB - 5).double())
    assert lm.vocab_size == models.VOCAB - 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_step_on_cuda_equals_the_step_on_the_cpu(unit):
    rows = models.rows("left", num_rows=16)
    advantages = advantages_for(rows)
    results = []
    for device in ("cpu", "cuda"):
        model = models.build(models.llama, device=device)
        lm = CausalLM(model, attention="varlen", max_tokens=60)
        run_step(lm, rows, advantages, gate=kondo.Gate(rate=0.3), unit=unit)
        results.append(models.grads(model))
    for name, grad in results[0].items():
        assert_close(results[1][name], grad, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_pack_is_laid_out_and_run_without_waiting_for_the_device():
    """After the plan's one sync, nothing in the forward and backward of a pack waits."""
    sizes = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.1}
    model = models.build(models.qwen2, dtype=torch.bfloat16, device="cuda", **sizes)
    lm = CausalLM(model)
    rows = models.rows("left", num_rows=16)
    rows = kondo.lm.TokenRows(
        **{f.name: getattr(rows, f.name).cuda() for f in dataclasses.fields(rows)[:3]}
    )
    keep = rows.completion_mask
    lm.log_prob(rows).sum().backward()  # whatever is set up once
    plan = kondo.lm.pack.packs(rows, keep, layout=lm.layout, max_tokens=64)
    next(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pack in plan:
            lm.log_prob(pack).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
