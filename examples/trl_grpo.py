"""GRPO in TRL, and the same with a gate: a tiny model with random weights learns to say "joy".

Install, in a checkout:  pip install '.[trl]'
Run:                     python examples/trl_grpo.py [--gate unbiased:0.25] [--steps 30]

It trains twice: with TRL's own trainer, and with a gate, whose trainer runs `kondo.check` once.

Expect TRL's log of every step, then two lines, after 12 s of CPU time (other CPUs give other
digits). At equal steps the gated run learns less and differentiates a quarter of the tokens:

    TRL:   reward 0.031 -> 0.488, every token trained
    kondo: reward 0.031 -> 0.371, 25.5% of tokens trained
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer

WORDS = ["<pad>", "<eos>", "joy", *(f"word{i}" for i in range(29))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model() -> Qwen2ForCausalLM:
    """Two small layers with random weights, the same ones each time."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def joy(completions: list[str], **kwargs: object) -> list[float]:
    """Reward: the share of words that are "joy"."""
    return [text.split().count("joy") / 8 for text in completions]


def make_trainer(folder: str, steps: int, gate: str | None) -> GRPOTrainer:
    """TRL's trainer, or with a gate, ours: the class, the config and one option differ."""
    options = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": steps,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    if gate is None:
        trainer, args = GRPOTrainer, GRPOConfig(folder, **options)
    else:
        trainer, args = KondoGRPOTrainer, KondoGRPOConfig(folder, kondo_gate=gate, **options)
    prompts = [f"word{i} word{i + 1}" for i in range(28)]
    return trainer(
        make_model(),
        reward_funcs=joy,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
    )


def train(steps: int, gate: str | None) -> tuple[list[float], list[dict[str, float]]]:
    """Return the reward of each step, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, steps, gate)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return [log["reward"] for log in logs], logs


def main() -> None:
    """Train both ways and say what it cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gate", default="unbiased:0.25")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    dense, _ = train(options.steps, None)
    gated, logs = train(options.steps, options.gate)
    seen, trained = (
        sum(log[f"kondo/tokens_{what}"] for log in logs) for what in ("seen", "trained")
    )
    print(f"TRL:   reward {dense[0]:.3f} -> {dense[-1]:.3f}, every token trained")
    print(
        f"kondo: reward {gated[0]:.3f} -> {gated[-1]:.3f}, {trained / seen:.1%} of tokens trained"
    )


if __name__ == "__main__":
    main()
