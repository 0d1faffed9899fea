"""A tiny random-weight policy, its tokenizer and its trainers, all built in code."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer

WORDS = [f"w{i}" for i in range(20)]


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def policy(dtype=torch.float32):
    """Two small layers whose weights depend on the seed alone."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=22,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def absolute_policy():
    """A GPT-2: learned absolute positions, which TRL counts from the left padding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=22,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def move_reference(trained):
    """Make the reference another model than the policy, so that there is a KL from the start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained.ref_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * noise.to(parameter.device)


def prompts(number=8):
    """Prompts of different lengths."""
    texts = [" ".join(WORDS[(3 * i + j) % 20] for j in range(2 + i % 3)) for i in range(number)]
    return Dataset.from_dict({"prompt": texts})


def reward(completion_ids, **kwargs):
    """Different for nearly every completion, with some large and some small ones."""
    return [float(sum(ids) % 7) + 0.1 * len(ids) for ids in completion_ids]


OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
    "use_bias_correction_kl": True,  # TRL's default from 1.10 on
}


def trainer(
    tmp_path, *, model=None, base=False, reward_funcs=reward, trainer_options=None, **options
):
    """TRL's trainer or ours on the tiny policy; `options` go into its config."""
    config, kind = (GRPOConfig, GRPOTrainer) if base else (KondoGRPOConfig, KondoGRPOTrainer)
    return kind(
        policy() if model is None else model,
        reward_funcs=reward_funcs,
        args=config(str(tmp_path), **(OPTIONS | options)),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **(trainer_options or {}),
    )
