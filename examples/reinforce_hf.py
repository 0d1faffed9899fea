"""REINFORCE with the Kondo gate on a Hugging Face model, in one file.

    python examples/reinforce_hf.py [--rate 0.1] [--model PATH] [--steps 200]

The task: repeat the largest of three digits, twice, and stop. Without --model a tiny Qwen2 with
random weights learns it from scratch; with it, any causal LM from a local folder is loaded the
usual way (its tokenizer is not needed: the task speaks in token ids). `generate` samples and
returns the logits it sampled from, so the gate's screen is free.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import kondo
from kondo.lm import CausalLM, TokenRows

PAD, END, ASK, FIRST_DIGIT = 0, 1, 2, 3  # token ids; digit d is FIRST_DIGIT + d
NUM_DIGITS = 10
PROMPTS, ANSWERS, MAX_ANSWER = 16, 8, 4


def load(path: str | None) -> PreTrainedModel:
    """Return a causal LM: from a folder, or tiny and random."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=FIRST_DIGIT + NUM_DIGITS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def make_prompts() -> Tensor:
    """Return [PROMPTS, 4] ids: one to three digits, then ASK; shorter ones padded on the left."""
    digits = FIRST_DIGIT + torch.randint(NUM_DIGITS, (PROMPTS, 3))
    hidden = torch.arange(3) < torch.randint(3, (PROMPTS, 1))
    digits = digits.masked_fill(hidden, PAD)
    return torch.cat([digits, torch.full((PROMPTS, 1), ASK)], 1)


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Answer each prompt; return the answers, which of their tokens were sampled, and log-probs.

    All [N, C]. An answer ends with its first END, which was sampled too.
    """
    made = model.generate(
        input_ids=prompts,
        attention_mask=(prompts != PAD).long(),
        do_sample=True,
        # Whatever the model's generation_config says, sample from what is recorded: the policy.
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=MAX_ANSWER,
        pad_token_id=PAD,
        eos_token_id=END,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = made.sequences[:, prompts.shape[1] :]
    logits = torch.stack(made.logits, 1).float()
    log_probs = logits.log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)
    ended = (answers == END).long().cumsum(1)
    sampled = (ended - (answers == END).long()) == 0
    return answers, sampled, log_probs


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return a third for each right token of: largest, largest, END."""
    largest = prompts[:, :3].max(1).values
    wanted = torch.stack([largest, largest, torch.full_like(largest, END)], 1)
    given = nn.functional.pad(answers, (0, 3), value=PAD)[:, :3]
    return (given == wanted).float().mean(1)


def main() -> None:
    """Train, and tell what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rate", type=float, default=0.1)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--model", help="folder of a causal LM")
    options.add_argument("--lr", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    model = load(chosen.model)
    policy = CausalLM(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=chosen.lr, weight_decay=0.0)
    gate = kondo.UnbiasedGate(rate=chosen.rate)
    seen = trained = empty = 0

    for step in range(1, chosen.steps + 1):
        prompts = make_prompts().repeat_interleave(ANSWERS, 0)
        answers, sampled, log_probs = sample(model, prompts)
        rewards = reward(prompts, answers)

        rows = TokenRows.join(prompts, prompts != PAD, answers, sampled)
        optimiser.zero_grad()
        report = kondo.backward(
            policy,
            rows,
            kondo.advantage.group_mean(rewards, ANSWERS),
            gate=gate,
            screen=nn.functional.pad(log_probs, (prompts.shape[1], 0)),
        )
        if report.empty:  # every answer of every prompt was paid the same
            empty += 1
        else:
            optimiser.step()
        seen += int(rows.attention_mask.sum())
        trained += report.tokens_trained
        if step % max(1, chosen.steps // 10) == 0:
            print(f"step {step:4}  reward {rewards.mean():.3f}  {report}", flush=True)
    print(
        f"final reward {rewards.mean():.3f}; trained on {trained:,} of {seen:,} tokens "
        f"({trained / seen:.1%}), {empty} empty steps"
    )


if __name__ == "__main__":
    main()
