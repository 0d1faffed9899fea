"""What the study runs: three tasks, and the sizes of everything."""

import dataclasses
from typing import Any

from kondo_lab.evidence.study import Size, sized
from kondo_lab.studies.control.training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and how it is trained."""

    name: str
    """Lower-case letters, digits and hyphens: it names a part."""
    training: Training
    target: float
    """Return at which the rows differentiated so far are compared."""
    seconds: float
    """Of one run on one core, about: for the time left."""


# REINFORCE with a value baseline: one update per rollout, of all its samples.
CARTPOLE = Task(
    name="cartpole",
    training=Training(
        task="CartPole-v1",
        num_envs=32,
        horizon=100,
        iterations=60,
        gamma=0.99,
        learning_rate=1e-2,
    ),
    target=400.0,
    seconds=6.0,
)
ACROBOT = Task(
    name="acrobot",
    training=Training(
        task="Acrobot-v1",
        num_envs=16,
        horizon=200,
        iterations=60,
        gamma=0.99,
        learning_rate=1e-2,
        reward_scale=0.05,
    ),
    target=-100.0,
    seconds=17.0,
)
# PPO: 10 epochs of 16 minibatches of 256 rows.
PENDULUM = Task(
    name="pendulum",
    training=Training(
        task="Pendulum-v1",
        num_envs=16,
        horizon=256,
        iterations=50,
        gamma=0.9,
        gae_lambda=0.95,
        learning_rate=1e-3,
        epochs=10,
        minibatches=16,
        clip=0.2,
        value_learning_rate=1e-3,
        value_epochs=10,
        value_minibatches=16,
        reward_scale=0.1,
    ),
    target=-250.0,
    seconds=38.0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    tasks: tuple[Task, ...] = (CARTPOLE, ACROBOT, PENDULUM)
    rate: float = 0.1
    """Of every gate with a rate, but the last of the next line."""
    delight_rates: tuple[float, ...] = (0.1, 0.03)
    """Of the gate by delight."""
    noises: tuple[float, ...] = (1.5, 3.0)
    seeds: int = 10
    first_seed: int = 0
    points: int = 30
    """Logged points of a run, the last iteration included."""


def _short(task: Task, **changes: Any) -> Task:
    training = dataclasses.replace(task.training, **changes)
    return dataclasses.replace(task, training=training, seconds=1.0)


SMALL = Settings(
    tasks=(
        _short(CARTPOLE, iterations=4, horizon=60),
        _short(ACROBOT, iterations=3, num_envs=2),
        _short(PENDULUM, iterations=2, num_envs=2, epochs=2, minibatches=2),
    ),
    seeds=2,
    points=4,
)


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size."""
    return sized(size, Settings(), SMALL, seeds=seeds)
