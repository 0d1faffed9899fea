"""Parts by kind, reward and seeds: a run that is stopped has what is worth most.

    each        every friction alone, and none, at H = 10               setting: strength
    together    all of them, by length                                  setting: H
    own         bugs, and all frictions, where replaced rows report     setting: strength, or H
                what the actor's policy would have said of them
    longer      all of them, at lengths that few solve                  setting: H
    why         which of the bugs' rows do the harm                     no setting

Names of parts are `<kind>-<reward>-seeds-<first>-<last>`; `without_seeds` is what is analysed.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from kondo import losses
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_frictions import bug_rows
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.tasks.base import Credit
from kondo_lab.training import arms, learner_error
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything
from kondo_lab.training.member import Frictions, Member, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.record import Run
from kondo_lab.training.run import log_and_regular

NONE, ALL = "none", "all frictions"
EACH, TOGETHER, OWN, LONGER, WHY = "each", "together", "own", "longer", "why"
BY_TOKEN = "PG by token ratio"
"""What the author's code calls PG."""
REWARDS: dict[str, Credit] = {"prefix": "to_first_error", "bag": "bag_of_tokens"}
PACE = 38_000
"""Steps of a member with H = 10 that an H200 makes in a second, when hundreds run side by side."""


class Sweep(NamedTuple):
    """One friction at several strengths."""

    field: str
    """Of `Frictions`."""
    strengths: Sequence[float]
    label: str
    """What its axis says."""


class Cell(NamedTuple):
    """A friction at one strength."""

    friction: str
    strength: float
    met: Frictions


def sweeps(settings: Settings) -> dict[str, Sweep]:
    """Return the frictions by name."""
    return {
        "staleness": Sweep("delay", settings.delays, "delay in learner steps"),
        "bugs": Sweep("bug", settings.bugs, "share of rows replaced by zeros"),
        "corruption": Sweep("corruption", settings.corruptions, "share of rewards that are a coin"),
        "discovery": Sweep("discovery", settings.discoveries, "share of rows that are right"),
    }


def cells(settings: Settings) -> list[Cell]:
    """Return no friction, then every friction alone at each of its strengths."""
    found = [Cell(NONE, 0.0, Frictions())]
    for friction, sweep in sweeps(settings).items():
        for strength in sweep.strengths:
            options: dict[str, Any] = {sweep.field: strength}
            if sweep.field == "delay":
                options["uniform_delay"] = True
            found.append(Cell(friction, strength, Frictions(**options)))
    return found


def methods(settings: Settings) -> dict[str, Arm]:
    """Return the compared rules by name; all but the last two are what DG is compared with."""
    return {
        "PG": arms.PG,
        BY_TOKEN: Arm(loss=partial(losses.ppo, clip=math.inf)),
        "PPO": arms.PPO,
        reversals.FLOAT32: arms.PMPO_FLOAT32,
        "PMPO": arms.PMPO,
        learner_error.capped(settings.cap): learner_error.importance_weighted(settings.cap),
        "DG": arms.DG,
        arms.dg_k(settings.rate): arms.kondo(settings.rate),
    }


def corrected(settings: Settings) -> dict[str, Arm]:
    """Return the rules whose updates depend on what the actors report."""
    names = (BY_TOKEN, "PPO", learner_error.capped(settings.cap))
    return {name: methods(settings)[name] for name in names}


def told_of_bugs(settings: Settings) -> dict[str, Arm]:
    """Return the rules of the part why; those with "bugs" in their names are told of them."""
    known: dict[str, Arm] = {
        "PG": arms.PG,
        "PG, no bugs that succeed": _told(successes=0.0),
        "PG, no bugs that fail": _told(failures=0.0),
        "DG": arms.DG,
        "DG, no bugs": _told(1.0, successes=0.0, failures=0.0),
        "DG, no bugs that succeed": _told(1.0, successes=0.0),
        "DG, no bugs that fail": _told(1.0, failures=0.0),
        "DG, weight 1 for bugs": Arm(
            unit="token", gate=bug_rows.TellsBugs(1.0, successes=1.0, failures=1.0)
        ),
    }
    known |= {
        f"DG, eta {eta:g}": Arm(unit="token", gate=Everything(eta)) for eta in settings.why_etas
    }
    rates = (settings.rate, *settings.why_rates)
    known |= {arms.dg_k(rate): arms.kondo(rate) for rate in rates}
    known["DG-K price 0"] = arms.PRICE_0
    name = f"{arms.dg_k(settings.rate)} and bugs that fail"
    known[name] = Arm(gate=bug_rows.AddsFailedBugs(rate=settings.rate))
    return known


def _told(eta: float | None = None, **weights: float) -> Arm:
    return Arm(unit="token", gate=bug_rows.TellsBugs(eta, **weights))


def named(method: str, friction: str) -> str:
    """Return the series of a method under a friction."""
    return f"{method}, {friction}"


def of(kind: str, reward: str) -> str:
    """Return the name of a part without its seeds."""
    return f"{kind}-{reward}"


