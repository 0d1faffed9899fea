"""What a run is made of: a task and a policy, and how many actors do what how fast.

Both are plain Python. Factories travel to the actors through Ray; everything that comes back is
checked against the limits given here before the learner looks at it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

import kondo
from kondo.arguments import check_flag, check_number, check_whole


class Rollout(Protocol):
    """One batch of experience: N samples, each one row and one reward."""

    @property
    def rows(self) -> dict[str, Tensor]:
        """What the policy's log_prob takes, N rows."""

    @property
    def log_probs(self) -> Tensor:
        """[N] or [N, T] float: those the policy sampled with."""

    @property
    def rewards(self) -> Tensor:
        """[N] float."""

    @property
    def advantages(self) -> Tensor:
        """[N] float, centred only."""


class Task(Protocol):
    """A source of experience; the laboratory's tasks are such."""

    unit: kondo.Unit
    """What the gate keeps or skips here."""

    def rollout(self, policy: Any) -> Rollout:
        """Draw inputs, let the policy act, return rewards and advantages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A task and a policy for it.

    Example:
        >>> setup = Setup(
        ...     name="mine",
        ...     make_task=lambda seed: ...,
        ...     make_policy=lambda seed: ...,
        ...     samples=100,
        ...     limits={"actions": (0, 9), "images": (0, 1)},
        ... )
    """

    name: str
    """Title of the live display."""
    make_task: Callable[[int], Task]
    """seed -> a task; no two actors, also restarted ones, get the same seed."""
    make_policy: Callable[[int], Any]
    """seed -> an `nn.Module` with log_prob(rows) -> differentiable log-probs, [N] or [N, T]; actors
    replace its weights by the learner's."""
    samples: int
    """Samples of every rollout, N: what a dead actor loses can then be counted."""
    limits: Mapping[str, tuple[float, float]]
    """Lowest and highest value of each of the rows' fields, both allowed. Fields of whole numbers
    need them: an id out of range would crash the policy."""
    reward_limits: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward that is accepted."""
    max_advantage: float = 1.0
    """Largest |advantage| that is accepted; with centred rewards, the width of their limits."""

    def __post_init__(self) -> None:
        _check_at_least(1, samples=self.samples)
        for name, (low, high) in {**self.limits, "reward_limits": self.reward_limits}.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(
                    f"limits must be finite with lowest <= highest, got {(low, high)} for {name}."
                )
        _check_positive(max_advantage=self.max_advantage)


# Rollout processes count from 1: seed 0 of a run is the learner's own.
_SEEDS_PER_RUN = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run it."""

    actors: int = 2
    """Rollout processes."""
    steps: int = 100
    """Updates of the learner."""
    gate: Any = "delight:0.03"
    """What is trained on: a gate, or its text for `kondo.parse_gate`. Actors know what to send for
    `Gate(rate=)`, `Gate(price=)` and `UnbiasedGate` without further options that need all units at
    once; for any other gate they send everything, and the learner gates. The price for a rate, or
    for a noise, follows the values of recent rollouts."""
    at_source: bool = True
    """Whether actors send only what the price buys; else everything, and the learner gates."""
    rollouts_per_step: int = 1
    """Rollouts that make one update."""
    queue: int = 2
    """Rollouts an actor may have ordered but not yet trained on; then it waits."""
    publish_every: int = 1
    """Updates from one published version of the weights to the next."""
    loss: Callable[..., Tensor] = kondo.losses.pg
    """Per-element loss; see `kondo.losses`."""
    behaviour_input: str | None = None
    """Name by which the loss takes the log-probs the actor sampled with, if it takes them:
    "behaviour_log_probs" for `kondo.losses.is_pg`, "old_log_probs" for `kondo.losses.ppo`."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    micro_batch: int | None = None
    """Rows per forward and backward; all kept rows at once if None."""
    seed: int = 0
    """Names the run; below 2^31."""
    sketch_size: int = 4
    """Accuracy of an actor's sketch of its values (REQ's k), even and from 4 to 1024."""
    window: int = 4
    """Recent rollouts whose values set the price: more are smoother, and lag behind."""
    checkpoint_every: int = 20
    """Updates between checkpoints; the rollouts since the last one are kept for a replay."""
    spares: int = 2
    """Processes kept ready to replace ones that die: starting one takes seconds."""
    rollout_timeout: float = 30.0
    """Seconds after which an actor that has delivered nothing is taken to hang."""
    step_timeout: float = 120.0
    """Seconds after which a learner that has not finished a step is taken to hang. The first step
    of a process may take `start_timeout` longer: it may compile."""
    start_timeout: float = 120.0
    """Seconds a process may take to start."""
    max_failures: int = 5
    """Times in a row a process may die before it delivers anything; then the run ends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", kondo.parse_gate(self.gate))
        names = (
            *("actors", "steps", "rollouts_per_step", "queue"),
            *("publish_every", "window", "checkpoint_every", "max_failures"),
        )
        _check_at_least(1, **{name: getattr(self, name) for name in names})
        _check_at_least(0, seed=self.seed, spares=self.spares)
        _check_positive(learning_rate=self.learning_rate)
        for name in ("rollout_timeout", "step_timeout", "start_timeout"):
            if not check_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        check_flag("at_source", self.at_source)
        if self.seed >= 2**31:
            raise ValueError(
                f"seed must be at most {2**31 - 1}, got {self.seed}: seeds of processes follow "
                f"from it, and a generator takes 64 bits."
            )
        if not 4 <= check_whole("sketch_size", self.sketch_size) <= 1024 or self.sketch_size % 2:
            raise ValueError(f"sketch_size must be even, from 4 to 1024, got {self.sketch_size}.")
        if self.queue * self.actors < self.rollouts_per_step:
            raise ValueError(
                f"rollouts_per_step must be at most queue * actors ({self.queue * self.actors}), "
                f"got {self.rollouts_per_step}: a step would wait for ever."
            )


def process_seed(seed: int, incarnation: int) -> int:
    """Return the seed of a process of run `seed`: 0 is the learner, rollout processes count from 1.

    Example:
        >>> incarnation_of(process_seed(7, 3))
        3
    """
    return seed * _SEEDS_PER_RUN + incarnation


def incarnation_of(seed: int) -> int:
    """Return which process of its run has this seed; the inverse of `process_seed`."""
    return seed % _SEEDS_PER_RUN


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if check_whole(name, value) < least:
            raise ValueError(f"{name} must be >= {least}, got {value}.")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < check_number(name, value) < math.inf:
            raise ValueError(f"{name} must be finite and positive, got {value}.")
