"""REINFORCE with the Kondo gate on a small transformer, in one file.

    python examples/reinforce_small.py [--rate 0.1] [--steps 200]

The task: write four digits backwards. A prompt is answered eight times; an answer is paid for its
correct beginning; advantage = reward - mean of the prompt's answers. The sampler records the
log-probs it sampled with, and these are the gate's screen: what is not worth it is never run
through the model again. Run it with --rate 1 to see what is saved.
"""

import argparse

import torch
from torch import Tensor, nn

import kondo
from kondo.lm import CausalLM, TokenRows

LENGTH, DIGITS, START = 4, 10, 10  # START stands between prompt and answer
PROMPTS, ANSWERS = 16, 8


class Backbone(nn.Module):
    """A causal transformer: token ids -> hidden states [B, T, D]."""

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, width)
        self.places = nn.Embedding(2 * LENGTH + 1, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor
    ) -> Tensor:
        """Return hidden states. Padding, if any, is on the right, so causality hides it."""
        hidden = self.tokens(input_ids) + self.places(position_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.blocks(hidden, mask=mask.to(hidden.device), is_causal=True)


@torch.no_grad()
def sample(backbone: Backbone, head: nn.Linear, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Answer each prompt [N, P]; return the answers and their log-probs, [N, LENGTH] each."""
    ids, log_probs = prompts, []
    for _ in range(LENGTH):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        logits = head(backbone(ids, None, places)[:, -1]).log_softmax(-1)
        token = torch.multinomial(logits.exp(), 1)
        log_probs.append(logits.gather(1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, prompts.shape[1] :], torch.cat(log_probs, 1)


def reward(digits: Tensor, answers: Tensor) -> Tensor:
    """Return the share of each answer that is right up to its first error, [N]."""
    right = answers == digits.flip(1)
    return right.long().cumprod(1).float().mean(1)


def main() -> None:
    """Train, and tell what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rate", type=float, default=0.1)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    backbone, head = Backbone(), nn.Linear(64, DIGITS + 1)
    policy = CausalLM(backbone, head=head)
    optimiser = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=3e-3)
    gate = kondo.UnbiasedGate(rate=chosen.rate)
    seen = trained = empty = 0

    for step in range(1, chosen.steps + 1):
        digits = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(ANSWERS, 0)
        prompts = torch.cat([digits, torch.full((len(digits), 1), START)], 1)
        answers, log_probs = sample(backbone, head, prompts)
        rewards = reward(digits, answers)
        advantages = kondo.advantage.group_mean(rewards, ANSWERS)

        rows = TokenRows.join(prompts, torch.ones_like(prompts), answers, torch.ones_like(answers))
        optimiser.zero_grad()
        report = kondo.backward(
            policy,
            rows,
            advantages,
            gate=gate,
            screen=nn.functional.pad(log_probs, (prompts.shape[1], 0)),
        )
        if report.empty:  # every answer of every prompt was paid the same
            empty += 1
        else:
            optimiser.step()
        seen += rows.input_ids.numel()
        trained += report.tokens_trained
        if step % max(1, chosen.steps // 10) == 0:
            print(f"step {step:4}  reward {rewards.mean():.3f}  {report}", flush=True)
    print(
        f"final reward {rewards.mean():.3f}; trained on {trained:,} of {seen:,} tokens "
        f"({trained / seen:.1%}), {empty} empty steps"
    )


if __name__ == "__main__":
    main()
