"""What the study runs: fields, the frictions in each, and who meets them."""

import dataclasses
from typing import Any

from kondo_lab.language.contenders import Contender, percent
from kondo_lab.language.corrections import corrections, needs_behaviour
from kondo_lab.language.frictions import NONE, Friction
from kondo_lab.studies.lm_rl.settings import TOY, Field, Training
from kondo_lab.studies.study import Size

USUAL_START = 0.3
"""Reward where supervised starts end, in fields that are not about rare success."""
NOISE = 0.5
"""Standard deviation of wrong log-probs, in nats a token."""
COMBINED = Friction(name="combined", refresh=16, broken=0.1, coin=0.2, temperature=1.15)
COMBINED_WRONG = dataclasses.replace(
    COMBINED, name="combined, wrong log-probs", reported="noisy", noise=NOISE
)


def refreshed(steps: int) -> Friction:
    """Return actors that get new weights every so many steps."""
    return Friction(name=f"refresh {steps}", refresh=steps)


def shared(kind: str, share: float) -> Friction:
    """Return a friction that hits a share of the answers or rewards.

    Example:
        >>> from kondo_lab.studies.lm_frictions.settings import shared
        >>> shared("broken", 0.3).name
        'broken 30%'
    """
    strength: dict[str, Any] = {kind: share}
    return Friction(name=f"{kind} {percent(share)}", **strength)


def at_temperature(temperature: float) -> Friction:
    """Return actors that sample at another temperature than the learner's, 1."""
    return Friction(name=f"temperature {temperature:g}", temperature=temperature)


def reported(base: Friction) -> tuple[Friction, ...]:
    """Return a friction with log-probs that are wrong in three ways."""
    return (
        dataclasses.replace(
            base, name=f"{base.name}, wrong log-probs", reported="noisy", noise=NOISE
        ),
        dataclasses.replace(base, name=f"{base.name}, probability one", reported="one"),
        dataclasses.replace(base, name=f"{base.name}, no log-probs", reported="missing"),
    )


FIRST = (
    NONE,
    COMBINED,
    COMBINED_WRONG,
    refreshed(64),
    shared("broken", 0.3),
    shared("coin", 0.3),
    at_temperature(1.3),
)
"""No friction, all of them, and the strongest of each kind."""
LATER = (
    refreshed(16),
    *reported(refreshed(16)),
    refreshed(4),
    shared("flipped", 0.2),
    shared("biased", 0.2),
    shared("broken", 0.1),
    shared("coin", 0.1),
    Friction(name="int8", bits=8),
    at_temperature(1.15),
    shared("broken", 0.03),
)
"""The weaker ones."""
LAGS = (
    Friction(name="lag 16", lag=16),
    Friction(name="uniform lag 32", lag=32, uniform=True),
)
"""Other kinds of staleness, in populations of their own: past weights take much memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrictionField(Field):
    """A field, and the frictions that are tried in it."""

    start: float = USUAL_START
    """Reward where its supervised starts end."""
    first: tuple[Friction, ...] = FIRST
    """All seeds of these come before the first of `later`."""
    later: tuple[Friction, ...] = ()
    lags: tuple[Friction, ...] = ()
    """After all others."""

    @property
    def name(self) -> str:
        """As parts call it."""
        rare = "" if self.start == USUAL_START else f"-from-{percent(self.start)}"
        return super().name + rare

    @property
    def cells(self) -> tuple[Friction, ...]:
        """All of its frictions."""
        return (*self.first, *self.later, *self.lags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """All that can change the results."""

    grids: tuple[FrictionField, ...]
    """The first is the main one, where learning rates are tuned."""
    etas: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    rate: float = 0.1
    """Share of the rows that DG-K keeps."""
    tuned_under: tuple[Friction, ...] = (NONE, COMBINED)
    """A learning rate is chosen by the mean reward at the end over these."""
    lag_rows: int = 16 * 512
    """Of one population with lags: 33 versions of 16 models of 25m take 50 GiB."""
    evaluations: int = 10
    """Of a run, evenly spaced, and one before it."""

    @property
    def fields(self) -> tuple[FrictionField, ...]:
        """All of them."""
        return self.grids

    @property
    def main(self) -> FrictionField:
        """Where learning rates are tuned."""
        return self.grids[0]

    def everyone(self) -> list[Contender]:
        """Return all contenders."""
        return corrections(etas=self.etas, rate=self.rate)

    def of(self, field: Field) -> list[Contender]:
        """Return who meets in a field."""
        return [each for each in self.everyone() if not field.only or each.name in field.only]

    def under(self, field: Field, cell: Friction) -> list[Contender]:
        """Return who is run with a friction.

        Where only the reported log-probs differ from another cell, those who do not look at them
        would do the same as there.
        """
        everyone = self.of(field)
        if cell.reports_truly:
            return everyone
        return [each for each in everyone if needs_behaviour(each)]

    def clocked(self, field: Field) -> list[Contender]:
        """Return nobody."""
        return []

    def seeds(self, field: Field, contender: Contender) -> range:
        """Return the reported seeds."""
        return range(field.num_seeds)

    def start_reward(self, field: Field) -> float:
        """Return the reward where a field's supervised starts end."""
        return field.start if isinstance(field, FrictionField) else self.warm_reward


