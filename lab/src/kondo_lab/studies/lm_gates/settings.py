"""What the study runs: two tasks, one size of model, and the gates that meet there."""

import dataclasses
from collections.abc import Mapping

from kondo_lab.evidence.study import Size
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.fields import TOY, Field, FieldSettings
from kondo_lab.training.language_arms import published, unbiased

TUNED_BY_LM_RL = (("GRPO", 3e-5), ("DG-K 10%", 3e-6), ("random 10%", 3e-5), ("PODS 10%", 3e-5))
"""Series -> the learning rate that results/lm-rl-v1 chose on sorting with 25 million parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(FieldSettings):
    """All that can change the results."""

    walls: tuple[Field, ...]
    """Where arms are trained, one by one, by the clock."""
    rate: float = 0.1
    """Share of the rows that gates with a rate keep."""
    noises: tuple[float, ...] = (1.5, 3.0)
    """Bounds of gates without a rate; the claim is about the first."""
    tuned_before: str = ""
    """The field whose learning rates are those of `tuned_rates`."""
    tuned_rates: tuple[tuple[str, float], ...] = ()
    """Series -> learning rate."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """All of them."""
        return self.walls

    @property
    def claimed(self) -> tuple[str, ...]:
        """Names of the gates that the claim is about."""
        return f"unbiased {percent(self.rate)}", f"noise {self.noises[0]:g}"

    def everyone(self) -> list[Arm]:
        """Return dense GRPO, the claimed gates, then the others."""
        share = percent(self.rate)
        known = published(rates=(self.rate,), etas=())
        known += unbiased(rates=(self.rate,), noises=self.noises)
        names = ["GRPO", *self.claimed]
        names += [f"{kind} {share}" for kind in ("DG-K", "PODS", "random")]
        names += [f"unbiased {signal} {share}" for signal in ("|delight|", "|advantage|")]
        names += [f"noise {noise:g}" for noise in self.noises[1:]]
        by_name = {each.name: each for each in known}
        return [by_name[name] for name in names]

    def of(self, field: Field) -> list[Arm]:
        """Return who meets in a field: everyone."""
        return self.everyone()

    clocked = of

    def seeds(self, field: Field, arm: Arm) -> range:
        """Return the reported seeds: more of dense GRPO and of what the claim is about."""
        named = arm.gate is None or arm.name in self.claimed
        return range(field.num_seeds if named else field.other_seeds)

    def given_rates(self, field: Field) -> Mapping[str, float]:
        """Return the learning rates that are not tuned here."""
        return dict(self.tuned_rates) if field.name == self.tuned_before else {}


_SORTING = Field(
    task="sorting",
    level=3,
    size="25m",
    num_prompts=256,
    warm_rate=5e-4,
    tune_steps=80,
    num_steps=80,
    num_seeds=5,
    other_seeds=3,
    tune_seeds=0,
    dense_paths=("plain",),
)
FULL = Settings(
    walls=(_SORTING, dataclasses.replace(_SORTING, task="addition", tune_seeds=1)),
    tuned_before=_SORTING.name,
    tuned_rates=TUNED_BY_LM_RL,
    num_held_out=1024,
)

_TOY = dataclasses.replace(
    TOY,
    learning_rates=(1e-4, 3e-4),
    num_steps=12,
    num_seeds=3,
    other_seeds=2,
    tune_seeds=0,
    dense_paths=("plain",),
)
SMALL = Settings(
    walls=(_TOY, dataclasses.replace(_TOY, task="addition", level=1, tune_seeds=1)),
    tuned_before=_TOY.name,
    tuned_rates=tuple((name, 3e-4) for name, _ in TUNED_BY_LM_RL),
    num_held_out=64,
    wall_evaluations=4,
    tune_evaluations=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for all arms."""
    chosen = FULL if size == "full" else SMALL
    if num_seeds is None:
        return chosen
    walls = tuple(
        dataclasses.replace(field, num_seeds=num_seeds, other_seeds=num_seeds)
        for field in chosen.walls
    )
    return dataclasses.replace(chosen, walls=walls)
