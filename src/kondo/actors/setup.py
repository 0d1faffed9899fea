"""What a run is made of: a task and a policy, and how many actors do what how fast.

Both are plain Python. Factories travel to the actors through Ray; everything that comes back is
checked against the limits given here before the learner looks at it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

import kondo
from kondo.arguments import check_flag, check_number, check_optional, check_whole


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


class Policy(Protocol):
    """What the learner trains and the actors act with; any `nn.Module` with a log_prob."""

    def log_prob(self, rows: dict[str, Tensor]) -> Tensor:
        """Return differentiable log-probs of the rows' actions, [N] or [N, T]."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield what is trained."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take the weights that were published."""


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
    make_policy: Callable[[int], Policy]
    """seed -> a policy; actors replace its weights by the learner's."""
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
        at_least("samples", self.samples, 1)
        for name, (low, high) in {**self.limits, "reward_limits": self.reward_limits}.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(
                    f"limits must be finite with lowest <= highest, got {(low, high)} for {name}."
                )
        if not 0 < self.max_advantage < math.inf:
            raise ValueError(f"max_advantage must be positive, got {self.max_advantage}.")


# Rollout processes count from 1: seed 0 of a run is the learner's own.
_SEEDS_PER_RUN = 1 << 32
MAX_SEED = 2**31 - 1
"""Of a run: seeds of its processes fit 63 bits, which every generator takes."""

_AT_LEAST_ONE = (
    *("actors", "steps", "rollouts_per_step", "queue"),
    *("publish_every", "window", "checkpoint_every", "max_failures"),
)
_TIMEOUTS = ("rollout_timeout", "step_timeout", "start_timeout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run it. Give exactly one of `rate`, `noise` and `price`."""

    actors: int = 2
    """Rollout processes."""
    steps: int = 100
    """Updates of the learner."""
    gate: Literal["delight", "unbiased"] = "delight"
    """What is trained on: "delight", the units of highest delight; "unbiased", a random draw by the
    size of the gradient, weighted so that the mean gradient is that of all units."""
    rate: float | None = 0.03
    """Share of the units to train on; the price for it follows the values of recent rollouts."""
    noise: float | None = None
    """Instead of a rate, for gate "unbiased": expected sum of squared gradients, as a multiple of
    that of all units."""
    price: float | None = None
    """Instead of a rate, for gate "delight": a fixed price."""
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
    """Of Adam."""
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
    actor_cpus: float = 0.0
    """CPUs Ray reserves per actor; 0 starts them whatever the machine has."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.seed > MAX_SEED:
            raise ValueError(
                f"seed must be at most {MAX_SEED}, got {self.seed}: seeds of processes follow from "
                f"it, and a generator takes 64 bits."
            )
        at_least("spares", self.spares, 0)
        for name in _AT_LEAST_ONE:
            at_least(name, getattr(self, name), 1)
        for name in ("rate", "noise", "price"):
            check_optional(name, getattr(self, name))
        for name in ("learning_rate", "actor_cpus", *_TIMEOUTS):
            check_number(name, getattr(self, name))
        check_flag("at_source", self.at_source)
        if not 4 <= check_whole("sketch_size", self.sketch_size) <= 1024 or self.sketch_size % 2:
            raise ValueError(f"sketch_size must be even, from 4 to 1024, got {self.sketch_size}.")
        self._check_gate()
        if not self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be finite, got {self.learning_rate}.")
        for name in (*_TIMEOUTS, "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.queue * self.actors < self.rollouts_per_step:
            raise ValueError(
                f"rollouts_per_step must be at most queue * actors ({self.queue * self.actors}), "
                f"got {self.rollouts_per_step}: a step would wait for ever."
            )

    def _check_gate(self) -> None:
        if self.gate not in ("delight", "unbiased"):
            raise ValueError(f'gate must be "delight" or "unbiased", got {self.gate!r}.')
        if [self.rate, self.noise, self.price].count(None) != 2:
            raise ValueError(
                f"give exactly one of rate, noise and price, got rate={self.rate}, "
                f"noise={self.noise}, price={self.price}; rate=None, price=0.0 keeps positive "
                f"delight."
            )
        for name, gate in (("noise", "unbiased"), ("price", "delight")):
            if getattr(self, name) is not None and self.gate != gate:
                raise ValueError(
                    f'{name} must be None with gate "{self.gate}", got {getattr(self, name)}; '
                    f'give a rate, or set gate="{gate}".'
                )
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"rate must lie in (0, 1], got {self.rate}; 0.03 keeps 3%.")
        if self.noise is not None and not 1 <= self.noise < math.inf:
            raise ValueError(f"noise must be finite and at least 1, got {self.noise}.")
        if self.price is not None and math.isnan(self.price):
            raise ValueError("price must be a number, got nan; 0.0 keeps positive delight.")


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


def at_least(name: str, value: int, least: int) -> None:
    """Raise unless it is a whole number >= least."""
    if check_whole(name, value) < least:
        raise ValueError(f"{name} must be >= {least}, got {value}.")
