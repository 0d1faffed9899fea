"""Models that look ahead are refused when they are given, and the probe leaves nothing behind."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kondo.lm import CausalLM
from lm import models


def bert_generation(**options):
    from transformers import BertGenerationConfig, BertGenerationDecoder

    return BertGenerationDecoder(BertGenerationConfig(**models._SIZES | options))


def xlnet():
    from transformers import XLNetConfig, XLNetLMHeadModel

    sizes = {"d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, "initializer_range": 0.4}
    return XLNetLMHeadModel(XLNetConfig(vocab_size=models.VOCAB, **sizes))


def xlm():
    from transformers import XLMConfig, XLMWithLMHeadModel

    sizes = {
        "vocab_size": models.VOCAB,
        "emb_dim": 16,
        "n_layers": 2,
        "n_heads": 4,
        "init_std": 0.4,
    }
    return XLMWithLMHeadModel(XLMConfig(**sizes))


def gemma3(**options):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**models._SIZES | {"head_dim": 4} | options))


def cpmant():
    from transformers import CpmAntConfig, CpmAntForCausalLM

    sizes = {"num_attention_heads": 4, "dim_head": 4, "dim_ff": 24, "prompt_length": 4}
    return CpmAntForCausalLM(
        CpmAntConfig(vocab_size=models.VOCAB, hidden_size=16, num_hidden_layers=2, **sizes)
    )


LOOKING_AHEAD = {
    "XLNet": xlnet,
    "BertGeneration": lambda: bert_generation(is_decoder=False),
    "XLM": xlm,
    "Gemma3": lambda: gemma3(use_bidirectional_attention=True),
    "CpmAnt": cpmant,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_a_model_that_looks_ahead_is_refused(name, dtype):
    model = models.build(LOOKING_AHEAD[name], dtype=dtype)
    with pytest.raises(ValueError, match=f"must be causal, got {name}"):
        CausalLM(model)


@pytest.mark.parametrize("make", [lambda: bert_generation(is_decoder=True), gemma3])
def test_the_same_models_as_decoders_are_taken(make):
    CausalLM(models.build(make)).log_prob(models.rows())


class Probed(models.Attending):
    """Draws random numbers, counts in a buffer, and records what it is called with."""

    sees_all = False
    takes_packs = False

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = []

    def forward(self, input_ids, attention_mask, position_ids):
        self.calls.append((self.training, input_ids.shape, torch.is_grad_enabled()))
        self.seen += torch.rand(()) + random.random()
        hidden = self.tokens(input_ids) + self.places(position_ids)
        query, key, value = self.mix(hidden).unflatten(2, (3, self.heads, -1)).unbind(2)
        parts = (part.transpose(1, 2) for part in (query, key, value))
        attended = scaled_dot_product_attention(*parts, is_causal=not self.sees_all)
        return hidden + attended.transpose(1, 2).flatten(2)


def head():
    return nn.Linear(12, models.VOCAB)


def test_a_backbone_of_ones_own_that_looks_ahead_is_refused():
    backbone = Probed()
    CausalLM(backbone, head=head())
    backbone.sees_all = True
    with pytest.raises(ValueError, match=r"must be causal, got Probed, in which hidden states"):
        CausalLM(backbone, head=head())


def test_the_probe_is_small_and_leaves_nothing_behind():
    backbone = Probed().train()
    backbone.mix.eval()
    backbone.mix.weight.grad = torch.ones_like(backbone.mix.weight)
    layer = head()
    before = copy.deepcopy(backbone.state_dict()), torch.get_rng_state(), random.getstate()
    CausalLM(backbone, head=layer)
    ((training, shape, graph),) = backbone.calls
    assert not training
    assert not graph
    assert shape.numel() <= 8
    assert backbone.training
    assert not backbone.mix.training
    assert before[2] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert torch.equal(backbone.mix.weight.grad, torch.ones_like(backbone.mix.weight))
    assert backbone.tokens.weight.grad is None


def test_weights_that_are_elsewhere_are_not_probed():
    backbone = Probed()
    backbone.sees_all = True
    CausalLM(copy.deepcopy(backbone).to("meta"), head=head().to("meta"))
    gathered = copy.deepcopy(backbone)
    gathered.register_parameter("gathered_later", nn.Parameter(torch.zeros(0)))
    CausalLM(gathered, head=head())
    assert not backbone.calls
    assert not gathered.calls
