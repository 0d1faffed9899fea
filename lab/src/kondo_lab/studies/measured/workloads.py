"""What is timed: a policy, its Adam, and a source of experience, all on one device.

Pixels and labels are random, since no time depends on them; actions, rewards and advantages are
those the policy earns, so that delight has the spread it has at the start of training.
"""

import dataclasses
from collections.abc import Callable

import torch

import kondo
from kondo.engine.select import Unit
from kondo_lab import seeds
from kondo_lab.policies import MLP, Transformer
from kondo_lab.studies.measured.settings import (
    NUM_DIGITS,
    NUM_PIXELS,
    BanditShape,
    ReversalShape,
    Shape,
)
from kondo_lab.tasks.base import label_reward
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.tasks.rollout import Rollout

SEED = 0
NUM_IMAGES = 10_000
"""Drawn from at every step, as a training set is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One policy that every method of a round trains in turn."""

    policy: MLP | Transformer
    optimiser: torch.optim.Adam
    rollout: Callable[[], Rollout]
    unit: Unit
    rows: int


def build(shape: Shape, *, learning_rate: float, device: torch.device) -> Workload:
    """Return the workload of this shape."""
    if isinstance(shape, BanditShape):
        return _bandit(shape, learning_rate, device)
    return _reversal(shape, learning_rate, device)


def _bandit(shape: BanditShape, learning_rate: float, device: torch.device) -> Workload:
    weights = seeds.generator(SEED, "weights")
    policy = MLP(NUM_PIXELS, NUM_DIGITS, width=shape.width, generator=weights).to(device)
    generator = torch.Generator(device).manual_seed(SEED)
    images = torch.rand(NUM_IMAGES, NUM_PIXELS, generator=generator, device=device)
    labels = torch.randint(NUM_DIGITS, (NUM_IMAGES,), generator=generator, device=device)

    def rollout() -> Rollout:
        drawn = torch.randint(NUM_IMAGES, (shape.batch,), generator=generator, device=device)
        shown = images[drawn]
        actions, log_probs, probs = policy.sample(shown, generator)
        rewards = label_reward(labels[drawn], actions)
        advantages = kondo.advantage.expected_confidence(rewards, probs)
        return Rollout({"images": shown, "actions": actions}, log_probs, rewards, advantages)

    return Workload(
        policy=policy,
        optimiser=torch.optim.Adam(policy.parameters(), lr=learning_rate),
        rollout=rollout,
        unit="sample",
        rows=shape.rows,
    )


def _reversal(shape: ReversalShape, learning_rate: float, device: torch.device) -> Workload:
    policy = Transformer(
        prompt_length=shape.length,
        num_tokens=shape.num_tokens,
        width=shape.width,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        ff_width=4 * shape.width,
        generator=seeds.generator(SEED, "weights"),
    ).to(device)
    task = ReversalTask(length=shape.length, num_tokens=shape.num_tokens)
    generator = torch.Generator(device).manual_seed(SEED)

    def rollout() -> Rollout:
        asked = (shape.num_prompts, shape.length)
        prompts = torch.randint(shape.num_tokens, asked, generator=generator, device=device)
        answers, log_probs = policy.sample(prompts, generator, num_answers=shape.num_answers)
        prompts = prompts.repeat_interleave(shape.num_answers, dim=0)
        rewards = task.reward(prompts, answers)
        advantages = kondo.advantage.group_mean(rewards, shape.num_answers)
        return Rollout({"prompts": prompts, "answers": answers}, log_probs, rewards, advantages)

    return Workload(
        policy=policy,
        optimiser=torch.optim.Adam(policy.parameters(), lr=learning_rate),
        rollout=rollout,
        unit="sequence",
        rows=shape.rows,
    )
