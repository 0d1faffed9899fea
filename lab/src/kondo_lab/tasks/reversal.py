"""Token reversal: read H random tokens out of M, write them in reverse order.

`ReversalTask` is the rule, with the papers' variants. `Reversal` lets one policy act by it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import kondo
from kondo_lab.tasks import seeds
from kondo_lab.tasks.base import Credit, SequenceTask, at_least
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.rollout import Rollout

if TYPE_CHECKING:
    from kondo_lab.models.decoder_module import Decoder


class ReversalTask(SequenceTask):
    """H independent uniform tokens; the target is the prompt backwards or, in a variant, as it is.

    Args:
        length: H.
        num_tokens: M.
        reward: "to_first_error" (Kondo paper) or "bag_of_tokens" (DG paper).
        kappa: see SequenceTask.
        reverse: False copies the prompt.
        increment: True adds 1 to every token of the target, modulo M.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.reversal import ReversalTask
        >>> ReversalTask(length=3, num_tokens=4, increment=True).target(torch.tensor([3, 1, 0]))
        tensor([1, 2, 0])
    """

    def __init__(
        self,
        *,
        length: int,
        num_tokens: int,
        reward: Credit = "to_first_error",
        kappa: float = 1.0,
        reverse: bool = True,
        increment: bool = False,
    ):
        at_least("length", length, 1)
        super().__init__(
            ("reversal" if reverse else "copy") + (" + 1" if increment else ""),
            prompt_length=length,
            answer_length=length,
            num_tokens=num_tokens,
            reward=reward,
            kappa=kappa,
        )
        self.reverse, self.increment = reverse, increment

    def prompts(self, draws: Draws, step: int | Tensor, num_prompts: int) -> Tensor:
        """Return uniform tokens."""
        return draws.integers(
            "task/prompts", step, self.num_tokens, num_prompts, self.prompt_length
        )

    def target(self, prompts: Tensor) -> Tensor:
        """Return the prompt backwards, or its variant."""
        target = prompts.flip(-1) if self.reverse else prompts
        return (target + 1) % self.num_tokens if self.increment else target


class Reversal:
    """Fresh prompts every time, several answers to each, from one policy.

    The advantage is the reward minus the mean reward of the same prompt's answers.

    Args:
        length: H.
        num_tokens: M.
        num_prompts: prompts per rollout.
        num_answers: answers per prompt.
        seed: of the prompts and of the sampled tokens.
        reward: see ReversalTask.
    """

    unit: kondo.Unit = "sequence"

    def __init__(
        self,
        *,
        length: int,
        num_tokens: int,
        num_prompts: int,
        num_answers: int,
        seed: int,
        reward: Credit = "to_first_error",
    ):
        self.rule = ReversalTask(length=length, num_tokens=num_tokens, reward=reward)
        self.num_prompts, self.num_answers = num_prompts, num_answers
        self._prompt_generator = seeds.generator(seed, "prompts")
        self._token_generator = seeds.generator(seed, "tokens")

    def rollout(self, policy: "Decoder") -> Rollout:
        """Draw prompts and let the policy answer each several times."""
        shape = (self.num_prompts, self.rule.prompt_length)
        prompts = torch.randint(self.rule.num_tokens, shape, generator=self._prompt_generator)
        answers, log_probs = policy.sample(
            prompts, self._token_generator, num_answers=self.num_answers
        )
        prompts = prompts.repeat_interleave(self.num_answers, dim=0)
        rewards = self.rule.reward(prompts, answers)
        # Groups by name sum rewards in their order, as the committed results have them; groups by
        # size differ in the last bit.
        groups = torch.arange(len(rewards)) // self.num_answers
        advantages = kondo.advantage.group_mean(rewards, groups)
        return Rollout({"prompts": prompts, "answers": answers}, log_probs, rewards, advantages)

    def held_out_error(self, policy: "Decoder") -> None:
        """Return nothing: every prompt is fresh, so the online error is already held out."""
