"""What the study runs: fields, the frictions in each, and who meets them."""

import dataclasses
from typing import Any

from kondo_lab.evidence.study import Size
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.corrections import corrections, needs_behaviour
from kondo_lab.training.fields import TOY, USUAL_START, Field, FieldSettings
from kondo_lab.training.member import NONE, Frictions

NOISE = 0.5
"""Standard deviation of wrong log-probs, in nats a token."""
COMBINED = Frictions(name="combined", refresh=16, broken=0.1, corruption=0.2, temperature=1.15)
COMBINED_WRONG = dataclasses.replace(
    COMBINED, name="combined, wrong log-probs", reported="noisy", noise=NOISE
)


def refreshed(steps: int) -> Frictions:
    """Return actors that get new weights every so many steps."""
    return Frictions(name=f"refresh {steps}", refresh=steps)


def shared(kind: str, share: float) -> Frictions:
    """Return a friction that hits a share of the answers or rewards.

    Example:
        >>> from kondo_lab.studies.lm_frictions.settings import shared
        >>> shared("broken", 0.3).name
        'broken 30%'
    """
    field = {"coin": "corruption", "discovered": "discovery"}.get(kind, kind)
    strength: dict[str, Any] = {field: share}
    return Frictions(name=f"{kind} {percent(share)}", **strength)


def at_temperature(temperature: float) -> Frictions:
    """Return actors that sample at another temperature than the learner's, 1."""
    return Frictions(name=f"temperature {temperature:g}", temperature=temperature)


def reported(base: Frictions) -> tuple[Frictions, ...]:
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
    Frictions(name="int8", bits=8),
    at_temperature(1.15),
    shared("broken", 0.03),
)
"""The weaker ones."""
SWEPT = (
    Frictions(name="int4", bits=4),
    at_temperature(0.8),
    shared("coin", 0.6),
    shared("flipped", 0.1),
    shared("flipped", 0.3),
    shared("biased", 0.1),
    shared("biased", 0.4),
)
"""Further strengths."""
WEAKEST = (refreshed(4), shared("broken", 0.03), shared("coin", 0.1), at_temperature(1.15))
"""The weakest of each kind whose strongest is in `FIRST`: where the gain should begin to grow."""
LAGS = (
    Frictions(name="lag 4", delay=4),
    Frictions(name="lag 16", delay=16),
    Frictions(name="lag 32", delay=32),
    Frictions(name="uniform lag 8", delay=8, uniform_delay=True),
    Frictions(name="uniform lag 32", delay=32, uniform_delay=True),
)
"""Other kinds of staleness, in populations of their own: past weights take much memory."""
DISCOVERIES = (shared("discovered", 0.01), shared("discovered", 0.05))


def queued(size: int) -> Frictions:
    """Return actors that run while the learner learns, with a queue of so many batches."""
    return Frictions(name=f"asynchronous, queue {size}", queue=size)


