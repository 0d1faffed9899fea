"""A tiny random Qwen2 and a batch in verl's layout. Imports no kondo."""

import string

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 64


def save_model(folder, *, scale=2.0, **shape):
    """Write a model and its tokenizer, as a hub folder has them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = Qwen2Config(
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **(sizes | shape),
    )
    model = Qwen2ForCausalLM(config)
    for weight in model.parameters():  # so that the policy is far from uniform
        weight.data.mul_(scale)
    model.save_pretrained(folder)
    # Loaded as a Qwen2 tokenizer: bytes, of which a newline and the end of a turn are tokens too.
    words = ["<pad>", "<bos>", "<eos>", "\u010a", "<|im_end|>", "\u0120", *string.digits]
    words += string.ascii_letters[: VOCABULARY - len(words)]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return str(folder)


def make_rows(num_rows, *, prompts=(2, 4), responses=(2, 6), vocabulary=VOCABULARY, seed=0):
    """Return rows as verl's transfer queue holds them: jagged tensors."""
    draw = torch.Generator().manual_seed(seed)
    lists = {}

    def add(name, values):
        lists.setdefault(name, []).append(values)

    for _ in range(num_rows):
        prompt = int(torch.randint(prompts[0], prompts[1] + 1, (), generator=draw))
        response = int(torch.randint(responses[0], responses[1] + 1, (), generator=draw))
        ids = torch.randint(3, vocabulary, (prompt + response,), generator=draw)
        add("prompts", ids[:prompt])
        add("responses", ids[prompt:])
        add("input_ids", ids)
        add("position_ids", torch.arange(prompt + response))
        add("attention_mask", torch.ones(prompt + response, dtype=torch.int64))
        mask = torch.ones(response, dtype=torch.int64)
        if response > 3:
            mask[1] = 0  # a tool's token
        add("response_mask", mask)
        add("loss_mask", mask.clone())
        advantage = torch.randn((), generator=draw)
        add("advantages", advantage * mask)
        # Near the policy's own, so that some ratios are clipped and some are not.
        add("noise", 0.3 * torch.randn(response, generator=draw))
        add("ref_noise", 0.5 * torch.randn(response, generator=draw))
    jagged = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in lists.items()
    }
    return TensorDict(jagged, batch_size=num_rows)