_SORTING = FrictionField(
    task="sorting",
    level=3,
    size="25m",
    num_prompts=64,
    warm_rate=5e-4,
    learning_rates=(1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
    tune_steps=100,
    num_steps=100,
    num_seeds=3,
    other_seeds=0,
    tune_seeds=1,
    later=LATER,
    lags=LAGS,
)
_OTHER = dataclasses.replace(_SORTING, tuned_on=_SORTING.name, tune_seeds=0, num_seeds=2, lags=())
_RARE = dataclasses.replace(
    _OTHER,
    first=(NONE, COMBINED),
    later=(),
    only=(
        "GRPO uncorrected",
        "PPO clip 0.2",
        "token ratios, cap 2",
        "DG, eta 1",
        "DG, eta 10",
        "DG without drift",
        "DG by sequence",
        "DG x PPO clip",
        "price 0",
        "DG-K 10%",
    ),
)
FULL = Settings(
    grids=(
        _SORTING,
        dataclasses.replace(_OTHER, task="addition"),
        dataclasses.replace(_RARE, start=0.05),
        dataclasses.replace(_RARE, start=0.01),
    ),
    warm_every=5,
    # 51 members of 512 rows: 102 are those of a seed's first cells.
    most_rows=51 * 512,
)

_TOY = FrictionField(
    **{field.name: getattr(TOY, field.name) for field in dataclasses.fields(TOY)}
    | {"num_steps": 8, "tune_steps": 4, "other_seeds": 0},
    first=(NONE, COMBINED, COMBINED_WRONG, refreshed(8)),
    later=(refreshed(2),),
    lags=(Friction(name="lag 2", lag=2),),
)
SMALL = Settings(
    grids=(
        dataclasses.replace(
            _TOY,
            only=(
                "GRPO uncorrected",
                "PPO clip 0.2",
                "sequence ratios, cap 2",
                "DG, eta 1",
                "DG without drift",
                "price 0",
            ),
        ),
        dataclasses.replace(
            _TOY,
            start=0.05,
            tuned_on=_TOY.name,
            tune_seeds=0,
            num_seeds=1,
            first=(NONE, COMBINED),
            later=(),
            lags=(),
            only=("GRPO uncorrected", "PPO clip 0.2", "DG, eta 1"),
        ),
    ),
    etas=(1.0,),
    num_held_out=64,
    evaluations=4,
    tune_evaluations=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for all fields."""
    chosen = FULL if size == "full" else SMALL
    if num_seeds is None:
        return chosen
    grids = tuple(dataclasses.replace(field, num_seeds=num_seeds) for field in chosen.grids)
    return dataclasses.replace(chosen, grids=grids)
