"""Models of many makes, with random weights: log-probs equal those of their own logits."""

import copy

import pytest
import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM

import kondo
import kondo.lm
from kondo.lm import CausalLM
from lm import models
from oracles import causal
from oracles import engine as oracle
from steps import run_step
from tolerances import TOLERANCES, assert_close

VARLEN = [
    models.llama,
    models.gpt2,
    models.qwen2,
    models.qwen3,
    models.mistral,
    models.qwen2_moe,
    models.granite,
    models.cohere,
]
# The backbone is a wrapper around a decoder, and does not find its own embeddings.
DECODERS = [
    models.decoder_of(f"{name}ForCausalLM")
    for name in (
        *("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "Marian", "MBart", "Mvp"),
        *("Pegasus", "PLBart", "TrOCR"),
    )
]
PADDED = [*VARLEN, models.gemma2, models.mamba, models.recurrent_gemma, models.llama4, *DECODERS]
CASES = [("varlen", make) for make in VARLEN] + [("padded", make) for make in PADDED]

# Their norms or scans sum in float32, whatever the weights are, each row or pack in its own order.
IN_FLOAT32 = (models.cohere, models.gemma2, models.llama4, models.mamba, models.recurrent_gemma)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("attention", "make"), CASES)
def test_log_probs_equal_those_of_the_models_logits(attention, make, padding):
    model, rows = models.build(make), models.rows(padding)
    lm = CausalLM(model, attention=attention, max_tokens=30, temperature=0.9)
    expected = causal.one_by_one(model, *models.inside(rows), temperature=0.9)
    rough = make in (models.llama4, models.recurrent_gemma)
    assert_close(lm.log_prob(rows), expected, dtype=torch.float32 if rough else None)


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize(("attention", "make"), CASES)
def test_the_gradient_equals_the_dense_gated_one(attention, make, unit):
    model, rows = models.build(make), models.rows("left")
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(6, dtype=torch.float64, generator=generator)
    log_probs = causal.one_by_one(model, *models.inside(rows))
    mask = rows.completion_mask
    keep = oracle.element_keep(log_probs, advantages, mask, unit, 0.4)
    loss = oracle.dense_gated_loss(log_probs, advantages, keep, mask.sum())
    expected = oracle.gradients(model, loss)
    lm = CausalLM(model, attention=attention, max_tokens=30)
    run_step(lm, rows, advantages, gate=kondo.Gate(rate=0.4), unit=unit)
    for name, grad in models.grads(model).items():
        wanted = expected.get(name, torch.zeros_like(grad))  # positions may be fixed
        assert_close(grad, wanted, dtype=torch.float32 if make in IN_FLOAT32 else None)


def test_a_window_that_slides_is_kept_in_varlen():
    """With a window as long as the row the log-probs are others, so the window was at work."""
    rows = models.rows("none", holes=False)
    narrow, wide = (
        CausalLM(models.build(models.mistral, sliding_window=size), attention="varlen")
        for size in (3, 12)
    )
    assert not torch.allclose(narrow.log_prob(rows), wide.log_prob(rows))


def test_both_caps_of_gemma_are_at_work():
    rows = models.rows("none")
    options = [{}, {"final_logit_softcapping": None}, {"attn_logit_softcapping": None}]
    capped, *others = (CausalLM(models.build(models.gemma2, **o)).log_prob(rows) for o in options)
    assert all(not torch.allclose(capped, other) for other in others)


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_the_cap_of_recurrent_gemma_in_bfloat16(cap):
    """The gradient is as near to the float64 one as that of plain PyTorch in bfloat16."""
    model, rows = models.build(models.recurrent_gemma, logits_soft_cap=cap), models.rows()
    model.bfloat16()
    advantages = torch.randn(6, 1, generator=torch.Generator().manual_seed(1))

    def gradient(policy, log_probs):
        policy.zero_grad()
        (advantages.to(log_probs.dtype) * log_probs).sum().backward()
        return torch.cat([grad.double().flatten() for grad in models.grads(policy).values()])

    wide = copy.deepcopy(model).double()
    truth = gradient(wide, causal.one_by_one(wide, *models.inside(rows)))
    plain = gradient(model, causal.one_by_one(model, *models.inside(rows)))
    ours = gradient(model, CausalLM(model).log_prob(rows))
    spare = TOLERANCES[torch.float16]["rtol"] * truth.norm()
    assert (ours - truth).norm() <= (plain - truth).norm() + spare


def test_the_balance_of_a_mixtures_router_is_no_part_of_the_loss():
    """With the model's own auxiliary loss switched on, the gradient is the same."""
    rows, found = models.rows(), []
    for wanted in (False, True):
        model = models.build(models.qwen2_moe, output_router_logits=wanted)
        lm = CausalLM(model)
        run_step(lm, rows, torch.ones(6), gate=kondo.Gate(rate=0.5))
        found.append(models.grads(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_decoder_that_predicts_several_tokens_is_refused():
    config = ProphetNetConfig(
        vocab_size=models.VOCAB, hidden_size=16, num_encoder_layers=1, num_decoder_layers=2,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, decoder_ffn_dim=24,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"make its logits by its output layer alone.*shape"):
        CausalLM(ProphetNetForCausalLM(config))
