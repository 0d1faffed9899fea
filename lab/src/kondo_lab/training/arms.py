"""Arms: the compared ways to update a policy, each a gate and a loss."""

import dataclasses
import math
from functools import partial
from typing import Literal

from kondo import BaseGate, Gate, UnbiasedGate, adapters, delight, losses, sampling, signals
from kondo.lm import BudgetGate
from kondo_lab.training.gates import DrawnVarianceGate, Everything, QuantileGate
from kondo_lab.training.losses import (
    Loss,
    PreferenceOptimisation,
    is_of_labels,
    short_name,
    words,
)
from kondo_lab.training.text_signals import PartialDelight, entropy

BaselineName = Literal["expected", "zero", "constant", "oracle"]
ScreenName = Literal["exact", "free", "stale", "quantised", "narrow"]
Screened = Literal["both", "surprisal"]
EqualRewards = Literal["zero", "rounded"]
_KINDS: dict[type[BaseGate], str] = {
    Everything: "soft",
    QuantileGate: "quantile",
    DrawnVarianceGate: "variance",
    BudgetGate: "budget",
    UnbiasedGate: "unbiased",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Arm:
    """One way to update a policy: a gate and a loss. The defaults are dense PG.

    | gate                                     | trains on                                        |
    |------------------------------------------|--------------------------------------------------|
    | None                                     | everything, weight 1: PG, PPO, PMPO, ...         |
    | `Everything(eta)`, unit="token"          | everything, weight sigmoid(delight / eta): DG    |
    | `QuantileGate(rate=...)`                 | what reaches the batch's quantile: the papers'   |
    | `kondo.Gate(...)`, `kondo.UnbiasedGate`  | what they say                                    |
    | `DrawnVarianceGate(...)`                 | the rows whose rewards vary most: PODS           |
    | `BudgetGate(...)`                        | what buys most delight for a share of all tokens |

    Arms are equal where name, gate, loss and all options are.

    Example:
        >>> import kondo
        >>> from kondo_lab.training.arms import Arm
        >>> Arm(gate=kondo.Gate(rate=0.03)) == Arm(gate=kondo.Gate(rate=0.03))
        True
        >>> Arm(name="DG-K 3%", gate=kondo.Gate(rate=0.03)).rate
        0.03
    """

    name: str = ""
    """As in the figures' legends."""
    gate: BaseGate | None = None
    """Chooses among units; each population works with a copy, since a gate may remember."""
    loss: Loss = losses.pg
    """A function of `kondo.losses`, of `losses` or of `corrections`."""
    unit: Literal["sequence", "token"] = "sequence"
    """What is gated: a row with all its actions or tokens, or each of them. A row's delight and
    surprisal are the sums of its tokens'."""
    divided: bool = False
    """Divide U of the loss by the group's standard deviation, as GRPO does. Delight is that of the
    undivided U."""
    denominator: Literal["full", "kept"] = "full"
    """What the loss is divided by: all tokens of the batch, as for dense, or the kept ones."""
    screen: ScreenName = "exact"
    """Whose log-probs are decided by: the learner's own, the sampler's as it reported them (free),
    or a draft's (`draft_screens`)."""
    draft: int = 0
    """Of a draft screen: steps between two copies (stale), bits (quantised) or width (narrow)."""
    screened: Screened = "both"
    """What of delight a draft or noisy logits give: surprisal and baseline, or surprisal alone."""
    delight_noise: float = 0.0
    """Standard deviation of noise on the gate's values, as a multiple of the batch's own."""
    logit_noise: float = 0.0
    """Standard deviation of noise on the logits that the values are computed from."""
    baseline: BaselineName = "expected"
    """Of bandits: sum_a pi(a)^2, 0, 1/2, or pi(label). Sequences use the prompt's mean reward."""
    equal_rewards: EqualRewards = "zero"
    """Of sequences, what reward - mean is where all answers to a prompt earn the same: exactly 0,
    or what rounding leaves of it in plain float32, which a loss of signs alone takes for more."""

    def __post_init__(self) -> None:
        for name in ("delight_noise", "logit_noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}.")
        if self.gate is not None:
            self._check_gate(self.gate)
        self._check_screen()

    def _check_gate(self, gate: BaseGate) -> None:
        if self.of_labels:
            raise ValueError(
                f"gate must be None for {words(self.loss)}, which samples no action to be gated, "
                f"got {gate!r}."
            )
        if self.unit == "token":
            if adapters.adapter_of(gate).draws:
                raise ValueError(
                    f"unit must be 'sequence' for {gate!r}: its draws are one per answer; got "
                    f"'token'."
                )
            if isinstance(gate.signal, PartialDelight):
                raise ValueError(
                    "unit must be 'sequence' for PartialDelight, a value per answer, got 'token'."
                )
        elif gate.signal is entropy:
            raise ValueError(
                "unit must be 'token' for the signal entropy, which is a token's, got 'sequence'."
            )

    def _check_screen(self) -> None:
        if self.screen in ("exact", "free"):
            if self.draft:
                raise ValueError(f"draft must be 0 for the {self.screen} screen, got {self.draft}.")
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
    def kind(self) -> str:
        """The gate's kind in a word."""
        gate = self.gate
        if gate is None:
            return "dense"
        if not isinstance(gate, Gate):
            return next((word for kind, word in _KINDS.items() if isinstance(gate, kind)), "other")
        if gate.rate is None:
            return "price"
        if gate.rate == 1 and gate.signal is signals.abs_advantage:
            return "filter"
        return "rolling" if gate.window else "draw" if gate.temperature else "top"

    @property
    def rate(self) -> float:
        """Share of the units kept; of a budget, tokens differentiated / all, prompts in both.

        NaN where it is not fixed beforehand: a bound of the noise keeps as many as it takes.
        """
        if getattr(self.gate, "noise", None) is not None:
            return math.nan
        share = getattr(self.gate, "rate", None) or getattr(self.gate, "budget", None)
        return 1.0 if share is None else float(share)

    @property
    def by_delight(self) -> bool:
        """Whether it keeps a share by delight: DG-K."""
        gate = self.gate
        return gate is not None and self.kind in ("top", "draw") and gate.signal is delight

    @property
    def of_labels(self) -> bool:
        """Whether its loss looks at labels, not at sampled actions."""
        return is_of_labels(self.loss)

    @property
    def trains_all_rows(self) -> bool:
        """Whether the gate, if there is one, weighs rows and skips none."""
        return self.kind in ("dense", "soft")

    def fixed_rows(self, num_rows: int, group: int = 1) -> int | None:
        """Return how many rows hold all that is kept; None where that is known after the choice.

        Args:
            num_rows: N.
            group: answers of a prompt.
        """
        gate = self.gate
        if self.trains_all_rows:
            return num_rows
        if isinstance(gate, DrawnVarianceGate) and gate.group is not None:
            return num_rows // group * sampling.count_for(gate.rate, group)
        if self.kind not in ("top", "variance", "unbiased") or self.unit == "token":
            return None
        if isinstance(gate, Gate) and adapters.adapter_of(gate).draws:  # each row by its own draw
            return None
        return None if math.isnan(self.rate) else sampling.count_for(self.rate, num_rows)

    @property
    def program(self) -> tuple[object, ...]:
        """What must be equal for two members to share the same kernels."""
        draft = self.draft if self.screen == "narrow" else 0
        noise = (self.delight_noise, self.logit_noise, self.screened)
        shape = (self.unit, self.divided, self.denominator)
        centred = (self.baseline, self.equal_rewards)
        gate = "" if self.gate is None else f"{self.gate!r} by {words(self.gate.signal)}"
        return (gate, words(self.loss), *shape, *centred, self.screen, draft, *noise)

    @property
    def order(self) -> tuple[object, ...]:
        """Where a member stands in its population, which is part of its rounding: the kernels of a
        batch treat neighbours differently."""
        gate = self.gate
        rate, window = getattr(gate, "rate", None) or 1.0, getattr(gate, "window", 0)
        signal = signals.name_of(
            delight if gate is None else getattr(gate.signal, "func", gate.signal)
        )
        draft = self.draft if self.screen == "narrow" else 0
        screen = (self.screen, draft, self.logit_noise > 0)
        chosen = (self.kind, signal, rate, window)
        last = (words(self.loss), self.equal_rewards, self.unit, self.divided, self.denominator)
        return (short_name(self.loss), self.baseline, *chosen, *screen, *last, self.program[0])

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same name and train alike."""
        if not isinstance(other, Arm):
            return NotImplemented
        return (self.name, self.program, self.draft) == (other.name, other.program, other.draft)

    def __hash__(self) -> int:
        return hash((self.name, self.program, self.draft))

    def __repr__(self) -> str:
        return f"Arm{(self.name, *self.program, self.draft)!r}"


PG = Arm()
DG = Arm(gate=Everything(eta=1.0), unit="token")
PPO = Arm(loss=partial(losses.ppo, clip=0.1))
"""On-policy, with one update a batch, every ratio is 1: its gradient is PG's."""
PMPO = Arm(loss=PreferenceOptimisation(alpha=0.6, beta=0.1))
PMPO_FLOAT32 = Arm(loss=PMPO.loss, equal_rewards="rounded")
"""With advantages as the author's float32 code has them: PMPO looks at their signs alone, and so
prefers, or not, answers to a prompt that all earned the same."""
PRICE_0 = Arm(gate=Gate(price=0.0))


def kondo(rate: float) -> Arm:
    """Return the papers' gate at a rate: the batch's quantile, ties kept."""
    return Arm(gate=QuantileGate(rate=rate))


def kondo_count(rate: float) -> Arm:
    """Return the gate that never keeps more than the rate, `kondo.Gate(rate=...)`.

    Where delight has no ties, as on images, it keeps what `kondo` keeps, and the number of rows
    need not be asked for at every step.
    """
    return Arm(gate=Gate(rate=rate))


def percent(rate: float) -> str:
    """Return a rate as names have it: 0.03 is 3%."""
    return f"{100 * rate:g}%"


def dg_k(rate: float) -> str:
    """Return the legend of `kondo(rate)`, such as DG-K 3%."""
    return f"DG-K {percent(rate)}"
