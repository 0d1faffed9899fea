"""Policy-gradient training in vector environments, with `kondo.backward` as its backward.

    rollout -> advantages (GAE) -> policy: epochs of gated minibatches -> value: the same, dense

One pass over the whole rollout with gae_lambda = 1 and no clip is REINFORCE with a value baseline;
several epochs of minibatches with a clip are PPO. The gate decides on which rows the policy is
differentiated. The value function is always trained on all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kondo
from kondo_lab.models.actor_critic import Actor, tanh_network
from kondo_lab.tasks import seeds
from kondo_lab.tasks.control import Environments, Rollout

MakeGate = Callable[[torch.Generator], kondo.BaseGate | None]
"""Generator for a signal's own draws -> a gate, or None for dense."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a task is trained: all but the gate and the seed."""

    task: str
    """As Gymnasium calls it."""
    num_envs: int
    horizon: int
    """Steps of each environment in an iteration."""
    iterations: int
    gamma: float
    gae_lambda: float = 1.0
    learning_rate: float
    """Of Adam, for the policy."""
    epochs: int = 1
    """Passes over a rollout, by the policy."""
    minibatches: int = 1
    clip: float | None = None
    """Of PPO's loss; None for the plain policy gradient."""
    value_learning_rate: float = 3e-3
    value_epochs: int = 5
    value_minibatches: int = 4
    reward_scale: float = 1.0
    """Rewards are multiplied by it before anything is learned from them."""
    width: int = 64

    @property
    def batch(self) -> int:
        """Steps of an iteration, all environments together."""
        return self.num_envs * self.horizon


class Samples(NamedTuple):
    """The steps of a rollout that count, in one dimension."""

    observations: Tensor
    """[N, D]."""
    actions: Tensor
    """[N] or [N, A]."""
    log_probs: Tensor
    """[N], when they were sampled."""
    advantages: Tensor
    """[N], centred."""
    value_targets: Tensor
    """[N]."""


class Progress(NamedTuple):
    """Where a run stands after an iteration."""

    iteration: int
    samples: int
    """Steps that count so far."""
    passes: int
    """Rows the policy was shown so far: samples times epochs."""
    differentiated: int
    """Rows of them that a backward pass was paid for."""
    mean_return: float
    """Of the last 100 episodes."""
    entropy: float
    """Of the policy in this iteration."""
    rate: float
    """Rows differentiated / rows shown, in this iteration."""
    cosine: float
    """Of the gated gradient and the dense one in the first minibatch; NaN where they were not
    compared, or nothing was kept."""
    gradient_error: float
    """Squared distance of the two over the squared norm of the dense one; NaN where they were not
    compared."""


class Likeness(NamedTuple):
    """How a gated gradient compares with the dense one of the same rows."""

    cosine: float
    error: float
    """Squared distance over the squared norm of the dense one."""


