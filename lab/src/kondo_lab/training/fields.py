"""Fields, where arms of language models meet: what is trained there, and how parts are called."""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from kondo_lab.training.alone import Path
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.member import Member
from kondo_lab.training.tuning import tuned_name

USUAL_START = 0.3
"""Reward where supervised starts end, in fields that are not about rare success."""
FIRST_TUNE_SEED = 1000
"""Tuning seeds are counted from here, reported ones from 0: none is both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A task, a model, what a step samples, and for how long; arms are compared in it."""

    task: str
    level: int
    size: str
    """Of the model, a name in `kondo_lab.models.architecture.SIZES`."""
    num_prompts: int = 32
    """G, fresh prompts of a step."""
    repeats: int = 8
    """A, completions of a prompt: a group."""
    start: float | None = None
    """Reward where its supervised starts end; by default `FieldSettings.warm_reward`."""
    warm_steps: int = 2000
    """At most: a seed's supervised start ends where its reward is high enough."""
    warm_every: int | None = None
    """Steps between two looks at that reward; by default `FieldSettings.warm_every`."""
    warm_batch: int = 64
    warm_rate: float = 1e-3
    learning_rates: tuple[float, ...] = (3e-6, 1e-5, 3e-5, 1e-4)
    """Each arm's are tried on the tuning seeds. Adam's first steps move every weight by about
    the rate: at 3e-4 two of them undo the start of the smallest model, with any arm."""
    tune_steps: int = 150
    """As many as are reported: a rate that is best for a while may ruin the policy later."""
    num_steps: int = 150
    num_seeds: int = 5
    """Of the headline arms."""
    other_seeds: int = 2
    """Of the others; 0 leaves them out."""
    tune_seeds: int = 2
    tuned_on: str = ""
    """The name of another field of the same settings whose learning rates are taken over."""
    clocked_rates: tuple[float, ...] = ()
    """Rates of the arms that are run by the clock; empty where none is."""
    only: tuple[str, ...] = ()
    """Names of the only arms that are run here; all of them where it is empty."""
    dense_paths: tuple[Path, ...] = ("product", "plain")
    """The ways dense GRPO is run by the clock."""

    @property
    def name(self) -> str:
        """As parts call it."""
        usual = self.start in (None, USUAL_START)
        from_start = "" if usual else f"-from-{percent(self.start or 0.0)}"
        return f"{self.task}-{self.level}-{self.size}{from_start}"

    @property
    def num_rows(self) -> int:
        """N, completions of a step."""
        return self.num_prompts * self.repeats


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
"""The small field of every study."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSettings(ABC):
    """Settings of a study of fields: how starts and runs are made, whatever it compares."""

    warm_reward: float = USUAL_START
    """At temperature 1 on held-out prompts: where a supervised start ends."""
    warm_every: int = 10
    """Steps between two looks at it."""
    num_held_out: int = 256
    """Prompts of an evaluation."""
    greedy: bool = True
    """Whether evaluations also measure the likeliest answers."""
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
    def of(self, field: Field) -> list[Arm]:
        """Return who meets in a field."""

    def given_rates(self, field: Field) -> Mapping[str, float]:
        """Return series -> its learning rate, where it is not tuned here; by default none."""
        return {}

    def start_reward(self, field: Field) -> float:
        """Return the reward where a field's supervised starts end."""
        return self.warm_reward if field.start is None else field.start

    def field(self, name: str) -> Field:
        """Return the field of this name."""
        known = {field.name: field for field in self.fields}
        if name not in known:
            raise ValueError(f"name must be a field's, one of {', '.join(known)}, got {name!r}.")
        return known[name]

    def tune_seeds(self, field: Field) -> range:
        """Return the seeds that learning rates are chosen by."""
        return range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + field.tune_seeds)


def slug(*words: object) -> str:
    """Return words as names of parts and figures have them.

    Example:
        >>> from kondo_lab.training.fields import slug
        >>> slug("wall", "sorting-3-25m", "DG-K exact 3%", 0)
        'wall-sorting-3-25m-dg-k-exact-3-0'
    """
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


def warm_name(field: Field) -> str:
    """Return the name of the part that makes a field's starts."""
    return slug("warm", field.name)


def member(arm: Arm, learning_rate: float, seed: int) -> Member:
    """Return a run of an arm. Setting: the learning rate."""
    return Member(
        series=arm.name,
        seed=seed,
        learning_rate=learning_rate,
        arm=arm,
        setting=learning_rate,
    )


def tune_members(settings: FieldSettings, field: Field) -> list[Member]:
    """Return every arm that is tuned at every learning rate."""
    given = settings.given_rates(field)
    return [
        member(each, rate, seed)
        for each in settings.of(field)
        if tuned_name(each) == each.name and each.name not in given
        for rate in field.learning_rates
        for seed in settings.tune_seeds(field)
    ]


def named_pieces(
    kind: str, settings: FieldSettings, field: Field, members: Sequence[Member]
) -> dict[str, slice]:
    """Return part -> its members: no more than fit one population."""
    most = max(1, settings.most_rows // max(field.num_rows, settings.num_held_out))
    return {
        slug(kind, field.name, number + 1): slice(first, first + most)
        for number, first in enumerate(range(0, len(members), most))
    }


def tune_names(settings: FieldSettings, field: Field) -> list[str]:
    """Return the names of the parts that tune a field's arms."""
    field = settings.field(field.tuned_on) if field.tuned_on else field
    return list(named_pieces("tune", settings, field, tune_members(settings, field)))


def evenly(num_steps: int, points: int) -> list[int]:
    """Return step 0, and about `points` steps evenly spaced to the last.

    Example:
        >>> from kondo_lab.training.fields import evenly
        >>> evenly(10, 3)
        [0, 3, 7, 10]
    """
    return sorted({0, *(round(num_steps * point / points) for point in range(1, points + 1))})
