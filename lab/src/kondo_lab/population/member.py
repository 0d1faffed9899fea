"""What a member of a population is: a seed, a learning rate, an update rule, and its frictions."""

import dataclasses
import math
from typing import Literal

LossName = Literal["pg", "is_pg", "ppo", "pmpo", "exact_pg", "cross_entropy"]
GateName = Literal["dense", "soft", "quantile", "top", "price", "draw", "rolling"]
PriorityName = Literal["delight", "advantage", "abs_advantage", "surprisal", "uniform", "additive"]
BaselineName = Literal["expected", "zero", "constant", "oracle"]
ScreenName = Literal["exact", "stale", "quantised", "narrow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """One way to update a policy. The defaults are PG.

    | gate       | keeps                                                                     |
    |------------|---------------------------------------------------------------------------|
    | `dense`    | everything, weight 1: PG, PPO, PMPO, cross-entropy                        |
    | `soft`     | everything, weight sigmoid(priority / temperature): DG                    |
    | `quantile` | priority >= the batch's (1 - rate)-quantile, ties included: the papers'   |
    | `top`      | exactly round(rate * N), as `kondo.Gate(rate=...)`                        |
    | `price`    | priority > price, as `kondo.Gate(price=...)`                              |
    | `draw`     | Bernoulli with a solved price, as `kondo.Gate(rate=..., temperature=...)` |
    | `rolling`  | priority > a price from past steps, as `kondo.Gate(rate=..., window=...)` |
    """

    loss: LossName = "pg"
    gate: GateName = "dense"
    priority: PriorityName = "delight"
    rate: float = 1.0
    price: float = 0.0
    temperature: float = 1.0
    window: int = 16
    alpha: float = 0.5
    """Of the additive priority, alpha * U + (1 - alpha) * l."""
    delight_noise: float = 0.0
    """Standard deviation of noise on the priority, as a multiple of the batch's own."""
    logit_noise: float = 0.0
    """Standard deviation of noise on the logits that the priority is computed from."""
    screen: ScreenName = "exact"
    """Whose log-probs the priority is computed from: the policy's, or a draft's (`screens`)."""
    draft: int = 0
    """Of a draft screen: steps between two copies (stale), bits (quantised) or width (narrow)."""
    baseline: BaselineName = "expected"
    """Of bandits: sum_a pi(a)^2, 0, 1/2, or pi(label). Sequences use the prompt's mean reward."""
    max_weight: float = math.inf
    """Of importance-weighted PG: its weight pi / mu is capped here; infinite leaves it exact."""
    clip: float = 0.1
    """Of PPO."""
    beta: float = 0.0
    """KL term of PPO and PMPO."""
    preferred: float = 0.6
    """PMPO's weight of the preferred answers."""

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate must lie in (0, 1], got {self.rate}; 0.03 keeps 3%.")
        if self.gate in ("soft", "draw") and not self.temperature > 0:
            raise ValueError(f"temperature must be > 0 for {self.gate}, got {self.temperature}.")
        for name in ("delight_noise", "logit_noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}.")
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], got {self.alpha}.")
        if not self.max_weight > 0:
            raise ValueError(
                f"max_weight must be > 0, got {self.max_weight}; infinite leaves weights exact."
            )
        if self.gate == "rolling" and self.window < 1:
            raise ValueError(f"window must be >= 1 past steps, got {self.window}.")
        if self.gate == "soft" and self.priority != "delight":
            raise ValueError(
                f"priority must be delight for the soft gate, which weighs by it, got "
                f"{self.priority}; use a hard gate for another signal."
            )
        if self.loss in ("exact_pg", "cross_entropy") and self.gate != "dense":
            raise ValueError(
                f"gate must be dense for {self.loss}, which samples no action to be gated, got "
                f"{self.gate}."
            )
        self._check_screen()

    def _check_screen(self) -> None:
        if self.screen == "exact":
            if self.draft:
                raise ValueError(f"draft must be 0 for the exact screen, got {self.draft}.")
            return
        least = 2 if self.screen == "quantised" else 1  # one bit has a sign and no size
        if self.draft < least:
            raise ValueError(f"draft must be >= {least} for {self.screen}, got {self.draft}.")
        if self.logit_noise:
            raise ValueError(
                f"logit_noise must be 0 for a draft screen, got {self.logit_noise} with "
                f"{self.screen}; noise stands for a screen of its own."
            )

    @property
    def program(self) -> tuple[object, ...]:
        """What must be equal for two members to share the same kernels."""
        count = self.rate if self.gate in ("quantile", "top", "draw", "rolling") else 1.0
        window = self.window if self.gate == "rolling" else 0
        options: tuple[float, ...] = ()
        if self.loss in ("ppo", "pmpo"):
            options = (self.clip, self.beta, self.preferred)
        elif self.loss == "is_pg":
            options = (self.max_weight,)
        # A noisy screen is another program: its rounding must not reach members without noise.
        screen = (
            self.screen,
            self.draft if self.screen == "narrow" else 0,
            self.logit_noise > 0,
        )
        gate = (self.gate, self.priority, count, window)
        return (self.loss, self.baseline, *gate, *screen, options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frictions:
    """What stands between a learner and its experience. The defaults are none.

    A row is of one kind: the right answer, else a random one, else the bug's, else sampled. Each
    kind has a draw of its own, and the first that hits counts.
    """

    delay: int = 0
    """The actor's parameters are those of so many learner steps ago."""
    uniform_delay: bool = False
    """Draw the age anew at every step, uniform on 0 .. delay, instead of always the oldest."""
    discovery: float = 0.0
    """Probability that a row is replaced by the right answer."""
    random: float = 0.0
    """Probability that it is replaced by a uniformly random one."""
    bug: float = 0.0
    """Probability that it is replaced by all zeros."""
    reported: float = 1.0
    """Probability that a replaced row reports for each of its actions, as if its actor had it."""
    corruption: float = 0.0
    """Probability that a row's reward is replaced by a fair coin, 0 or 1."""

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"delay must be >= 0 learner steps, got {self.delay}.")
        for name in ("discovery", "random", "bug", "corruption"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if not 0.0 < self.reported <= 1.0:
            raise ValueError(
                f"reported must lie in (0, 1], got {self.reported}; 1 says that the actor was sure."
            )

    @property
    def foreign(self) -> bool:
        """Whether some rows were not drawn from the learner's own policy."""
        return self.delay > 0 or max(self.discovery, self.random, self.bug) > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One training run inside a population."""

    series: str
    """The line in the figure it belongs to."""
    seed: int
    """Of its weights, inputs and actions."""
    learning_rate: float
    """Of Adam, with its default betas."""
    update: Update
    setting: float = math.nan
    """What the study sweeps, written into its records."""
    frictions: Frictions = Frictions()
    """Between it and its experience; by default it acts itself."""