class Run:
    """One training run.

    Args:
        training: how.
        make_gate: what decides which rows are differentiated.
        seed: of everything that is drawn. Runs of one seed begin with the same weights and
            environments, whatever the gate.
    """

    def __init__(self, training: Training, make_gate: MakeGate, seed: int):
        self._training, self.seed = training, seed
        env_seed = int(torch.randint(2**31, (), generator=seeds.generator(seed, "environments")))
        self._environments = Environments(training.task, num_envs=training.num_envs, seed=env_seed)
        draw = partial(seeds.generator, seed)
        env, weights = self._environments, draw("weights")
        self._actor = Actor(
            env.num_inputs,
            env.num_outputs,
            continuous=env.continuous,
            width=training.width,
            generator=weights,
        )
        self._value = tanh_network(env.num_inputs, 1, width=training.width, generator=weights)
        self._policy = kondo.DistributionPolicy(self._actor)
        self._act = partial(self._actor.act, generator=draw("actions"))
        self._order = draw("minibatches")
        self._gate = make_gate(draw("signal"))
        self._options = kondo.Options(generator=draw("gate"))
        self._optimiser = torch.optim.Adam(self._actor.parameters(), lr=training.learning_rate)
        self._value_optimiser = torch.optim.Adam(
            self._value.parameters(), lr=training.value_learning_rate
        )
        self._samples = self._passes = self._differentiated = 0

    def train(self, compared: Collection[int] = ()) -> Iterator[Progress]:
        """Train, and yield where it stands after every iteration.

        Args:
            compared: iterations in which the gated gradient is compared with the dense one.
        """
        for iteration in range(1, self._training.iterations + 1):
            rollout = self._environments.rollout(self._act, self._training.horizon)
            samples = self._prepare(rollout)
            shown, paid, likeness = self._train_policy(samples, iteration in compared)
            self._train_value(samples)
            self._samples += samples.advantages.numel()
            self._passes += shown
            self._differentiated += paid
            yield Progress(
                iteration,
                self._samples,
                self._passes,
                self._differentiated,
                self._environments.mean_return,
                rollout.entropy,
                paid / shown,
                *likeness,
            )

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> Samples:
        """Return the samples of a rollout with centred advantages."""
        values = self._value(rollout.observations).squeeze(-1)
        advantages = gae(
            self._training.reward_scale * rollout.rewards,
            values,
            terminated=rollout.terminated,
            ended=rollout.ended,
            gamma=self._training.gamma,
            gae_lambda=self._training.gae_lambda,
        )
        counts = rollout.counts
        observations, own = rollout.observations[:-1][counts], advantages[counts]
        return Samples(
            observations,
            rollout.actions[counts],
            rollout.log_probs[counts],
            own - own.mean(),
            own + values[:-1][counts],
        )

    def _train_policy(self, samples: Samples, look: bool) -> tuple[int, int, Likeness]:
        """Return rows shown, rows differentiated, and if asked for how the gradients compare."""
        shown = paid = 0
        likeness = Likeness(math.nan, math.nan)
        for _ in range(self._training.epochs):
            for rows in self._minibatches(samples.advantages.numel(), self._training.minibatches):
                some = Samples(*(part[rows] for part in samples))
                first = look and not shown
                if first:
                    self._differentiate(some, None)
                    dense = self._gradient()
                report = self._differentiate(some, self._gate)
                if first:
                    likeness = compare(self._gradient(), dense)
                shown, paid = shown + report.rows_seen, paid + report.rows_trained
                if not report.empty:
                    self._optimiser.step()
        return shown, paid, likeness

    def _differentiate(self, some: Samples, gate: kondo.BaseGate | None) -> kondo.Report:
        """Leave a minibatch's gradient in `.grad`: 0 or nothing where nothing is kept."""
        self._optimiser.zero_grad(set_to_none=False)
        clip = self._training.clip
        return kondo.backward(
            self._policy,
            (some.observations, some.actions),
            some.advantages,
            gate=gate,
            loss=kondo.losses.pg if clip is None else partial(kondo.losses.ppo, clip=clip),
            loss_inputs=None if clip is None else {"old_log_probs": some.log_probs},
            options=self._options,
        )

    def _gradient(self) -> Tensor:
        """Return a copy of the policy's gradient in one dimension."""
        each = self._actor.parameters()
        found = (torch.zeros_like(p) if p.grad is None else p.grad for p in each)
        return torch.cat([gradient.flatten() for gradient in found])

    def _train_value(self, samples: Samples) -> None:
        size = samples.advantages.numel()
        for _ in range(self._training.value_epochs):
            for rows in self._minibatches(size, self._training.value_minibatches):
                found = self._value(samples.observations[rows]).squeeze(-1)
                loss = (found - samples.value_targets[rows]).square().mean()
                self._value_optimiser.zero_grad()
                loss.backward()
                self._value_optimiser.step()

    def _minibatches(self, size: int, number: int) -> tuple[Tensor, ...]:
        """Return all rows in random order, in pieces of equal size."""
        return torch.randperm(size, generator=self._order).chunk(number)


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return generalised advantages, [T, E].

    delta_t = r_t + gamma V(s_t+1) - V(s_t),   A_t = delta_t + gamma gae_lambda A_t+1

    V(s_t+1) is 0 where the episode terminated, and A_t+1 is where it ended in any way.

    Args:
        rewards: [T, E] float.
        values: [T + 1, E] float: before every step, and after the last.
        terminated: [T, E] bool.
        ended: [T, E] bool: terminated, or cut off by a time limit.
        gamma: discount.
        gae_lambda: 1 for the discounted return less the value, 0 for one step.

    Example:
        >>> import torch
        >>> from kondo_lab.studies.control.training import gae
        >>> never = torch.zeros(2, 1, dtype=torch.bool)
        >>> values = torch.tensor([[1.0], [1.0], [4.0]])
        >>> ends = {"terminated": never, "ended": never}
        >>> gae(torch.ones(2, 1), values, **ends, gamma=0.5, gae_lambda=1.0).squeeze(1)
        tensor([1.5000, 2.0000])

    Reference: https://arxiv.org/abs/1506.02438, equation 16
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    carried = gamma * gae_lambda * (~ended).to(deltas)
    advantages, following = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        following = deltas[step] + carried[step] * following
        advantages[step] = following
    return advantages


def compare(gated: Tensor, dense: Tensor) -> Likeness:
    """Return how two gradients in one dimension compare."""
    cosine = gated @ dense / (gated.norm() * dense.norm())
    return Likeness(float(cosine), float((gated - dense).square().sum() / dense.square().sum()))
