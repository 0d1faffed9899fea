"""Random tiny language models and random rows of tokens, for the fuzzer of `kondo.lm`."""

import copy
import dataclasses
import functools
import types

import torch
from torch import nn

from kondo.lm import CausalLM, Head, TokenLogProb, TokenRows
from lm import models

PADDING = 10**6  # an id of no vocabulary, wherever there is no token

TIED = {"tie_word_embeddings": True}
KINDS = {
    "llama": (models.llama, ({}, TIED)),
    "gpt2": (models.gpt2, ({}, {"tie_word_embeddings": False})),
    "qwen2": (models.qwen2, ({}, TIED)),
    "qwen3": (models.qwen3, ({}, TIED)),
    "mistral": (models.mistral, ({}, {"sliding_window": 2})),
    "gemma2": (models.gemma2, ({}, {"final_logit_softcapping": 0.7})),
    "qwen2_moe": (models.qwen2_moe, ({},)),
    "granite": (models.granite, ({}, {"logits_scaling": 0.4})),
    "cohere": (models.cohere, ({}, {"logit_scale": 1.7})),
    "mamba": (models.mamba, ({},)),
    "recurrent_gemma": (models.recurrent_gemma, ({}, {"logits_soft_cap": 0.7})),
    "attending": (None, ({}, {"soft_cap": 1.5, "scale": 0.6})),
    "lstm": (None, ({}, {"scale": 2.0})),
}
_OFTEN = ("llama", "gpt2", "qwen2", "attending")
_SLOW = ("mamba", "recurrent_gemma", "qwen2_moe")

# Their norms or scans sum in float32, whatever the weights are, each row or pack in its own order.
IN_FLOAT32 = ("cohere", "gemma2", "mamba", "recurrent_gemma")
VARLEN = set(KINDS) - {"gemma2", "mamba", "recurrent_gemma", "lstm"}
# Mamba has none. Gemma 2's masks of padding make NaN in float64, in plain transformers as well.
WITHOUT_POSITIONS = ("mamba", "gemma2")


class Whole(nn.Module):
    """A backbone and a head of one's own, called as the oracle calls a Hugging Face model."""

    def __init__(self, backbone, head, soft_cap=None, scale=1.0):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.soft_cap, self.scale = soft_cap, scale

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden = self.backbone(
            input_ids, attention_mask=attention_mask.bool(), position_ids=position_ids
        )
        logits = self.scale * self.head(hidden)
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return types.SimpleNamespace(logits=logits)


@dataclasses.dataclass(frozen=True)
class Language:
    """A model, kept between cases."""

    kind: str
    model: nn.Module
    dtype: torch.dtype
    """In which it computes, at its narrowest."""


def draw_language(draw):
    """Return one of a few dozen models; building them takes longer than a case."""
    kind = draw.choice((*KINDS, *_OFTEN, *_OFTEN))
    if kind in _SLOW and draw.random() < 0.6:
        kind = "llama"
    which = draw.randrange(len(KINDS[kind][1]))
    return _language(kind, which, draw.choice((torch.float64, torch.float64, torch.float32)))


@functools.cache
def _language(kind, which, dtype):
    make, options = KINDS[kind]
    if make is not None:
        model = models.build(make, dtype=dtype, **options[which])
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(which)
            backbone = models.Attending() if kind == "attending" else models.Recurrent()
            head = nn.Linear(12, models.VOCAB, bias=which == 0)
        model = Whole(backbone, head, **options[which]).to(dtype)
    return Language(kind, model, torch.float32 if kind in IN_FLOAT32 else dtype)


def draw_policy(draw, language):
    """Return (lm, policy): a CausalLM, and what the step is given for it."""
    attention = draw.choice(("auto", "padded", "varlen"))
    if attention == "varlen" and language.kind not in VARLEN:
        attention = "padded"
    lm = copy.copy(_causal_lm(language, attention))
    lm.max_tokens = draw.choice((1, 7, 16, 40, 16_384))
    lm.temperature = draw.choice((1.0, 1.0, 0.7, 1.9))
    bare = isinstance(lm._head, Head)  # a wrapper would not see its parameters
    return lm, lm if bare else draw.choice((lm, lm, TokenLogProb(lm)))


@functools.cache
def _causal_lm(language, attention):
    model = language.model
    if not isinstance(model, Whole):
        return CausalLM(model, attention=attention)
    head = model.head
    if model.soft_cap is not None or model.scale != 1.0:
        head = Head(head.weight, head.bias, model.soft_cap, model.scale)
    return CausalLM(model.backbone, head=head, attention=attention)


def draw_rows(draw, language):
    """Return rows of every length and padding: prompts of one token, holes, rows twice."""
    num_rows, width = draw.randint(1, 7), draw.randint(2, 12)
    ids = torch.full((num_rows, width), PADDING)
    real = torch.zeros(num_rows, width, dtype=torch.bool)
    sampled = torch.zeros_like(real)
    side = draw.choice(("left", "right", "none", "mixed"))
    share = draw.choice((0.1, 0.5, 0.9, 1.0))
    for n in range(num_rows):
        if n and draw.random() < 0.15:
            again = draw.randrange(n)
            ids[n], real[n], sampled[n] = ids[again], real[again], sampled[again]
            continue
        length = width if side == "none" else draw.randint(2, width)
        start = {"left": width - length, "mixed": draw.randint(0, width - length)}.get(side, 0)
        stop = start + length
        real[n, start:stop] = True
        ids[n, start:stop] = torch.tensor([draw.randrange(models.VOCAB) for _ in range(length)])
        first = draw.randint(start + 1, stop - 1)
        sampled[n, first:stop] = torch.tensor([draw.random() < share for _ in range(first, stop)])
        sampled[n, draw.randint(first, stop - 1)] = True
    positions = None
    if language.kind not in WITHOUT_POSITIONS and draw.random() < 0.15:
        places = (real.long().cumsum(1) - 1).clamp(min=0)
        positions = draw.randint(1, 2) * places + draw.randint(0, 9)
    as_type = draw.choice((torch.bool, torch.int64, torch.uint8))
    return TokenRows(
        input_ids=ids,
        attention_mask=real.to(as_type),
        completion_mask=sampled.to(as_type),
        position_ids=positions,
    )


def freeze(draw, model):
    """Let some parameters need no gradient; the last one always does, so that there is a graph."""
    names = [name for name, _ in model.named_parameters()]
    how = draw.choice(("nothing", "nothing", "head", "embedding", "half"))
    head = ("lm_head", "head.")
    for name, parameter in model.named_parameters():
        frozen = {
            "nothing": False,
            "head": any(part in name for part in head),
            "embedding": "embed" in name or "wte" in name or "tokens" in name,
            "half": draw.random() < 0.5,
        }[how]
        parameter.requires_grad_(not frozen)
    if not any(p.requires_grad for p in model.parameters()):
        dict(model.named_parameters())[names[-1]].requires_grad_(True)


def unfreeze(model):
    """Leave the model as the next case expects it."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
