"""Token reversal: read H random tokens out of M, write them in reverse order.

Two rewards: `to_first_error`, the Kondo paper's, pays for the correct prefix only;
`bag_of_tokens`, the DG paper's, pays for every correct token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import kondo
from kondo.engine.select import Unit
from kondo.lab import seeds
from kondo.lab.policies import Transformer
from kondo.lab.tasks.rollout import Rollout

Reward = Callable[[Tensor, Tensor], Tensor]


def to_first_error(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the length of the correct prefix over H, [N].

    Args:
        prompts: [N, H] int64.
        answers: [N, H] int64; right where they equal the prompt read backwards.

    Example:
        >>> import torch
        >>> from kondo.lab.tasks.reversal import to_first_error
        >>> to_first_error(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[1, 0, 0, 0]]))
        tensor([0.2500])
    """
    correct = answers == prompts.flip(1)
    return correct.cumprod(dim=1).float().mean(dim=1)


def bag_of_tokens(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the share of correct tokens, [N].

    Args:
        prompts: [N, H] int64.
        answers: [N, H] int64.

    Example:
        >>> import torch
        >>> from kondo.lab.tasks.reversal import bag_of_tokens
        >>> bag_of_tokens(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[1, 0, 0, 0]]))
        tensor([0.7500])
    """
    correct = answers == prompts.flip(1)
    return correct.float().mean(dim=1)


class Reversal:
    """Fresh prompts every time, several answers to each.

    The advantage is the reward minus the mean reward of the same prompt's answers.

    Args:
        length: H.
        num_tokens: M.
        num_prompts: prompts per rollout.
        num_answers: answers per prompt.
        seed: of the prompts and of the sampled tokens.
        reward: (prompts, answers) -> [N].
    """

    unit: Unit = "sequence"

    def __init__(
        self,
        *,
        length: int,
        num_tokens: int,
        num_prompts: int,
        num_answers: int,
        seed: int,
        reward: Reward = to_first_error,
    ):
        self.length, self.num_tokens = length, num_tokens
        self.num_prompts, self.num_answers = num_prompts, num_answers
        self.reward = reward
        self._prompt_generator = seeds.generator(seed, "prompts")
        self._token_generator = seeds.generator(seed, "tokens")

    def rollout(self, policy: Transformer) -> Rollout:
        """Draw prompts and let the policy answer each several times."""
        shape = (self.num_prompts, self.length)
        prompts = torch.randint(self.num_tokens, shape, generator=self._prompt_generator)
        answers, log_probs = policy.sample(
            prompts, self._token_generator, num_answers=self.num_answers
        )
        prompts = prompts.repeat_interleave(self.num_answers, dim=0)
        rewards = self.reward(prompts, answers)
        advantages = kondo.advantage.group_mean(rewards, self.num_answers)
        return Rollout({"prompts": prompts, "answers": answers}, log_probs, rewards, advantages)

    def held_out_error(self, policy: Transformer) -> None:
        """Return nothing: every prompt is fresh, so the online error is already held out."""
