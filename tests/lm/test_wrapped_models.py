"""Models with parts around them that `CausalLM` goes past: refused, or differentiated exactly."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from kondo.lm import CausalLM
from lm import models
from oracles import causal
from tolerances import assert_close


def adapter(model, given):
    """Return a CausalLM of the model, or of its parts."""
    return CausalLM(model.model, head=model.lm_head) if given else CausalLM(model)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        spectral_norm,
        pruned,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
)
def test_an_output_layer_that_computes_its_weight_is_refused(change, given):
    """Its weight would be read as it was once, and its parameters would get no gradient."""
    model = models.build(models.llama)
    change(model.lm_head)
    with pytest.raises(ValueError, match=r"output layer must have its weight as a parameter"):
        adapter(model, given)


def test_a_weight_that_is_computed_from_now_on_is_refused_at_the_next_call():
    model = models.build(models.llama)
    lm = CausalLM(model)
    weight_norm(model.lm_head)
    with pytest.raises(ValueError, match=r"output layer must have its weight as a parameter"):
        lm.log_prob(models.rows())


def halve(layer, args, output):
    return output / 2


def shift(layer, args):
    return (args[0] + 1,)


class Doubling(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["hook", "hook before", "own forward"])
def test_an_output_layer_whose_call_gives_other_logits_is_refused(kind, given):
    model = models.build(models.llama)
    layer = model.lm_head
    if kind == "hook":
        layer.register_forward_hook(halve)
    elif kind == "hook before":
        layer.register_forward_pre_hook(shift)
    else:
        model.lm_head = layer = Doubling(16, models.VOCAB, bias=False, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"(in|before) the output layer, results differ"):
        adapter(model, given)


def test_an_adapter_that_is_active_from_some_token_on_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]
    )
    model = peft.get_peft_model(models.build(models.llama), config)
    with pytest.raises(ValueError, match=r"alora_invocation_tokens\) as 'default'.*plain LoRA"):
        CausalLM(model)


def llava(rope):
    """A language model inside another, with a config of its own inside the other's."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    sizes = {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = CLIPVisionConfig(hidden_size=16, image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(**models._SIZES | {"rope_parameters": rope, "max_position_embeddings": 8})
    return Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_index=1))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_of_the_longest_row_are_refused_in_a_nested_config(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 8}
    if kind == "longrope":
        rope |= {"long_factor": [4.0, 4.0], "short_factor": [1.0, 1.0]}
    model = models.build(llava, rope=rope)
    with pytest.raises(ValueError, match=rf"rope_type \['{kind}'\] in LlavaModel"):
        CausalLM(model)
    with pytest.raises(ValueError, match=rf"rope_type \['{kind}'\] in Holding"):
        CausalLM(Holding(model.config), head=nn.Linear(12, models.VOCAB))


class Holding(models.Attending):
    """A backbone whose parts have no config: its own holds that of the text."""

    def __init__(self, config):
        super().__init__()
        self.config = config


def test_a_model_inside_another_is_taken():
    model = models.build(llava, rope={"rope_type": "default", "rope_theta": 1e4}).eval()
    rows = models.rows("left")
    expected = causal.one_by_one(model, *models.inside(rows))
    assert_close(CausalLM(model).log_prob(rows), expected)
