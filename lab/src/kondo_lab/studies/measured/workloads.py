"""What is timed: a policy, its Adam, and a source of experience, all on one device.

Pixels and labels are random, since no time depends on them; actions, rewards and advantages are
those the policy earns, so that delight has the spread it has at the start of training.
"""

import dataclasses
from collections.abc import Callable

import torch

import kondo
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.studies.measured import settings
from kondo_lab.tasks import seeds
from kondo_lab.tasks.base import label_reward
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.tasks.rollout import Rollout

SEED = 0
NUM_IMAGES = 10_000
"""Drawn from at every step, as a training set is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One policy that every method of a round trains in turn."""

    policy: MLP | Decoder
    optimiser: torch.optim.Adam
    rollout: Callable[[], Rollout]
    unit: kondo.Unit
    rows: int


Made = tuple[MLP | Decoder, Callable[[], Rollout], kondo.Unit]


def build(shape: settings.Shape, *, learning_rate: float, device: torch.device) -> Workload:
    """Return the workload of this shape."""
    generator = torch.Generator(device).manual_seed(SEED)
    if isinstance(shape, settings.BanditShape):
        policy, rollout, unit = _bandit(shape, generator)
    else:
        policy, rollout, unit = _reversal(shape, generator)
    optimiser = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    return Workload(policy=policy, optimiser=optimiser, rollout=rollout, unit=unit, rows=shape.rows)


def _bandit(shape: settings.BanditShape, generator: torch.Generator) -> Made:
    weights, device = seeds.generator(SEED, "weights"), generator.device
    pixels, num_digits = settings.NUM_PIXELS, settings.NUM_DIGITS
    policy = MLP(pixels, num_digits, width=shape.width, generator=weights).to(device)
    images = torch.rand(NUM_IMAGES, pixels, generator=generator, device=device)
    labels = torch.randint(num_digits, (NUM_IMAGES,), generator=generator, device=device)

    def rollout() -> Rollout:
        drawn = torch.randint(NUM_IMAGES, (shape.batch,), generator=generator, device=device)
        shown = images[drawn]
        actions, log_probs, probs = policy.sample(shown, generator)
        rewards = label_reward(labels[drawn], actions)
        advantages = kondo.advantage.expected_confidence(rewards, probs)
        return Rollout({"images": shown, "actions": actions}, log_probs, rewards, advantages)

    return policy, rollout, "sample"


def _reversal(shape: settings.ReversalShape, generator: torch.Generator) -> Made:
    device = generator.device
    policy = Decoder.fresh(
        Architecture(
            width=shape.width,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            ff_width=4 * shape.width,
        ),
        prompt_length=shape.length,
        num_tokens=shape.num_tokens,
        generator=seeds.generator(SEED, "weights"),
    ).to(device)
    task = ReversalTask(length=shape.length, num_tokens=shape.num_tokens)

    def rollout() -> Rollout:
        asked = (shape.num_prompts, shape.length)
        prompts = torch.randint(shape.num_tokens, asked, generator=generator, device=device)
        answers, log_probs = policy.sample(prompts, generator, num_answers=shape.num_answers)
        prompts = prompts.repeat_interleave(shape.num_answers, dim=0)
        rewards = task.reward(prompts, answers)
        advantages = kondo.advantage.group_mean(rewards, shape.num_answers)
        return Rollout({"prompts": prompts, "answers": answers}, log_probs, rewards, advantages)

    return policy, rollout, "sequence"
