"""What the study runs: fields where arms meet, planes of points, and how much of it all."""

import dataclasses
from typing import Any, Literal, TypeVar

from kondo import UnbiasedGate, sampling
from kondo_lab.evidence.study import Size
from kondo_lab.tasks.text import make
from kondo_lab.tasks.text.base import AnswerTask
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.fields import TOY, Field, FieldSettings
from kondo_lab.training.gates import DrawnVarianceGate
from kondo_lab.training.language_arms import LOSSES, crossed, text_arm, variants

Role = Literal["dense", "gated", "PODS"]
FieldT = TypeVar("FieldT", bound=Field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A place of the plane: how many rows a step samples, and the share of them that is kept."""

    num_rows: int
    """N, completions of a step."""
    rate: float = 1.0
    """Share kept; 1 is dense."""
    rule: Literal["unbiased", "PODS"] = "unbiased"
    """How the rows are chosen, where some are not kept."""
    learning_rates: tuple[float, ...]
    """Tried on the tuning seed."""
    num_steps: int
    """At most: a run ends where it has reached the target."""

    @property
    def role(self) -> Role:
        """What the point is a candidate for: one point of every role is run with all seeds."""
        return "dense" if self.rate == 1 else "gated" if self.rule == "unbiased" else "PODS"

    @property
    def name(self) -> str:
        """As series are called."""
        if self.rate == 1:
            return f"dense {self.num_rows}"
        return f"{self.rule} {percent(self.rate)} of {self.num_rows}"

    @property
    def num_kept(self) -> int:
        """Rows that are differentiated."""
        return sampling.count_for(self.rate, self.num_rows)

    @property
    def arm(self) -> Arm:
        """The gate; its loss is GRPO's. As published, PODS is divided by what it keeps."""
        if self.rate == 1:
            return text_arm(name=self.name, **LOSSES["GRPO"])
        if self.rule == "unbiased":
            return text_arm(name=self.name, gate=UnbiasedGate(rate=self.rate), **LOSSES["GRPO"])
        gate = DrawnVarianceGate(rate=self.rate)
        return text_arm(name=self.name, gate=gate, denominator="kept", **LOSSES["GRPO"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane(Field):
    """A field whose points are run by the clock."""

    points: tuple[Point, ...] = ()
    rivals: tuple[Point, ...] = ()
    """Points with other learning rates that are run with all seeds, whatever the tuning seed says
    of them: the best dense one of all is what gates are compared with."""

    def __post_init__(self) -> None:
        points = (*self.points, *self.rivals)
        uneven = [point.name for point in points if point.num_rows % self.repeats]
        if uneven:
            raise ValueError(
                f"points must have whole groups of {self.repeats} rows, got {', '.join(uneven)}; "
                f"give multiples of repeats."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(FieldSettings):
    """All that can change the results."""

    main: Field
    """Where selections and losses are crossed, as populations."""
    rare: tuple[Field, ...]
    """The same from starts that are rarely right, with some of the arms."""
    planes: tuple[Plane, ...]
    """Trained one by one through the product, by the clock; the first has the main field's model
    and starts."""
    timed: Field
    """The largest model: seconds of a step, no learning."""
    rate: float = 0.1
    """Share of the units that selections keep."""
    noise: float = 1.5
    """Bound of the gate without a rate."""
    first_seeds: int = 3
    """Reported seeds that all arms have; those of `main.num_seeds` beyond come later, of the
    crossed arms alone."""
    target: float = 0.92
    """Held-out reward that a run by the clock ends at, a mean of two successive evaluations."""
    longer: float = 1.5
    """Factor on the steps of the points that are run with all seeds, which differ in their pace."""
    evaluations: int = 10
    """Of a run in a population, evenly spaced, and one before it."""
    timed_rates: tuple[float, ...] = (0.1, 0.03)
    timed_rounds: int = 3
    """Of the clock, for every arm in turn."""
    timed_tokens: int = 32_768
    """Of a training forward of the largest model."""

    @property
    def populations(self) -> tuple[Field, ...]:
        """Fields that are trained as populations."""
        return (self.main, *self.rare)

    @property
    def fields(self) -> tuple[Field, ...]:
        """All of them, one for each name: starts are made by it."""
        found: dict[str, Field] = {}
        for field in (*self.populations, *self.planes, self.timed):
            found.setdefault(field.name, field)
        return tuple(found.values())

    def everyone(self) -> list[Arm]:
        """Return all arms of the main field."""
        return crossed(self.rate) + variants(self.rate, mark=mark_of(self.main), noise=self.noise)

    def of(self, field: Field) -> list[Arm]:
        """Return who meets in a field."""
        return [each for each in self.everyone() if not field.only or each.name in field.only]

    def seeds(self, field: Field, arm: Arm) -> range:
        """Return the reported seeds of an arm in a field."""
        is_crossed = arm in crossed(self.rate)
        return range(field.num_seeds if is_crossed else min(field.num_seeds, self.first_seeds))


def mark_of(field: Field) -> str:
    """Return the character that stands before an answer of a field's task."""
    task = make(field.task, field.level)
    if not isinstance(task, AnswerTask):
        raise ValueError(f"field must have a task with a mark, got {field.task!r}; take 'sorting'.")
    return task.mark


LOWER, HIGHER = (1.5e-5, 3e-5), (3e-5, 5e-5)
"""Learning rates of a point of the plane: 3e-5, the best of 2048 rows in version 1 of this study,
and a lower one where few rows make a noisy step, else a higher one."""


def _point(num_rows: int, percents: float, num_steps: int, **options: Any) -> Point:
    """Return a point of the 25m plane with its learning rates."""
    rate = percents / 100
    noisy = num_rows < 1024 if rate == 1 else sampling.count_for(rate, num_rows) < 100
    rates = LOWER if noisy else HIGHER
    return Point(num_rows=num_rows, rate=rate, num_steps=num_steps, learning_rates=rates, **options)


def _larger(num_rows: int, percents: float, num_steps: int, rates: tuple[float, ...]) -> Point:
    return Point(num_rows=num_rows, rate=percents / 100, num_steps=num_steps, learning_rates=rates)


_SORTING: dict[str, Any] = {"task": "sorting", "level": 3, "other_seeds": 0}
_MAIN = Field(
    **_SORTING,
    size="25m",
    num_prompts=64,
    warm_rate=5e-4,
    learning_rates=(3e-6, 1e-5, 3e-5),
    tune_steps=100,
    num_steps=100,
    num_seeds=5,
    tune_seeds=1,
)
_RARE = dataclasses.replace(
    _MAIN,
    num_steps=120,
    warm_every=2,
    num_seeds=3,
    tune_seeds=0,
    tuned_on=_MAIN.name,
    only=(
        "GRPO",
        "delight by PG",
        "|advantage| by GRPO",
        "random by GRPO",
        "unbiased by GRPO",
    ),
)
_PLANE_25M = Plane(
    **_SORTING,
    size="25m",
    warm_rate=5e-4,
    num_seeds=5,
    tune_seeds=1,
    points=(
        _point(256, 100, 250),
        _point(512, 100, 200),
        _point(1024, 100, 125),
        _point(2048, 100, 75),
        _point(4096, 100, 38),
        _point(1024, 10, 170),
        _point(2048, 3, 125),
        _point(2048, 10, 112),
        _point(2048, 30, 94),
        _point(4096, 3, 74),
        _point(4096, 10, 64),
        _point(8192, 1, 43),
        _point(8192, 3, 40),
        _point(2048, 10, 112, rule="PODS"),
    ),
)
_PLANE_300M = Plane(
    **_SORTING,
    size="300m",
    warm_rate=2e-4,
    num_seeds=3,
    tune_seeds=1,
    points=(
        _larger(512, 100, 110, LOWER),
        _larger(1024, 100, 60, LOWER),
        _larger(2048, 100, 34, (3e-5,)),
        _larger(1024, 10, 100, LOWER),
        _larger(2048, 10, 60, LOWER),
        _larger(4096, 3, 36, (3e-5,)),
    ),
    rivals=(_larger(2048, 100, 34, (1.5e-5,)),),
)
_PLANE_85M = Plane(
    **_SORTING,
    size="85m",
    warm_rate=3e-4,
    num_seeds=3,
    tune_seeds=1,
    points=(
        _larger(512, 100, 130, LOWER),
        _larger(1024, 100, 75, LOWER),
        _larger(2048, 10, 80, LOWER),
    ),
)
FULL = Settings(
    main=_MAIN,
    rare=(dataclasses.replace(_RARE, start=0.05), dataclasses.replace(_RARE, start=0.01)),
    planes=(_PLANE_25M, _PLANE_300M, _PLANE_85M),
    timed=Field(
        **_SORTING,
        size="1b",
        num_prompts=256,
        warm_rate=1.5e-4,
        start=0.1,
        num_seeds=1,
        tune_seeds=0,
    ),
    num_held_out=1024,
    greedy=False,
    tune_evaluations=5,
    # 34 members with 1024 held-out prompts: 66 are those of the first three seeds.
    most_rows=34 * 1024,
)

_TOY_PLANE = Plane(
    **{field.name: getattr(TOY, field.name) for field in dataclasses.fields(TOY)}
    | {"other_seeds": 0},
    points=(
        Point(num_rows=32, num_steps=12, learning_rates=(3e-4, 1e-3)),
        Point(num_rows=64, num_steps=8, learning_rates=(1e-3,)),
        Point(num_rows=64, rate=0.3, num_steps=8, learning_rates=(3e-4, 1e-3)),
        Point(num_rows=128, rate=0.1, num_steps=6, learning_rates=(1e-3,)),
        Point(num_rows=64, rate=0.3, rule="PODS", num_steps=8, learning_rates=(1e-3,)),
    ),
    rivals=(Point(num_rows=64, num_steps=8, learning_rates=(3e-4,)),),
)
SMALL = Settings(
    main=dataclasses.replace(TOY, num_steps=12, other_seeds=0),
    rare=(
        dataclasses.replace(
            TOY,
            start=0.05,
            num_steps=8,
            num_seeds=1,
            other_seeds=0,
            tune_seeds=0,
            tuned_on=TOY.name,
            only=("GRPO", "delight by PG", "unbiased by GRPO"),
        ),
    ),
    planes=(_TOY_PLANE,),
    timed=dataclasses.replace(
        TOY, task="addition", level=1, start=0.1, num_seeds=1, other_seeds=0, tune_seeds=0
    ),
    first_seeds=1,
    target=0.5,
    num_held_out=64,
    greedy=False,
    evaluations=4,
    wall_evaluations=4,
    tune_evaluations=2,
    timed_rounds=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for all fields that learn."""
    chosen = FULL if size == "full" else SMALL
    if num_seeds is None:
        return chosen

    def seeded(field: FieldT) -> FieldT:
        return dataclasses.replace(field, num_seeds=num_seeds)

    return dataclasses.replace(
        chosen,
        main=seeded(chosen.main),
        rare=tuple(map(seeded, chosen.rare)),
        planes=tuple(map(seeded, chosen.planes)),
        first_seeds=num_seeds,
    )
