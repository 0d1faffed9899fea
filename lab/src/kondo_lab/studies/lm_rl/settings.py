"""What the study runs: fields where contenders meet, and how much of everything."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from kondo_lab.language.contenders import Contender, contenders, percent
from kondo_lab.language.loop import Path
from kondo_lab.studies.study import Size

SCALE = 1.0
"""Factor on the steps of every full-size part: one number to make all of it shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A task, a model, what a step samples, and for how long; contenders are compared in it."""

    task: str
    level: int
    size: str
    """Of the model, a name in `kondo_lab.language.transformer.SIZES`."""
    num_prompts: int = 32
    """G, fresh prompts of a step."""
    repeats: int = 8
    """A, completions of a prompt: a group."""
    warm_steps: int = 2000
    """At most: a seed's supervised start ends where its reward is `Settings.warm_reward`."""
    warm_batch: int = 64
    warm_rate: float = 1e-3
    learning_rates: tuple[float, ...] = (3e-6, 1e-5, 3e-5, 1e-4)
    """Each contender's are tried on the tuning seeds. Adam's first steps move every weight by about
    the rate: at 3e-4 two of them undo the start of the smallest model, with any contender."""
    tune_steps: int = 150
    """As many as are reported: a rate that is best for a while may ruin the policy later."""
    num_steps: int = 150
    num_seeds: int = 5
    """Of the headline contenders."""
    other_seeds: int = 2
    """Of the others; 0 leaves them out."""
    tune_seeds: int = 2
    tuned_on: str = ""
    """The name of another field of the same settings whose learning rates are taken over."""
    clocked_rates: tuple[float, ...] = ()
    """Rates of the contenders that are run by the clock; empty where none is."""
    only: tuple[str, ...] = ()
    """Names of the only headliners that are timed and run here; all of them where it is empty."""
    dense_paths: tuple[Path, ...] = ("product", "plain")
    """The ways dense GRPO is run by the clock."""

    @property
    def name(self) -> str:
        """As parts call it."""
        return f"{self.task}-{self.level}-{self.size}"

    @property
    def num_rows(self) -> int:
        """N, completions of a step."""
        return self.num_prompts * self.repeats


FIRST_TUNE_SEED = 1000
"""Tuning seeds are counted from here, reported ones from 0: none is both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """How starts and runs are made, whatever a study compares."""

    warm_reward: float = 0.3
    """At temperature 1 on held-out prompts: where a supervised start ends."""
    warm_every: int = 10
    """Steps between two looks at it."""
    num_held_out: int = 256
    """Prompts of an evaluation."""
    wall_evaluations: int = 20
    """Of a run by the clock, evenly spaced, and one before it."""
    tune_evaluations: int = 10
    most_rows: int = 50_000
    """Of one population: members beyond go into the next part."""
    max_tokens: int = 65_536
    """Of a training forward, populations and single models alike."""
    max_norm: float = 1.0
    compiled: bool = False
    """Compile the layers of the timed models, dense and gated alike."""

    @property
    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """All of them."""

    @abstractmethod
    def of(self, field: Field) -> list[Contender]:
        """Return who meets in a field."""

    @abstractmethod
    def clocked(self, field: Field) -> list[Contender]:
        """Return who is run by the clock in a field."""

    @abstractmethod
    def seeds(self, field: Field, contender: Contender) -> range:
        """Return the reported seeds of a contender in a field."""

    def given_rates(self, field: Field) -> Mapping[str, float]:
        """Return series -> its learning rate, where it is not tuned here; by default none."""
        return {}

    def start_reward(self, field: Field) -> float:
        """Return the reward where a field's supervised starts end."""
        return self.warm_reward

    def field(self, name: str) -> Field:
        """Return the field of this name."""
        known = {field.name: field for field in self.fields}
        if name not in known:
            raise ValueError(f"name must be a field's, one of {', '.join(known)}, got {name!r}.")
        return known[name]

    def tune_seeds(self, field: Field) -> range:
        """Return the seeds that learning rates are chosen by."""
        return range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + field.tune_seeds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """All that can change the results."""

    grids: tuple[Field, ...]
    """Trained as populations; the first is the main one, with every contender."""
    walls: tuple[Field, ...]
    """Trained one by one through the product, by the clock; headline contenders alone."""
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    etas: tuple[float, ...] = (0.1, 1.0, 10.0)
    headline_rates: tuple[float, ...] = (0.03, 0.1)
    headline_etas: tuple[float, ...] = (1.0, 10.0)
    """The papers', and one so large that the gate is nearly flat."""
    evaluations: int = 20
    """Of a run in a grid, evenly spaced, and one before it."""
    rounds: int = 5
    """Of the clock, for every contender in turn."""
    denominator_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    denominator_seeds: int = 2
    denominator_steps: int = 150
    denominator_learning_rates: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
    more_seeds: int = 1
    """Of the runs whose saved time buys rollouts."""
    most_times: int = 8
    """More prompts than the dense contender's, at most."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """All of them."""
        return (*self.grids, *self.walls)

    @property
    def main(self) -> Field:
        """Where every contender is."""
        return self.grids[0]

    def everyone(self) -> list[Contender]:
        """Return all contenders."""
        return contenders(rates=self.rates, etas=self.etas)

    def headliners(self) -> list[Contender]:
        """Return those that the claims are about, in everyone's order."""
        names = {"PG", "GRPO", "zero-advantage filter"}
        names |= {f"DG, eta {eta:g}" for eta in self.headline_etas}
        for rate in self.headline_rates:
            kinds = ("DG-K", "advantage", "random", "PODS")
            names |= {f"{kind} {percent(rate)}" for kind in kinds}
        return [each for each in self.everyone() if each.name in names]

    def clocked(self, field: Field) -> list[Contender]:
        """Return who is run by the clock: headliners, but dense PG, which costs what GRPO does."""
        return [
            each
            for each in self.present(field)
            if each.name != "PG" and (each.rate == 1 or each.rate in field.clocked_rates)
        ]

    def present(self, field: Field) -> list[Contender]:
        """Return the headliners of a field."""
        return [each for each in self.headliners() if not field.only or each.name in field.only]

    def of(self, field: Field) -> list[Contender]:
        """Return who meets in a field."""
        if field in self.walls:
            return self.clocked(field)
        return self.everyone() if field.other_seeds else self.headliners()

    def seeds(self, field: Field, contender: Contender) -> range:
        """Return the reported seeds of a contender in a field."""
        headline = contender in self.headliners()
        return range(field.num_seeds if headline else field.other_seeds)


