"""`kondo.check` of language models with one planted fault each, and of sound ones."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import kondo
from kondo.lm import BudgetGate, CausalLM, Head, TokenLogProb, TokenRows
from lm import models
from lm.test_causality import gemma3

ADVANTAGES = torch.randn(6, generator=torch.Generator().manual_seed(2))


def found(policy, rows=None, **options):
    rows = rows or models.rows("both")
    with pytest.raises(kondo.CheckError) as caught:
        kondo.check(policy, rows, ADVANTAGES[: len(rows.input_ids)], **options)
    return " ".join(caught.value.findings)


def passes(policy, rows=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", kondo.CheckWarning)
        rows = rows or models.rows("both")
        kondo.check(policy, rows, ADVANTAGES[: len(rows.input_ids)], **options)


# Tokens that see what follows them.


class Peeking(models.Attending):
    """Attends to all tokens, or sees the one after each, from the moment that it is told to."""

    sees = "nothing"
    takes_packs = False

    def forward(self, input_ids, attention_mask, position_ids):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        query, key, value = self.mix(hidden).unflatten(2, (3, self.heads, -1)).unbind(2)
        parts = (part.transpose(1, 2) for part in (query, key, value))
        attended = scaled_dot_product_attention(*parts, is_causal=self.sees != "all")
        hidden = hidden + attended.transpose(1, 2).flatten(2)
        return hidden + hidden.roll(-1, 1) if self.sees == "next" else hidden


@pytest.mark.parametrize("sees", ["all", "next"])
@pytest.mark.parametrize("half", [False, True])
def test_a_token_that_sees_later_ones_is_found(sees, half):
    torch.manual_seed(0)
    backbone = Peeking()
    lm = CausalLM(backbone, head=nn.Linear(12, models.VOCAB))
    passes(lm)
    backbone.sees = sees
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        assert "sees tokens that follow" in found(lm)


# Padding, positions and the longest row.


class MaskUnused(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, **options):
        return super().forward(input_ids, **options)


class PaddingAdded(LlamaForCausalLM):
    """Adds what stands in the padding to every hidden state, in its own forward."""

    def forward(self, input_ids, attention_mask=None, **options):
        logits = super().forward(input_ids, attention_mask, **options).logits
        if attention_mask is not None:
            logits = logits + self.lm_head(
                (self.model.embed_tokens(input_ids) * (1 - attention_mask)[..., None]).sum(1, True)
            )
        return CausalLMOutput(logits=logits)


def llama(kind=LlamaForCausalLM, **options):
    return models.build(lambda **given: kind(LlamaConfig(**models._SIZES | given)), **options)


def test_padding_that_matters_is_found():
    assert "padded on the left" in found(CausalLM(llama(MaskUnused)), models.rows("left"))
    assert "padded on the right" in found(CausalLM(llama(PaddingAdded)), models.rows("right"))


def test_padding_that_matters_is_found_where_cut_rows_have_one_length():
    real = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    wanted = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1]])
    rows = TokenRows(input_ids=real + wanted, attention_mask=real, completion_mask=wanted)
    assert "padded on the left" in found(CausalLM(llama(MaskUnused)), rows)


def test_a_side_on_which_the_rows_have_no_padding_is_not_judged():
    passes(CausalLM(llama(MaskUnused)), models.rows("right"))


class Uncounted(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self.without_positions, with_kwargs=True)

    def without_positions(self, module, args, options):
        return args, {k: v for k, v in options.items() if k != "position_ids"}


def test_positions_that_are_not_used_are_found():
    rows = models.rows("right")
    positions = torch.arange(12).expand(6, 12) * 2
    stretched = TokenRows(**vars_of(rows) | {"position_ids": positions})
    passes(CausalLM(llama()), stretched)
    assert "position_ids are not used" in found(CausalLM(llama(Uncounted)), stretched)
    counted = TokenRows(**vars_of(rows) | {"position_ids": positions // 2 + 5})
    passes(CausalLM(llama(Uncounted)), counted)


def vars_of(rows):
    names = ("input_ids", "attention_mask", "completion_mask")
    return {name: getattr(rows, name) for name in names}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_that_depends_on_the_longest_row_is_found(kind):
    """Its config says nothing of it, as that of a model with code of its own may."""
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        ones = [1.0] * 2
        parameters |= {
            "short_factor": ones, "long_factor": [3.0] * 2, "original_max_position_embeddings": 10,
        }  # fmt: skip
    other = llama(rope_parameters=parameters, max_position_embeddings=10)
    model = llama()
    lm = CausalLM(model)
    model.model.rotary_emb = other.model.rotary_emb
    assert "depends on the longest row" in found(lm, models.rows("none"))


# What stands around the backbone and the output layer.


BENDS = {
    "temperature": lambda logits: logits / 0.7,
    "soft cap": lambda logits: 2.0 * (logits / 2.0).tanh(),
    "scale": lambda logits: 1.3 * logits,
    "ban": lambda logits: logits.index_fill(-1, torch.tensor([3, 7]), -1e4),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bend", BENDS)
def test_a_wrapper_that_bends_logits_is_found(bend, half):
    model = llama(dtype=torch.float32)

    def later(logits):  # not where the adapter is made, which tries a few tokens
        return logits if logits.shape[1] < 4 else BENDS[bend](logits)

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        passes(CausalLM(models.Wrapped(model, lambda logits: logits)))
        assert "what stands around them" in found(CausalLM(models.Wrapped(model, later)))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_of_the_output_layer_is_found(before, given):
    model = llama()
    lm = CausalLM(model.model, head=model.lm_head) if given else CausalLM(model)
    if before:
        model.lm_head.register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))
    else:
        model.lm_head.register_forward_hook(lambda layer, args, output: output / 2)
    assert "hooks of the model or of its output layer" in found(lm)


def test_an_adapter_that_acts_in_the_models_own_forward_is_found():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    lm = CausalLM(model)
    passes(lm)
    model.register_forward_hook(
        lambda module, args, output: CausalLMOutput(logits=1.1 * output.logits)
    )
    assert "what stands around them" in found(lm)


class Detached(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, **options):
        hidden = self.model(input_ids, attention_mask=attention_mask, **options)
        return CausalLMOutput(logits=self.lm_head(hidden.last_hidden_state.detach()))


def test_another_gradient_of_the_models_own_forward_is_found():
    text = found(CausalLM(llama(Detached)))
    assert "The gradient is not that of the model's own forward" in text
    assert "model.embed_tokens.weight (it is in CausalLM's one alone" in text


# Sound models.


MAKES = [
    models.llama, models.gpt2, models.qwen3, models.mistral, models.gemma2, models.qwen2_moe,
    models.granite, models.cohere, models.mamba,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES)
def test_models_of_many_makes_pass(make):
    # Gemma 2's own masks of padding make NaN in float64.
    dtype = torch.float32 if make is models.gemma2 else torch.float64
    passes(CausalLM(models.build(make, dtype=dtype)), models.rows("left"))


def test_norms_that_sum_in_float32_pass_in_float64():
    passes(CausalLM(models.build(gemma3)), models.rows("left", seed=5), unit="token")


def test_a_recurrence_passes_and_what_it_reads_in_padding_on_the_left_is_found():
    lm = CausalLM(models.build(models.recurrent_gemma))
    passes(lm, models.rows("right"))
    assert "padded on the left" in found(lm, models.rows("left"))


@pytest.mark.parametrize("padding", ["left", "right", "both", "none"])
@pytest.mark.parametrize("attention", ["padded", "varlen"])
def test_every_layout_passes(attention, padding):
    passes(CausalLM(models.build(models.gpt2), attention=attention), models.rows(padding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_passes(dtype):
    lm = CausalLM(llama(dtype=dtype), temperature=0.8)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        passes(lm)


def test_lora_passes():
    peft = pytest.importorskip("peft")
    for options in ({}, {"modules_to_save": ["lm_head"]}, {"lora_dropout": 0.3, "use_dora": True}):
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options)
        model = peft.get_peft_model(llama(), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        model.enable_input_require_grads()
        passes(CausalLM(model.train()))


def test_tied_frozen_and_checkpointed_models_pass():
    passes(CausalLM(llama(tie_word_embeddings=True)))
    model = llama()
    model.model.layers[0].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    passes(CausalLM(model))
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    passes(CausalLM(model))


def test_dropout_passes():
    lm = CausalLM(models.build(models.gpt2, resid_pdrop=0.3, attn_pdrop=0.2).train())
    passes(lm)
    passes(lm, screen=lambda rows: lm.log_prob(rows))  # a draft of the model that was given


def test_compiled_layers_pass():
    model = llama(dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    passes(CausalLM(model))


@pytest.mark.parametrize("attention", ["padded", "varlen"])
def test_backbones_of_ones_own_pass(attention):
    torch.manual_seed(0)
    head = nn.Linear(12, models.VOCAB)
    passes(TokenLogProb(CausalLM(models.Attending(), head=head, attention=attention)))
    bent = Head(head.weight, head.bias, soft_cap=1.5, scale=0.6)
    passes(CausalLM(models.Attending(), head=bent, attention=attention))
    passes(CausalLM(models.Recurrent(), head=head))


def test_the_number_of_forwards_does_not_depend_on_rows_or_findings():
    counts = set()
    for padding, rows, kind in (
        ("left", 6, LlamaForCausalLM), ("right", 6, LlamaForCausalLM), ("none", 2, MaskUnused),
        ("left", 4, MaskUnused), ("both", 3, Detached),
    ):  # fmt: skip
        model = llama(kind)
        lm = CausalLM(model)
        calls = []
        model.model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        try:
            kondo.check(lm, models.rows(padding, num_rows=rows), ADVANTAGES[:rows])
        except kondo.CheckError:
            assert kind is not LlamaForCausalLM
        counts.add(len(calls))
    assert len(counts) == 1


def test_nothing_is_left_behind():
    model = models.build(models.gpt2, resid_pdrop=0.3).train()
    model.transformer.h[0].eval()
    lm = CausalLM(model)
    before = [module.training for module in model.modules()], torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    passes(lm)
    assert before[0] == [module.training for module in model.modules()]
    assert torch.equal(before[1], torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_gate_that_is_bound_to_rows_chooses_among_the_few(unit, bound):
    draw = torch.Generator().manual_seed(0)
    real = torch.ones(20, 6, dtype=torch.bool)
    rows = TokenRows(
        input_ids=torch.randint(models.VOCAB, (20, 6), generator=draw),
        attention_mask=real,
        completion_mask=real.index_fill(1, torch.tensor([0, 1]), False),
    )
    gate = BudgetGate(budget=0.5)
    lm = CausalLM(models.Attending(), head=nn.Linear(12, models.VOCAB))
    advantages = torch.randn(20, generator=draw)
    kondo.check(lm, rows, advantages, gate=gate.for_rows(rows) if bound else gate, unit=unit)
