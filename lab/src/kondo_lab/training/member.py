"""What a member of a population is: a seed, a learning rate, an update rule, and its frictions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kondo import BaseGate, Gate, delight, losses, signals
from kondo_lab.training.gates import Everything, QuantileGate
from kondo_lab.training.losses import Loss, is_of_labels, short_name, words

BaselineName = Literal["expected", "zero", "constant", "oracle"]
ScreenName = Literal["exact", "stale", "quantised", "narrow"]
Screened = Literal["both", "surprisal"]
EqualRewards = Literal["zero", "rounded"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """One way to update a policy: a gate and a loss. The defaults are PG.

    | gate                               | keeps                                             |
    |------------------------------------|---------------------------------------------------|
    | None                               | everything, weight 1: PG, PPO, PMPO, ...          |
    | `Everything(eta)`                  | everything, weight sigmoid(delight / eta): DG     |
    | `QuantileGate(rate=...)`           | what reaches the batch's quantile: the papers'    |
    | `kondo.Gate(...)`, ...             | whatever it says                                  |

    Updates are equal where their gates and losses have the same options.

    Example:
        >>> import kondo
        >>> from kondo_lab.training.member import Update
        >>> Update(gate=kondo.Gate(rate=0.03)) == Update(gate=kondo.Gate(rate=0.03))
        True
    """

    gate: BaseGate | None = None
    """Chooses among rows; each population works with a copy, since a gate may remember."""
    loss: Loss = losses.pg
    """A function of `kondo.losses`, or of `population.losses`."""
    delight_noise: float = 0.0
    """Standard deviation of noise on the gate's values, as a multiple of the batch's own."""
    logit_noise: float = 0.0
    """Standard deviation of noise on the logits that the values are computed from."""
    screen: ScreenName = "exact"
    """Whose log-probs the values are computed from: the policy's, or a draft's (`screens`)."""
    screened: Screened = "both"
    """What of delight a draft or noisy logits give: surprisal and baseline, or surprisal alone."""
    draft: int = 0
    """Of a draft screen: steps between two copies (stale), bits (quantised) or width (narrow)."""
    baseline: BaselineName = "expected"
    """Of bandits: sum_a pi(a)^2, 0, 1/2, or pi(label). Sequences use the prompt's mean reward."""
    equal_rewards: EqualRewards = "zero"
    """Of sequences, what reward - mean is where all answers to a prompt earn the same: exactly 0,
    or what rounding leaves of it in plain float32, which a loss of signs alone takes for more."""

    def __post_init__(self) -> None:
        for name in ("delight_noise", "logit_noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}.")
        if is_of_labels(self.loss) and self.gate is not None:
            raise ValueError(
                f"gate must be None for {words(self.loss)}, which samples no action to be gated, "
                f"got {self.gate!r}."
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
        draft = self.draft if self.screen == "narrow" else 0
        noise = (self.delight_noise, self.logit_noise, self.screened)
        centred = (self.baseline, self.equal_rewards)
        return (repr(self.gate), words(self.loss), *centred, self.screen, draft, *noise)

    @property
    def order(self) -> tuple[object, ...]:
        """Where a member stands in its population, which is part of its rounding: the kernels of a
        batch treat neighbours differently."""
        gate = self.gate
        rate, window = getattr(gate, "rate", None) or 1.0, getattr(gate, "window", 0)
        signal = signals.name_of(
            delight if gate is None else getattr(gate.signal, "func", gate.signal)
        )
        screen = (self.screen, self.program[5], self.logit_noise > 0)
        chosen = (self.kind, signal, rate, window)
        last = (words(self.loss), self.equal_rewards)
        return (short_name(self.loss), self.baseline, *chosen, *screen, *last)

    @property
    def kind(self) -> str:
        """The gate's kind in a word."""
        gate = self.gate
        if isinstance(gate, Everything):
            return "soft"
        if isinstance(gate, QuantileGate):
            return "quantile"
        if not isinstance(gate, Gate):
            return "dense" if gate is None else type(gate).__name__
        if gate.rate is None:
            return "price"
        return "rolling" if gate.window else "draw" if gate.temperature else "top"

    def __eq__(self, other: object) -> bool:
        """Return whether both train alike."""
        if not isinstance(other, Update):
            return NotImplemented
        return self.program == other.program and self.draft == other.draft

    def __hash__(self) -> int:
        return hash((self.program, self.draft))

    @property
    def trains_all_rows(self) -> bool:
        """Whether the gate, if there is one, weighs rows and skips none."""
        return self.kind in ("dense", "soft")

    @property
    def keeps_a_count(self) -> bool:
        """Whether the rate fixes the number of rows that are kept."""
        return self.kind == "top"


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
    reported: float | None = 1.0
    """Probability that a replaced row reports for each of its actions, as if its actor had it. None
    reports what the policy that acted would have given to that action."""
    corruption: float = 0.0
    """Probability that a row's reward is replaced by a fair coin, 0 or 1."""

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"delay must be >= 0 learner steps, got {self.delay}.")
        for name in ("discovery", "random", "bug", "corruption"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if self.reported is not None and not 0.0 < self.reported <= 1.0:
            raise ValueError(
                f"reported must lie in (0, 1] or be None, got {self.reported}; 1 says that the "
                "actor was sure, None what its policy would have said."
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


def each_seed(
    compared: Mapping[str, Update], seeds: int | Sequence[int], **options: Any
) -> list[Member]:
    """Return every compared update, by series, with each of the seeds; `options` of Member.

    A number of seeds stands for those from 0 on.
    """
    each = range(seeds) if isinstance(seeds, int) else seeds
    return [
        Member(series=series, seed=seed, update=update, **options)
        for series, update in compared.items()
        for seed in each
    ]
