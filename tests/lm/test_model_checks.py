"""A model is taken only if its logits are its head's: in half precision as in double."""

import pytest
import torch
from torch import nn

from kondo.lm import CausalLM
from lm import models
from oracles import causal
from tolerances import assert_close

FAMILIES = [
    models.llama,
    models.gpt2,
    models.qwen2,
    models.qwen3,
    models.mistral,
    models.gemma2,
    models.qwen2_moe,
    models.granite,
    models.cohere,
    models.mamba,
    models.recurrent_gemma,
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BENDS = {
    "scale": lambda logits: logits * 1.02,
    "cap": lambda logits: 30.0 * (logits / 30.0).tanh(),
    "temperature": lambda logits: logits / 0.9,
    "mask": lambda logits: logits.index_fill(-1, torch.tensor([5]), -1e4),
    "fewer": lambda logits: logits[..., :-1],
    "narrow": lambda logits: (logits * 1.02).bfloat16(),
    "mixed": lambda logits: logits @ torch.eye(models.VOCAB, dtype=torch.bfloat16),
}


def small(make, dtype, **options):
    """Logits as small as those of a model that is not trained yet: no cap of 30 shows in them."""
    return models.build(make, dtype=dtype, initializer_range=0.02, **options)


def bent(model, bend):
    inner = model.forward

    def forward(*args, **options):
        output = inner(*args, **options)
        output.logits = bend(output.logits)
        return output

    model.forward = forward
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", FAMILIES)
def test_models_of_many_makes_are_taken(make, dtype):
    CausalLM(small(make, dtype))
    lm = CausalLM(models.build(make, dtype=dtype))
    assert lm.log_prob(models.rows()).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [models.llama, models.gemma2, models.granite])
@pytest.mark.parametrize("name", BENDS)
def test_a_bend_that_no_config_tells_of_is_refused(make, dtype, name):
    model = bent(small(make, dtype), BENDS[name])
    with pytest.raises(ValueError, match=r"output layer alone.*ForCausalLM: .* the output layer"):
        CausalLM(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [{"final_logit_softcapping": 2.02}, {"logits_scaling": 3.03}])
def test_a_config_that_tells_another_number_is_refused(dtype, change):
    make = models.gemma2 if "final_logit_softcapping" in change else models.granite
    model = small(make, dtype)
    inner = model.forward
    ((name, told),) = change.items()
    actual = getattr(model.config, name)

    def forward(*args, **options):
        setattr(model.config, name, actual)
        try:
            return inner(*args, **options)
        finally:
            setattr(model.config, name, told)

    model.forward = forward
    setattr(model.config, name, told)
    with pytest.raises(ValueError, match="after the output layer, results differ by"):
        CausalLM(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_that_are_scaled_before_the_head_are_refused(dtype):
    model = small(models.llama, dtype)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 1.02,))
    with pytest.raises(ValueError, match="before the output layer, results differ by"):
        CausalLM(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_layer_that_is_not_linear_is_refused(dtype):
    class Normed(nn.Linear):
        def forward(self, hidden):
            return nn.functional.linear(hidden, nn.functional.normalize(self.weight))

    model = small(models.llama, dtype)
    layer = Normed(*reversed(model.lm_head.weight.shape), bias=False, dtype=dtype)
    layer.weight = model.lm_head.weight
    model.lm_head = layer
    with pytest.raises(ValueError, match="in the output layer, results differ by"):
        CausalLM(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_layer_that_is_read_and_not_called(dtype):
    """Then all there is to compare is logits."""

    def build(scale):
        model = models.build(models.llama, dtype=dtype)

        def forward(input_ids, **options):
            output = model.model(input_ids, **options)
            output.logits = scale * output.last_hidden_state @ model.lm_head.weight.T
            return output

        model.forward = forward
        return model

    CausalLM(build(1.0))
    with pytest.raises(ValueError, match="output layer alone"):
        CausalLM(build(1.05))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_zeros_is_taken(dtype):
    """Some start a policy so; every token is as likely as any other."""
    model, rows = models.build(models.llama, dtype=dtype), models.rows()
    nn.init.zeros_(model.lm_head.weight)
    assert_close(
        CausalLM(model).log_prob(rows), causal.one_by_one(model.float(), *models.inside(rows))
    )


def test_the_check_leaves_no_hook_behind():
    model = models.build(models.llama)
    CausalLM(model)
    with pytest.raises(ValueError, match="after the output layer"):
        CausalLM(bent(model, BENDS["scale"]))
    assert not model.lm_head._forward_hooks
