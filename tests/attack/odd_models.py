"""What people put in and around a language model: change(draw, model) -> model.

SOUND         must be taken, pass kondo.check and be trained as it is
REFUSED       must be refused when the CausalLM is made
OF_THE_HEAD   the same where backbone and output layer are given one by one
NAMED         must be named by kondo.check, by a pattern of what it says, if it is put there later
ODD           refused, named by kondo.check or trained as it is, but never wrong in silence
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers.modeling_outputs import CausalLMOutput

from lm import models
from lm.test_causality import bert_generation, gemma3
from lm.test_wrapped_models import Doubling, llava

try:
    import peft
except ImportError:
    peft = None

EDITS = {
    "same": lambda x: x.clone(),
    "halve": lambda x: x / 2,
    "shift": lambda x: x + 0.3 * torch.linspace(-1, 1, x.shape[-1]).to(x),
    "bend": lambda x: 1.5 * (x / 1.5).tanh(),
    "gradient": lambda x: 2 * x - x.detach(),
    "detach": lambda x: x.detach(),
    "ban": lambda x: x.index_fill(-1, torch.tensor([3, 7]), -9.0),
    "ahead": lambda x: x + x.roll(-1, 1),
    "behind": lambda x: x.cumsum(1),
    "rows": lambda x: x - x.mean(0, keepdim=True),
    "longest": lambda x: x * (1 + x.shape[1] / 8),
    "number": lambda x: x * (1 + len(x) / 8),
}
"""What a hook does to hidden states or logits [B, T, D]."""
# What may happen to hidden states inside the backbone, which is run as it is.
_OF_A_TOKEN = ("same", "halve", "shift", "bend", "gradient")


def _edited(output, edit):
    """Return what a layer, a backbone or a model gives, edited."""
    if isinstance(output, Tensor):
        return edit(output)
    if isinstance(output, tuple):
        return edit(output[0]), *output[1:]
    name = "logits" if "logits" in output else "last_hidden_state"
    return type(output)(**{**output, name: edit(output[name])})


class Parts(nn.Module):
    """A backbone and its output layer, where they are given one by one."""

    def __init__(self, model):
        super().__init__()
        self.backbone, self.head = model.base_model, model.get_output_embeddings()

    def forward(self, **inputs):
        return CausalLMOutput(logits=self.head(self.backbone(**inputs).last_hidden_state))


def _layers(model):
    """Return the layers of the backbone."""
    return next(part for part in model.base_model.modules() if isinstance(part, nn.ModuleList))


def _inner(draw, model):
    """Return a linear layer inside the backbone."""
    linear = [part for part in _layers(model)[0].modules() if isinstance(part, nn.Linear)]
    return draw.choice(linear) if linear else model.get_input_embeddings()


def hook(draw, model, places, edits):
    """Register a hook of the model, of its backbone, of a layer or of the output layer."""
    part = {
        "model": model,
        "backbone": model.base_model,
        "layer": draw.choice(_layers(model)),
        "head": model.get_output_embeddings(),
    }[draw.choice(places)]
    edit = EDITS[draw.choice(edits)]
    part.register_forward_hook(lambda part, args, output: _edited(output, edit))
    return model


def hook_before(draw, model, edits=("halve", "shift", "ahead", "gradient")):
    edit = EDITS[draw.choice(edits)]
    model.get_output_embeddings().register_forward_pre_hook(
        lambda layer, args: (edit(args[0]), *args[1:])
    )
    return model


def without_mask(draw, model):
    """Let padding be read, and be counted in the positions."""
    nothing = {"attention_mask": None, "position_ids": None}
    model.register_forward_pre_hook(
        lambda part, args, given: (args, given | nothing), with_kwargs=True
    )
    return model


def counting(draw, model):
    """Scale what a layer gives by how often it was called."""
    calls = [0]

    def scale(layer, args, output):
        calls[0] += 1
        return _edited(output, lambda x: x * (1 + 0.1 * calls[0]))

    draw.choice([model.base_model, _layers(model)[0]]).register_forward_hook(scale)
    return model


def seeing_all(draw, model):
    """Switch off the mask of later tokens, as embedding models do; some attention ignores it."""
    for part in model.modules():
        if hasattr(part, "is_causal"):
            part.is_causal = False
    return model


def normed(change, draw, model, layer=None):
    change(layer(draw, model) if layer else model.get_output_embeddings())
    return model


def own_forward(draw, model):
    layer = model.get_output_embeddings()
    made = Doubling(*layer.weight.T.shape, bias=False, dtype=layer.weight.dtype)
    made.weight = layer.weight
    model.set_output_embeddings(made)
    return model


def rope(draw, model=None, nested=False):
    """Make a model whose rotary frequencies are those of the longest row."""
    kind = draw.choice(["dynamic", "longrope"])
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        ones = {"short_factor": [1.0] * 2, "long_factor": [3.0] * 2}
        parameters |= {**ones, "original_max_position_embeddings": 8}
    if nested:
        return models.build(llava, rope=parameters)
    return models.build(models.llama, rope_parameters=parameters, max_position_embeddings=8)


def rope_unseen(draw, model):
    """Give it such embeddings without a word in its config."""
    if hasattr(model.base_model, "rotary_emb"):
        model.base_model.rotary_emb = rope(draw).base_model.rotary_emb
    return model


def made(make, draw, model):
    return models.build(make)


def adapted(draw, model, **options):
    """Put adapters of PEFT, which are no longer 0, into the model."""
    kind = options.pop("kind", "LoraConfig")
    linear = "c_attn" if hasattr(model, "transformer") else "q_proj"
    given = {"target_modules": [linear], "task_type": "CAUSAL_LM"} | options
    if kind == "IA3Config":
        given["feedforward_modules"] = []
    if kind == "PromptTuningConfig":
        given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
    model = peft.get_peft_model(model, getattr(peft, kind)(**given))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    if draw.random() < 0.3 and kind == "LoraConfig":
        model.enable_input_require_grads()
    return model


def wrapped(draw, model, edits=("same",)):
    return models.Wrapped(model, EDITS[draw.choice(edits)])


_NORMS = (
    weight_norm,
    spectral_norm,
    functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
)
_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_with = functools.partial

SOUND = [
    wrapped,
    _with(hook, places=["model", "head"], edits=["same"]),
    _with(hook, places=["backbone", "layer"], edits=_OF_A_TOKEN),
    *(_with(normed, norm, layer=_inner) for norm in (_NORMS[0], _NORMS[2], _NORMS[3])),
    _with(made, models.granite),
    _with(made, _with(llava, rope={"rope_type": "default", "rope_theta": 1e4})),
    _with(made, gemma3),
    _with(made, _with(bert_generation, is_decoder=True, **_WITHOUT_DROPOUT)),
]
OF_THE_HEAD = [
    *(_with(normed, norm) for norm in _NORMS),
    _with(hook, places=["head"], edits=["halve", "shift", "bend", "ban"]),
    _with(hook_before, edits=["halve", "shift"]),
    own_forward,
]
REFUSED = [
    *OF_THE_HEAD,
    _with(hook, places=["model"], edits=["halve", "shift", "bend", "ban"]),
    _with(hook, places=["backbone", "layer"], edits=["ahead"]),
    _with(wrapped, edits=["halve", "shift", "bend", "ban"]),
    rope,
    _with(rope, nested=True),
    _with(made, _with(gemma3, use_bidirectional_attention=True)),
    _with(made, _with(bert_generation, is_decoder=False)),
]
NAMED = [
    (_with(hook, places=["model", "head"], edits=["halve", "shift", "bend", "ban"]), "around them"),
    (hook_before, "hooks"),
    (_with(hook, places=["model", "head"], edits=["gradient"]), "The gradient is not that"),
    (_with(hook, places=["backbone", "layer"], edits=["ahead"]), "tokens that follow"),
    (_with(hook, places=["backbone"], edits=["longest"]), "longest row"),
    (_with(hook, places=["backbone", "layer"], edits=["rows"]), "depend on the other rows"),
    (without_mask, "Padding matters"),
    (counting, "called again"),
    *((_with(normed, norm), "weight as a parameter") for norm in _NORMS[:2]),
]
ODD = [
    *OF_THE_HEAD,
    _with(hook, places=["model", "backbone", "layer", "head"], edits=list(EDITS)),
    hook_before,
    _with(wrapped, edits=list(EDITS)),
    without_mask,
    counting,
    seeing_all,
    rope_unseen,
    _with(normed, spectral_norm, layer=_inner),
]
if peft is not None:
    SOUND += [
        adapted,
        _with(adapted, use_dora=True),
        _with(adapted, modules_to_save=["lm_head"]),
        _with(adapted, kind="IA3Config"),
    ]
    REFUSED += [
        _with(adapted, alora_invocation_tokens=[3]),
        _with(adapted, target_modules=["lm_head"]),
        _with(adapted, kind="PromptTuningConfig"),
    ]
    ODD += [lambda draw, model: ODD[draw.randrange(len(ODD) - 1)](draw, adapted(draw, model))]
