"""Language models of a few hundred weights, and rows of every kind of padding."""

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from kondo.lm import TokenRows, packed_attention

VOCAB = 23

# Large weights, so that a token that leaks into another row is seen in every digit.
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


class Wrapped(nn.Module):
    """A module around a model, as with a value head: its parts are the model's."""

    def __init__(self, model, edit):
        super().__init__()
        self.pretrained_model, self.edit = model, edit
        self.value = nn.Linear(VOCAB, 1, dtype=model.dtype)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.pretrained_model, name)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **options):
        output = self.pretrained_model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, **options
        )
        return CausalLMOutput(logits=self.edit(output.logits))


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES | options))


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": VOCAB, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.4,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**sizes | options))


def qwen2(**options):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_SIZES | options))


def qwen3(**options):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SIZES | {"head_dim": 8} | options))


def mistral(**options):
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_SIZES | {"sliding_window": 3} | options))


def gemma2(**options):
    """Both scores and logits are soft-capped, low enough to matter, and the window slides."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {
        "head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5,
        "sliding_window": 3, "query_pre_attn_scalar": 8,
        "attn_implementation": "eager",  # some versions' sdpa forgets the cap of the scores
    }  # fmt: skip
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES | caps | options))


def qwen2_moe(**options):
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }  # fmt: skip
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES | experts | options))
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    return model


def granite(**options):
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**_SIZES | {"logits_scaling": 3.0} | options))


def cohere(**options):
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**_SIZES | {"logit_scale": 0.4} | options))


def mamba(**options):
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
        "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return MambaForCausalLM(MambaConfig(**sizes | options))


def recurrent_gemma(**options):
    """Two recurrent layers and one that attends; the cap is low enough to matter."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = {
        "num_hidden_layers": 3, "lru_width": 16, "logits_soft_cap": 2.0,
        "attention_window_size": 3, "w_init_variance_scale": 1.0, "head_dim": 4,
    }  # fmt: skip
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**_SIZES | sizes | options))


def llama4(**options):
    """Experts, a chunk that ends within a row, and one layer without rotary embeddings."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {
        "head_dim": 4, "intermediate_size_mlp": 24, "num_local_experts": 2,
        "num_experts_per_tok": 1, "attention_chunk_size": 5, "no_rope_layers": [1, 0],
    }  # fmt: skip
    return Llama4ForCausalLM(Llama4TextConfig(**_SIZES | sizes | options))


def decoder_of(name):
    """The decoder of an encoder-decoder model, as a causal LM of its own."""

    def make(**options):
        import transformers

        sizes = {
            "vocab_size": VOCAB, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2,
            "decoder_ffn_dim": 24, "encoder_layers": 1, "max_position_embeddings": 64,
            "init_std": 0.4, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0,
        }  # fmt: skip
        model = getattr(transformers, name)
        return model(model.config_class(**sizes | options))

    make.__name__ = name
    return make


def build(make, *, dtype=torch.float64, device="cpu", **options):
    """Return the model with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(**options)
    return model.to(device=device, dtype=dtype)


class Attending(nn.Module):
    """A backbone of one's own that attends within rows, side by side or end to end."""

    takes_packs = True

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.mix, self.heads = nn.Linear(width, 3 * width), heads

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, cu_seqlens=None, max_length=0
    ):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        query, key, value = self.mix(hidden).unflatten(2, (3, self.heads, -1)).unbind(2)
        if cu_seqlens is None:
            parts = (part.transpose(1, 2) for part in (query, key, value))
            found = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            return hidden + found.transpose(1, 2).flatten(2)
        packed = packed_attention(query[0], key[0], value[0], cu_seqlens, max_length)
        return hidden + packed.flatten(1).unsqueeze(0)


class Recurrent(nn.Module):
    """A plain backbone: no config, no attention, hidden states as a tensor."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, input_ids, attention_mask, position_ids):
        assert attention_mask.dtype == torch.bool
        assert attention_mask.shape == position_ids.shape == input_ids.shape
        return self.lstm(self.embed(input_ids))[0]


def rows(padding="right", *, num_rows=6, columns=12, holes=True, seed=0):
    """Rows of different lengths; ids in the padding are out of the vocabulary on purpose."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    ids = torch.randint(VOCAB, (num_rows, columns), generator=generator)
    real = torch.zeros(num_rows, columns, dtype=torch.bool)
    sampled = torch.zeros_like(real)
    for n in range(num_rows):
        length = draw(4, columns)
        spare = columns - length
        start = {"right": 0, "left": spare, "both": draw(0, spare), "none": 0}[padding]
        stop = columns if padding == "none" else start + length
        first = start + draw(1, 2)
        real[n, start:stop] = True
        sampled[n, first:stop] = True
        if holes and stop - first > 2:
            sampled[n, draw(first + 1, stop - 2)] = False
    return TokenRows(
        input_ids=torch.where(real, ids, 10**6), attention_mask=real, completion_mask=sampled
    )


def inside(rows):
    """The same with an id of the vocabulary in the padding, for models that read it."""
    ids = torch.where(rows.attention_mask, rows.input_ids, 0)
    return ids, rows.attention_mask, rows.completion_mask


def grads(module):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }
