"""Tiny Hugging Face policies with random weights, and rows for them."""

import torch

from kondo.lm import CausalLM, TokenRows

VOCAB = 37


def policy(kind="llama", *, num_layers=3, width=32, vocabulary=VOCAB, seed=0):
    """A CausalLM over a tiny Llama, Qwen2 or GPT-2 with its own seed."""
    import transformers

    common = {"vocab_size": vocabulary, "max_position_embeddings": 64}
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # far from uniform, so that screens have something to get wrong
    }
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common, **sizes),
        "qwen2": lambda: transformers.Qwen2Config(**common, **sizes, tie_word_embeddings=True),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=64,
            n_embd=width,
            n_layer=num_layers,
            n_head=2,
            initializer_range=0.2,
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    return CausalLM(model)


def token_rows(generator, num_rows=12, *, vocabulary=VOCAB, device="cpu"):
    """Prompts of 1 to 4 tokens, padded on the left; completions of 2 to 8 tokens."""
    prompt = torch.arange(4) >= torch.randint(0, 4, (num_rows, 1), generator=generator)
    sampled = torch.arange(8) < torch.randint(2, 9, (num_rows, 1), generator=generator)
    ids = torch.randint(vocabulary, (num_rows, 12), generator=generator)
    parts = (ids[:, :4], prompt, ids[:, 4:], sampled)
    return TokenRows.join(*(part.to(device) for part in parts))
