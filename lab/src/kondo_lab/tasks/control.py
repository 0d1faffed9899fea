"""Vector environments of Gymnasium, and what a policy does in them.

    reset -> (observe -> sample actions -> step) x T -> Rollout      observations carry over

Environments reset themselves: the step after an episode's end ignores its action and returns the
first observation of the next episode. Such a step is no sample: `Rollout.counts` is False there.

Shapes: T steps, E environments, D numbers of an observation.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

EPISODES = 100
"""Last episodes whose mean return is the quality of a policy."""


class Sampled(NamedTuple):
    """What a policy did with E observations."""

    actions: Tensor
    """[E] int64, or [E, A] float."""
    log_probs: Tensor
    """[E]."""
    entropy: Tensor
    """[E], of the policy that sampled."""


Act = Callable[[Tensor], Sampled]
"""Observations [E, D] -> what to do."""


class Rollout(NamedTuple):
    """T steps of E environments."""

    observations: Tensor
    """[T + 1, E, D]: before every step, and after the last."""
    actions: Tensor
    """[T, E] int64, or [T, E, A] float."""
    log_probs: Tensor
    """[T, E], by the policy that sampled."""
    rewards: Tensor
    """[T, E]."""
    terminated: Tensor
    """[T, E] bool: the episode ended here, and nothing is worth anything afterwards."""
    ended: Tensor
    """[T, E] bool: terminated, or cut off by a time limit."""
    counts: Tensor
    """[T, E] bool: the action was taken."""
    entropy: float
    """Of the policy, mean over the steps."""


class Environments:
    """E copies of a task, stepped together.

    Args:
        name: as Gymnasium calls it.
        num_envs: E.
        seed: of the copies' own random numbers.
    """

    def __init__(self, name: str, *, num_envs: int, seed: int):
        self._env = make(name, num_envs)
        observations, _ = self._env.reset(seed=seed)
        self._observations = torch.as_tensor(observations, dtype=torch.float32)
        self._resets = np.zeros(num_envs, dtype=bool)
        self._running = np.zeros(num_envs)
        self._returns: deque[float] = deque(maxlen=EPISODES)
        self.episodes = 0
        """Episodes that ended so far."""

    @property
    def num_inputs(self) -> int:
        """Numbers of an observation."""
        return int(self._env.single_observation_space.shape[0])

    @property
    def continuous(self) -> bool:
        """Whether an action is a vector of numbers."""
        return hasattr(self._env.single_action_space, "low")

    @property
    def num_outputs(self) -> int:
        """Actions to choose from, or numbers of a continuous action."""
        space = self._env.single_action_space
        return int(space.shape[0]) if self.continuous else int(space.n)

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 episodes, without a discount; NaN before the first end."""
        return float(np.mean(self._returns)) if self._returns else float("nan")

    @torch.no_grad()
    def rollout(self, act: Act, steps: int) -> Rollout:
        """Take this many steps in every copy."""
        seen, made, outcomes = [self._observations], [], []
        for _ in range(steps):
            sampled = act(seen[-1])
            outcomes.append(self._step(sampled.actions.numpy()))
            made.append(sampled)
            seen.append(self._observations)
        rewards, terminated, ended, counts = (
            np.stack(each) for each in zip(*outcomes, strict=True)
        )
        actions, log_probs, entropy = (torch.stack(each) for each in zip(*made, strict=True))
        return Rollout(
            observations=torch.stack(seen),
            actions=actions,
            log_probs=log_probs,
            rewards=torch.as_tensor(rewards, dtype=torch.float32),
            terminated=torch.as_tensor(terminated),
            ended=torch.as_tensor(ended),
            counts=torch.as_tensor(counts),
            entropy=float(entropy.mean()),
        )

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        observations, rewards, terminated, truncated, _ = self._env.step(actions)
        ended, counts = terminated | truncated, ~self._resets
        self._running += rewards
        for place in np.flatnonzero(ended):
            self._returns.append(float(self._running[place]))
            self.episodes += 1
        self._running[ended] = 0.0
        self._resets = ended
        self._observations = torch.as_tensor(observations, dtype=torch.float32)
        return rewards, terminated, ended, counts


def make(name: str, num_envs: int) -> Any:
    """Return E copies of a task that reset in the step after an episode's end.

    Raises:
        ImportError: Gymnasium is not installed.
    """
    try:
        import gymnasium  # an extra: the list of studies must not need it
    except ImportError as error:
        raise ImportError(
            "control tasks need Gymnasium: pip install 'kondo-lab[control]'."
        ) from error
    own = gymnasium.spec(name).vector_entry_point is not None
    mode = "vector_entry_point" if own else "sync"
    env = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode=mode)
    assert env.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.NEXT_STEP
    return env