CLAIMED = (
    "GRPO uncorrected",
    "PPO clip 0.2",
    "sequence ratios, cap 2",
    "DG, eta 1",
    "DG, eta 10",
    "price 0",
)
"""Who the claims and what we recommend are about: more seeds, tasks and sizes than the others. DG
with eta 10 is the rule without log-probs that tuning preferred."""
PAPERS = ("GRPO uncorrected", "DG, eta 1")
"""The paper's comparison."""
RARE = (
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
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Arms that meet frictions in a field, seed after seed."""

    kind: str
    """The beginning of the parts' names."""
    field: Field
    cells: tuple[Frictions, ...]
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ()
    """Names of the only arms; all of them where it is empty."""
    further: bool = False
    """It adds seeds to cells of another sweep. Left out where a number of seeds is asked for, as
    all sweeps have so many then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(FieldSettings):
    """All that can change the results."""

    main: Field
    """Where learning rates are tuned."""
    sweeps: tuple[Sweep, ...]
    """The most valuable first."""
    etas: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    rate: float = 0.1
    """Share of the rows that DG-K keeps."""
    tuned_under: tuple[Frictions, ...] = (NONE, COMBINED)
    """A learning rate is chosen by the mean reward at the end over these."""
    beyond: int = 2
    """Learning rates that are tried beyond the lowest or highest, where that is the best."""
    decayed: tuple[str, ...] = CLAIMED
    """Arms whose learning rate is also tried with a linear decay to 0."""
    decay_factors: tuple[float, ...] = (1.0, 3.0)
    """Times the best constant rate: where a decay begins."""
    lag_rows: int = 16 * 512
    """Of one population with lags: 33 versions of 16 models of 25m take 50 GiB."""
    evaluations: int = 10
    """Of a run, evenly spaced, and one before it."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """All of them, the main one first."""
        return tuple(dict.fromkeys([self.main, *(sweep.field for sweep in self.sweeps)]))

    def sweeps_in(self, field: Field) -> list[Sweep]:
        """Return those of a field."""
        return [sweep for sweep in self.sweeps if sweep.field == field]

    def cells(self, field: Field) -> tuple[Frictions, ...]:
        """Return all frictions of a field, in the order of its sweeps."""
        return tuple(dict.fromkeys(c for sweep in self.sweeps_in(field) for c in sweep.cells))

    def everyone(self) -> list[Arm]:
        """Return all arms."""
        return corrections(etas=self.etas, rate=self.rate)

    def of(self, field: Field) -> list[Arm]:
        """Return who is tuned in a field."""
        return [each for each in self.everyone() if not field.only or each.name in field.only]

    def under(self, sweep: Sweep, cell: Frictions) -> list[Arm]:
        """Return who is run with a friction.

        Where only the reported log-probs differ from another cell, those who do not look at them
        would do the same as there.
        """
        there = [each for each in self.of(sweep.field) if not sweep.only or each.name in sweep.only]
        return [each for each in there if cell.reports_truly or needs_behaviour(each)]


_SORTING = Field(
    task="sorting",
    level=3,
    size="25m",
    num_prompts=64,
    start=USUAL_START,
    warm_rate=5e-4,
    learning_rates=(1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
    tune_steps=100,
    num_steps=100,
    num_seeds=5,
    other_seeds=0,
    tune_seeds=1,
)
_OTHER = dataclasses.replace(_SORTING, tuned_on=_SORTING.name, tune_seeds=0, num_seeds=3)
_ADDITION = dataclasses.replace(_OTHER, task="addition")
_THIRD = dataclasses.replace(_OTHER, task="multiplication", level=2)
_LARGER = dataclasses.replace(_OTHER, size="85m", warm_rate=3e-4)
_FEW = dataclasses.replace(_OTHER, start=0.05)
_FEWEST = dataclasses.replace(_OTHER, start=0.01)
_DISCOVERING = ("sequence ratios, cap 2", *RARE)
FULL = Settings(
    main=_SORTING,
    sweeps=(
        Sweep(kind="first", field=_SORTING, cells=FIRST, seeds=(0, 1, 2)),
        Sweep(kind="first", field=_ADDITION, cells=FIRST, seeds=(0,)),
        Sweep(kind="later", field=_SORTING, cells=LATER, seeds=(0,)),
        Sweep(kind="first", field=_FEW, cells=(NONE, COMBINED), seeds=(0,), only=RARE),
        Sweep(kind="first", field=_FEWEST, cells=(NONE, COMBINED), seeds=(0,), only=RARE),
        Sweep(kind="claims", field=_SORTING, cells=FIRST, seeds=(3, 4), only=CLAIMED, further=True),
        Sweep(
            kind="growth",
            field=_SORTING,
            cells=WEAKEST,
            seeds=(1, 2, 3, 4),
            only=PAPERS,
            further=True,
        ),
        Sweep(
            kind="claims",
            field=_LARGER,
            cells=(COMBINED, COMBINED_WRONG),
            seeds=(0, 1, 2),
            only=CLAIMED,
        ),
        Sweep(kind="claims", field=_THIRD, cells=FIRST, seeds=(0, 1, 2), only=CLAIMED),
        Sweep(kind="discoveries", field=_FEW, cells=DISCOVERIES, seeds=(0,), only=_DISCOVERING),
        Sweep(kind="discoveries", field=_FEWEST, cells=DISCOVERIES, seeds=(0,), only=_DISCOVERING),
        *(
            Sweep(
                kind=f"queue {size}",
                field=_SORTING,
                cells=(queued(size),),
                seeds=(0, 1),
                only=CLAIMED,
            )
            for size in (1, 4, 16)
        ),
        Sweep(
            kind="claims", field=_ADDITION, cells=FIRST, seeds=(1, 2), only=CLAIMED, further=True
        ),
        Sweep(kind="swept", field=_SORTING, cells=SWEPT, seeds=(0,), only=CLAIMED),
        Sweep(kind="lags", field=_SORTING, cells=LAGS, seeds=(0,), only=CLAIMED),
        Sweep(
            kind="discoveries",
            field=_FEW,
            cells=DISCOVERIES,
            seeds=(1, 2),
            only=_DISCOVERING,
            further=True,
        ),
    ),
    warm_every=5,
    # 51 members of 512 rows: 102 are those of a seed's first cells.
    most_rows=51 * 512,
)

_TOY = dataclasses.replace(
    TOY,
    num_steps=8,
    tune_steps=4,
    other_seeds=0,
    only=(*PAPERS, "PPO clip 0.2", "sequence ratios, cap 2", "DG without drift", "price 0"),
)
_TOY_FEW = dataclasses.replace(
    _TOY,
    start=0.05,
    tuned_on=_TOY.name,
    tune_seeds=0,
    num_seeds=1,
    only=("GRPO uncorrected", "PPO clip 0.2", "DG, eta 1"),
)
SMALL = Settings(
    main=_TOY,
    sweeps=(
        Sweep(
            kind="first",
            field=_TOY,
            cells=(NONE, COMBINED, COMBINED_WRONG, refreshed(8)),
            seeds=(0, 1),
        ),
        Sweep(kind="later", field=_TOY, cells=(refreshed(2),), seeds=(0, 1)),
        Sweep(
            kind="first",
            field=_TOY_FEW,
            cells=(NONE, COMBINED, shared("discovered", 0.05)),
            seeds=(0,),
        ),
        Sweep(kind="queue 2", field=_TOY, cells=(queued(2),), seeds=(0,), only=PAPERS),
        Sweep(kind="lags", field=_TOY, cells=(Frictions(name="lag 2", delay=2),), seeds=(0, 1)),
    ),
    decayed=PAPERS,
    decay_factors=(1.0,),
    etas=(1.0,),
    num_held_out=64,
    evaluations=4,
    tune_evaluations=2,
)


def settings(size: Size, num_seeds: int | None) -> Settings:
    """Return the settings of a size; a number of seeds holds for all sweeps."""
    chosen = FULL if size == "full" else SMALL
    if num_seeds is None:
        return chosen

    def seeded(field: Field) -> Field:
        return dataclasses.replace(field, num_seeds=num_seeds)

    sweeps = tuple(
        dataclasses.replace(sweep, field=seeded(sweep.field), seeds=tuple(range(num_seeds)))
        for sweep in chosen.sweeps
        if not sweep.further
    )
    return dataclasses.replace(chosen, main=seeded(chosen.main), sweeps=sweeps)
