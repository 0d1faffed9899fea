"""The baseline of the laboratory's benchmark: one seed, one process, plain PyTorch.

What somebody without the laboratory writes: sample (for sequences without a KV cache: all of the
growing context is read again for each token), weigh, dense backward, Adam. A hard gate is a mask on
the dense loss, as in the author's released code.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.reversal import ReversalTask

MethodName = Literal["DG", "DG-K 3%"]
RATE = 0.03


class Experience(NamedTuple):
    """N rows, T tokens (1 for a bandit)."""

    rows: dict[str, Tensor]
    """What the policy's log_prob takes."""
    log_probs: Tensor
    """[N, T], without a graph."""
    advantages: Tensor
    """[N, 1]."""


def weights(method: MethodName, experience: Experience) -> Tensor:
    """Return the factor of every element's loss: sigmoid(delight), or 1 for the best rows."""
    delight = -experience.log_probs * experience.advantages
    if method == "DG":
        return torch.sigmoid(delight)
    of_rows = delight.sum(dim=1, keepdim=True)
    price = of_rows.topk(round(RATE * len(of_rows)), dim=0).values[-1]
    return (of_rows >= price).float()


def loss(log_probs: Tensor, method: MethodName, experience: Experience) -> Tensor:
    """Return the weighted policy-gradient loss of log_probs [N, T], over all N x T."""
    return -(weights(method, experience) * experience.advantages * log_probs).mean()


class ReversalLoop:
    """Token reversal: `num_prompts` prompts a step, `num_answers` answers to each.

    Args:
        task: the rule.
        policy: trained in place.
        method: the update.
        seed: of prompts and tokens.
        learning_rate: of Adam.
        num_prompts: prompts a step.
        num_answers: answers to each.
    """

    def __init__(
        self,
        task: ReversalTask,
        policy: Decoder,
        *,
        method: MethodName,
        seed: int,
        learning_rate: float,
        num_prompts: int,
        num_answers: int,
    ):
        self.task, self.policy, self.method = task, policy, method
        self.num_prompts, self.num_answers = num_prompts, num_answers
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=learning_rate)
        device = policy.head.weight.device
        self.generator = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def sample(self) -> Experience:
        """Draw prompts, answer them token by token, and pay."""
        task, device = self.task, self.generator.device
        shape = (self.num_prompts, task.prompt_length)
        prompts = torch.randint(task.num_tokens, shape, generator=self.generator, device=device)
        prompts = context = prompts.repeat_interleave(self.num_answers, dim=0)
        taken = []
        for _ in range(task.answer_length):
            log_probs = next_log_probs(self.policy, context)
            token = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
            taken.append(log_probs.gather(1, token))
            context = torch.cat([context, token], dim=1)
        answers = context[:, task.prompt_length :]
        rewards = task.reward(prompts, answers).view(-1, self.num_answers)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)).view(-1, 1)
        rows = {"prompts": prompts, "answers": answers}
        return Experience(rows, torch.cat(taken, dim=1), advantages)

    def log_probs(self, experience: Experience) -> Tensor:
        """Return differentiable log-probs, [N, T]."""
        return self.policy.log_prob(experience.rows)

    def step(self) -> None:
        """Make one update."""
        experience = self.sample()
        self.optimiser.zero_grad()
        loss(self.log_probs(experience), self.method, experience).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()


def next_log_probs(policy: Decoder, context: Tensor) -> Tensor:
    """Return the log-probs [N, M] of the token after context [N, L], which is read as a whole."""
    logits: Tensor = policy.head(policy.backbone(context)[:, -1])
    return logits.log_softmax(dim=-1)


class BanditLoop:
    """An image bandit: one forward with a graph both acts and is differentiated.

    Args:
        task: images and labels.
        policy: trained in place.
        method: the update.
        seed: of images and actions.
        learning_rate: of Adam.
        batch: images a step.
    """

    def __init__(
        self,
        task: ImageBandit,
        policy: MLP,
        *,
        method: MethodName,
        seed: int,
        learning_rate: float,
        batch: int,
    ):
        self.task, self.policy, self.method, self.batch = task, policy, method, batch
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=learning_rate)
        self.generator = torch.Generator(task.data.labels.device).manual_seed(seed)

    def sample(self) -> Experience:
        """Show images, act, and pay; `rows` holds the log-probs of all actions with their graph."""
        data, device = self.task.data, self.generator.device
        shape = (self.batch,)
        drawn = torch.randint(len(data.labels), shape, generator=self.generator, device=device)
        images = data.shown(data.images[drawn])
        every = self.policy(images).log_softmax(dim=-1)
        probs = every.detach().exp()
        actions = torch.multinomial(probs, 1, generator=self.generator)
        rewards = (actions == data.labels[drawn].unsqueeze(1)).float()
        advantages = rewards - probs.square().sum(dim=1, keepdim=True)
        rows = {"actions": actions, "every": every}
        return Experience(rows, every.detach().gather(1, actions), advantages)

    def log_probs(self, experience: Experience) -> Tensor:
        """Return differentiable log-probs, [N, 1]."""
        return experience.rows["every"].gather(1, experience.rows["actions"])

    def step(self) -> None:
        """Make one update."""
        experience = self.sample()
        self.optimiser.zero_grad()
        loss(self.log_probs(experience), self.method, experience).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()


Loop = ReversalLoop | BanditLoop
