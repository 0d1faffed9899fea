"""What a member of a population is: a seed, a learning rate, an arm, and its frictions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kondo_lab.training.arms import Arm

Reported = Literal["true", "noisy", "one", "missing"]
SHARES = ("discovery", "random", "bug", "broken", "corruption", "flipped", "biased")
"""Fields of `Frictions` that are probabilities."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frictions:
    """What stands between a learner and its experience. The defaults are none; strengths compose.

    | friction    | what happens                                                                   |
    |-------------|--------------------------------------------------------------------------------|
    | staleness   | actors have the weights of some steps ago, or get new ones every few steps     |
    | mismatch    | actors sample at another temperature, or with weights rounded to a few bits    |
    | asynchrony  | actors go on while the learner learns: see `asynchronous`                      |
    | bugs        | a share of the rows is replaced by zeros, by random actions, or by answers     |
    |             | that are truncated, empty, repeat a token, or belong to another prompt         |
    | discoveries | a share of the rows is replaced by a right one                                 |
    | corruption  | a share of the rewards is a fair coin, flipped, or 1                           |
    | reports     | log-probs of the actors are noisy, 0 (probability one), or missing             |

    A row is of one kind: the right answer, else a random one, else zeros, else broken, else
    sampled. Each kind has a draw of its own, and the first that hits counts.

    Example:
        >>> from kondo_lab.training.member import Frictions
        >>> Frictions(name="stale and broken", refresh=16, broken=0.1).is_none
        False
    """

    name: str = "no friction"
    """As in tables."""
    delay: int = 0
    """The actor's weights are those of so many learner steps ago, or of the start before there are
    any."""
    uniform_delay: bool = False
    """Draw the age anew at every step, uniform on 0 .. delay, instead of always the oldest."""
    refresh: int = 1
    """D: actors get the learner's weights before steps 1, D + 1, 2 D + 1, ..."""
    queue: int = 0
    """Q: actors and learner run at the same time, and Q batches may wait between them; 0 takes
    turns. For `asynchronous.AsynchronousPopulation` alone."""
    temperature: float = 1.0
    """Actors sample from softmax(logits / temperature), and report its log-probs."""
    bits: int = 0
    """Of the actors' weights in the layers, one scale for each output of a product; 0 does not
    round."""
    discovery: float = 0.0
    """Probability that a row is replaced by the right answer."""
    random: float = 0.0
    """Probability that it is replaced by a uniformly random one."""
    bug: float = 0.0
    """Probability that it is replaced by all zeros."""
    replaced: float | None = 1.0
    """Probability that a row replaced in one of these three ways reports for each of its actions,
    as if its actor had it. None reports what the policy that acted would have given to it."""
    broken: float = 0.0
    """Probability that an answer is broken. It is paid what the task's checker pays. Its log-probs
    are those of the tokens that were drawn, hence wrong for what is trained on."""
    corruption: float = 0.0
    """Probability that a row's reward is replaced by a fair coin, 0 or 1."""
    flipped: float = 0.0
    """Probability that a reward is 1 - reward."""
    biased: float = 0.0
    """Probability that a judge sets a reward to 1."""
    reported: Reported = "true"
    """Log-probs that the learner gets: those of the actors' distribution; with normal noise; 0, as
    of probability one; or none, where it takes its own at the update: all ratios are 1."""
    noise: float = 0.0
    """Standard deviation of the noise on every token's log-prob, for reported="noisy"."""

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"refresh must be >= 1 step, got {self.refresh}; 1 is on-policy.")
        if self.delay < 0:
            raise ValueError(f"delay must be >= 0 learner steps, got {self.delay}.")
        if self.queue < 0:
            raise ValueError(f"queue must be >= 0 batches, got {self.queue}; 0 takes turns.")
        if sum((self.delay > 0, self.refresh > 1, self.queue > 0)) > 1:
            raise ValueError(
                f"actors must be stale in one way, got delay {self.delay}, refresh {self.refresh} "
                f"and queue {self.queue}; leave two of them at 0, 1 and 0."
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}.")
        if self.bits and not 2 <= self.bits <= 16:
            raise ValueError(
                f"bits must lie in 2 .. 16, got {self.bits}; 0 leaves weights as they are."
            )
        for name in SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")
        if self.replaced is not None and not 0.0 < self.replaced <= 1.0:
            raise ValueError(
                f"replaced must lie in (0, 1] or be None, got {self.replaced}; 1 says that the "
                "actor was sure, None what its policy would have said."
            )
        if (self.noise > 0) != (self.reported == "noisy"):
            raise ValueError(
                f"noise must be > 0 for reported='noisy' and 0 otherwise, got {self.noise} for "
                f"{self.reported!r}."
            )

    @property
    def is_none(self) -> bool:
        """Whether nothing goes wrong."""
        return dataclasses.replace(self, name=NONE.name) == NONE

    @property
    def foreign(self) -> bool:
        """Whether some rows were not drawn from the learner's own policy."""
        stale = self.delay > 0 or self.refresh > 1 or self.queue > 0
        mismatched = self.temperature != 1 or self.bits > 0
        return stale or mismatched or max(self.discovery, self.random, self.bug, self.broken) > 0

    @property
    def reports_truly(self) -> bool:
        """Whether the learner gets the log-probs that the actors drew with."""
        return self.reported == "true"


NONE = Frictions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One training run: an arm with a seed and a learning rate."""

    series: str
    """The line in the figure it belongs to."""
    seed: int
    """Of its weights, inputs and actions."""
    learning_rate: float
    """Of Adam, with its default betas."""
    arm: Arm
    setting: float = math.nan
    """What the study sweeps, written into its records."""
    frictions: Frictions = NONE
    """Between it and its experience; by default it acts itself."""
    decay_steps: int = 0
    """D: the learning rate falls linearly, to 0 after D steps; 0 leaves it as it is."""


def each_seed(
    compared: Mapping[str, Arm], seeds: int | Sequence[int], **options: Any
) -> list[Member]:
    """Return every compared arm, by series, with each of the seeds; `options` of Member.

    A number of seeds stands for those from 0 on.
    """
    each = range(seeds) if isinstance(seeds, int) else seeds
    return [
        Member(series=series, seed=seed, arm=arm, **options)
        for series, arm in compared.items()
        for seed in each
    ]