def without_seeds(part: str) -> str:
    """Return a part's name without its seeds.

    Example:
        >>> from kondo_lab.studies.reversal_frictions.run import without_seeds
        >>> without_seeds("each-prefix-seeds-0-1")
        'each-prefix'
    """
    return re.sub(r"-seeds-\d+-\d+$", "", part)


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, those that are worth most first."""
    blocks = [
        range(start, min(start + settings.seeds_per_part, settings.num_seeds))
        for start in range(0, settings.num_seeds, settings.seeds_per_part)
    ]
    found: list[Part] = []
    for number, seeds in enumerate(blocks):
        for place, reward in enumerate(settings.rewards):
            for kind in (EACH, TOGETHER, OWN):
                found.append(_part(settings, kind, reward, seeds))
            if number == place == 0:
                found.append(_part(settings, WHY, reward, range(settings.why_seeds)))
        if number == 0:
            longer = range(settings.long_seeds)
            found += [_part(settings, LONGER, reward, longer) for reward in settings.rewards]
    return found


def _part(settings: Settings, kind: str, reward: str, seeds: range) -> Part:
    name = f"{of(kind, reward)}-seeds-{seeds.start}-{seeds.stop - 1}"
    run = partial(_run, settings, kind, reward, seeds, name)
    return Part(name=name, run=run, work=_expected_seconds(settings, kind, len(seeds)))


def _expected_seconds(settings: Settings, kind: str, num_seeds: int) -> float:
    """Return the time on an H200: a step's is proportional to H."""
    if kind == WHY:
        return len(told_of_bugs(settings)) * num_seeds * settings.why_steps / PACE
    tens = {
        EACH: len(cells(settings)) * settings.length / 10,
        TOGETHER: sum(settings.lengths) / 10,
        OWN: (len(settings.bugs) + 1) * settings.length / 10,
        LONGER: sum(settings.long_lengths) / 10,
    }
    compared = corrected(settings) if kind == OWN else methods(settings)
    return len(compared) * num_seeds * settings.num_steps * tens[kind] / PACE


def _run(
    settings: Settings, kind: str, reward: str, seeds: range, name: str, context: Context
) -> Iterable[Run]:
    """Train the members of a part, population by population, side by side."""
    populations = [
        reversals.population(
            context,
            members,
            length=length,
            num_tokens=settings.num_tokens,
            reward=REWARDS[reward],
            feed_forward=settings.feed_forward,
        )
        for length, members in _populations(settings, kind, seeds)
    ]
    steps = settings.why_steps if kind == WHY else settings.num_steps
    between = steps // settings.looks
    looks: Sequence[int] = range(between, steps + 1, between)
    if kind in (TOGETHER, LONGER):  # samples to an error: the shortest get there early
        looks = log_and_regular(
            steps, log_points=2 * settings.looks, regular_points=2 * settings.looks
        )
    return reversals.train(
        populations,
        context,
        part=name,
        num_steps=steps,
        precision=settings.precision,
        log_steps=looks,
        evaluate_steps=looks,
        probe=partial(_look, settings, kind),
    )


def _look(settings: Settings, kind: str, population: Population) -> dict[str, Tensor]:
    found = learner_error.sequence_error(population, settings.test_prompts)
    return found | bug_rows.shares(population) if kind == WHY else found


def _populations(settings: Settings, kind: str, seeds: range) -> Iterator[tuple[int, list[Member]]]:
    """Yield lengths and members; those of a population share kernels, and populations overlap."""
    together = settings.together
    match kind:
        case "each":
            for one in _one_by_one(methods(settings)):
                yield settings.length, _under(settings, one, cells(settings), seeds)
        case "own":
            met = [cell for cell in cells(settings) if cell.friction == "bugs"]
            met.append(Cell(ALL, settings.length, together))
            own = [c._replace(met=dataclasses.replace(c.met, replaced=None)) for c in met]
            for one in _one_by_one(corrected(settings)):
                yield settings.length, _under(settings, one, own, seeds)
        case "why":
            frictions = Frictions(bug=settings.why_bug)
            known = told_of_bugs(settings)
            for dense in (True, False):  # rules that choose rows have other sizes
                some = {n: own for n, own in known.items() if own.trains_all_rows is dense}
                yield settings.length, _members(settings, some, seeds, frictions=frictions)
        case _:
            lengths = settings.lengths if kind == TOGETHER else settings.long_lengths
            for length in sorted(lengths, reverse=True):
                options = {"setting": length, "frictions": together}
                yield length, _members(settings, methods(settings), seeds, **options)


def _one_by_one(compared: Mapping[str, Arm]) -> Iterator[dict[str, Arm]]:
    """Yield each method alone: their programs differ in size."""
    for name, update in compared.items():
        yield {name: update}


def _under(
    settings: Settings, compared: Mapping[str, Arm], met: Iterable[Cell], seeds: range
) -> list[Member]:
    """Return the members of methods under frictions."""
    found: list[Member] = []
    for cell in met:
        renamed = {named(name, cell.friction): update for name, update in compared.items()}
        options = {"setting": cell.strength, "frictions": cell.met}
        found += _members(settings, renamed, seeds, **options)
    return found


def _members(
    settings: Settings, compared: Mapping[str, Arm], seeds: range, **options: Any
) -> list[Member]:
    everyone = each_seed(compared, seeds.stop, learning_rate=settings.learning_rate, **options)
    return [member for member in everyone if member.seed in seeds]
