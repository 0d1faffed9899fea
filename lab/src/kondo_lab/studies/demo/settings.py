"""What the demo trains, and for how long."""

import dataclasses

from kondo_lab.evidence.study import Size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DigitsSettings:
    """Digits as a bandit."""

    num_steps: int = 300
    batch: int = 1000
    """Images per update; the papers use 100."""
    width: int = 256
    """Of the two hidden layers; the papers use 100."""
    learning_rate: float = 1e-3
    """Of Adam, as in the papers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReversalSettings:
    """Token reversal, rewarded up to the first error."""

    num_steps: int = 600
    """The papers make 10,000."""
    length: int = 10
    """H."""
    num_tokens: int = 2
    """M."""
    num_prompts: int = 10
    num_answers: int = 10
    """Per prompt."""
    learning_rate: float = 2e-4
    """Of Adam; the papers use 1e-4 and more steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All that can change the results."""

    num_seeds: int
    """Independent repetitions."""
    first_seed: int = 0
    """The others follow it."""
    digits: DigitsSettings = dataclasses.field(default_factory=DigitsSettings)
    reversal: ReversalSettings = dataclasses.field(default_factory=ReversalSettings)
    rate: float = 0.03
    """Fraction of samples that the gate keeps."""
    rounds: int = 100
    """Turns in which the methods' training is interleaved."""

    def __post_init__(self) -> None:
        fewest = min(self.digits.num_steps, self.reversal.num_steps)
        if not 1 <= self.rounds <= fewest:
            raise ValueError(
                f"rounds must lie between 1 and the fewest steps of a task, {fewest}, got "
                f"{self.rounds}; a round without a step has no error to show."
            )


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size; the small one makes a few steps only."""
    if size == "small":
        return Settings(
            num_seeds=seeds or 1,
            digits=DigitsSettings(num_steps=4, batch=100, width=16),
            reversal=ReversalSettings(num_steps=4, length=3),
            rounds=2,
        )
    return Settings(num_seeds=seeds or 2)