_CLOCKED = Field(
    task="sorting",
    level=3,
    size="25m",
    num_prompts=256,
    warm_rate=5e-4,
    tune_steps=80,
    num_steps=80,
    num_seeds=3,
    other_seeds=0,
    tune_seeds=1,
    clocked_rates=(0.03, 0.1),
)
_LARGER = dataclasses.replace(
    _CLOCKED, tuned_on=_CLOCKED.name, tune_steps=150, num_steps=60, tune_seeds=0
)
FULL = Settings(
    grids=(
        Field(task="sorting", level=3, size="5m"),
        Field(task="addition", level=3, size="5m", num_seeds=3, other_seeds=0),
    ),
    walls=(
        _CLOCKED,
        dataclasses.replace(
            _LARGER,
            size="85m",
            warm_rate=3e-4,
            num_seeds=2,
            only=(
                "GRPO",
                "DG, eta 10",
                "zero-advantage filter",
                "DG-K 3%",
                "random 3%",
                "PODS 3%",
                "DG-K 10%",
                "PODS 10%",
            ),
        ),
        dataclasses.replace(
            _LARGER,
            size="300m",
            warm_rate=2e-4,
            num_seeds=1,
            only=("GRPO", "DG-K 3%", "random 3%", "PODS 3%", "PODS 10%"),
            dense_paths=("plain",),
        ),
    ),
)

TOY = Field(
    task="sorting",
    level=2,
    size="toy",
    num_prompts=8,
    warm_steps=300,
    warm_batch=32,
    warm_rate=3e-3,
    learning_rates=(3e-4, 1e-3),
    tune_steps=4,
    num_steps=24,
    num_seeds=2,
    other_seeds=1,
    tune_seeds=1,
)
SMALL = Settings(
    grids=(TOY,),
    walls=(
        dataclasses.replace(
            TOY,
            task="addition",
            level=1,
            learning_rates=(1e-4, 3e-4),
            num_steps=12,
            other_seeds=0,
            clocked_rates=(0.1,),
        ),
    ),
    rates=(0.1, 0.3),
    etas=(1.0,),
    headline_rates=(0.1,),
    headline_etas=(1.0,),
    num_held_out=64,
    evaluations=6,
    wall_evaluations=4,
    tune_evaluations=2,
    rounds=2,
    denominator_rates=(0.1, 0.3),
    denominator_seeds=1,
    denominator_steps=6,
    denominator_learning_rates=(3e-4, 1e-3),
    most_times=2,
)


def scaled(settings: Settings, factor: float) -> Settings:
    """Return settings whose runs have `factor` times the steps; at least one per evaluation."""
    if not factor > 0:
        raise ValueError(f"factor must be > 0, got {factor}; 0.5 halves the steps.")

    def steps(number: int, least: int) -> int:
        return max(least, round(factor * number))

    def shorter(field: Field) -> Field:
        looks = settings.evaluations if field in settings.grids else settings.wall_evaluations
        return dataclasses.replace(
            field,
            tune_steps=steps(field.tune_steps, settings.tune_evaluations),
            num_steps=steps(field.num_steps, looks),
        )

    least = settings.tune_evaluations
    return dataclasses.replace(
        _with_fields(settings, shorter), denominator_steps=steps(settings.denominator_steps, least)
    )


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for all reported contenders."""
    chosen = scaled(FULL, SCALE) if size == "full" else SMALL
    if num_seeds is None:
        return chosen

    def seeded(field: Field) -> Field:
        others = num_seeds if field.other_seeds else 0
        return dataclasses.replace(field, num_seeds=num_seeds, other_seeds=others)

    return dataclasses.replace(
        _with_fields(chosen, seeded), denominator_seeds=num_seeds, more_seeds=num_seeds
    )


def _with_fields(settings: Settings, change: Callable[[Field], Field]) -> Settings:
    grids, walls = (tuple(map(change, fields)) for fields in (settings.grids, settings.walls))
    return dataclasses.replace(settings, grids=grids, walls=walls)
