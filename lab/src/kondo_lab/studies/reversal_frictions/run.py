"""Two parts: each friction alone at H = 10, and all of them together by length."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kondo.core import losses
from kondo_lab.part import Context, Part, Record
from kondo_lab.population.member import Frictions, Member, Update, each_seed
from kondo_lab.population.train import Population
from kondo_lab.studies import learner_error, reversals, updates
from kondo_lab.studies.reversal_frictions.settings import Settings

NONE = "none"
EACH, TOGETHER = "each", "together"
BY_TOKEN = "PG by token ratio"


class Sweep(NamedTuple):
    """One friction at several strengths."""

    field: str
    """Of `Frictions`."""
    strengths: Sequence[float]
    label: str
    """What its axis says."""


def sweeps(settings: Settings) -> dict[str, Sweep]:
    """Return the frictions by name."""
    return {
        "staleness": Sweep("delay", settings.delays, "delay in learner steps"),
        "bugs": Sweep("bug", settings.bugs, "share of rows replaced by zeros"),
        "corruption": Sweep("corruption", settings.corruptions, "share of rewards that are a coin"),
        "discovery": Sweep("discovery", settings.discoveries, "share of rows that are right"),
    }


def methods(settings: Settings) -> dict[str, Update]:
    """Return the compared rules by name."""
    return {
        "PG": updates.PG,
        "PPO": updates.PPO,
        "PMPO": updates.PMPO,
        learner_error.capped(settings.cap): learner_error.importance_weighted(settings.cap),
        "DG": updates.DG,
        updates.percent(settings.rate): updates.kondo(settings.rate),
    }


def compared_together(settings: Settings) -> dict[str, Update]:
    """Return the rules of the part together: one more, PG as the author's code has it."""
    unclipped = Update(loss=partial(losses.ppo, clip=math.inf))
    return methods(settings) | {BY_TOKEN: unclipped}


def named(method: str, friction: str) -> str:
    """Return the series of a method under a friction."""
    return f"{method}, {friction}"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name=EACH, run=partial(_each, settings), work=120),
        Part(name=TOGETHER, run=partial(_together, settings), work=70),
    ]


def _each(settings: Settings, context: Context) -> Iterable[Record]:
    """Every friction alone, and none. Setting: strength."""
    cells: list[tuple[str, float, Frictions]] = [(NONE, 0.0, Frictions())]
    for friction, sweep in sweeps(settings).items():
        for strength in sweep.strengths:
            options: dict[str, Any] = {sweep.field: strength}
            if sweep.field == "delay":
                options["uniform_delay"] = True
            cells.append((friction, strength, Frictions(**options)))
    # One population per method: their programs differ in size, and overlap on a GPU.
    populations = []
    for method, update in methods(settings).items():
        members = [
            member
            for friction, strength, met in cells
            for member in each_seed(
                {named(method, friction): update},
                settings.num_seeds,
                learning_rate=settings.learning_rate,
                setting=strength,
                frictions=met,
            )
        ]
        populations.append(_population(settings, context, members, settings.length))
    return _train(settings, context, EACH, populations)


def _together(settings: Settings, context: Context) -> Iterable[Record]:
    """All frictions at once. Setting: H."""
    populations = []
    for length in sorted(settings.lengths, reverse=True):
        members = each_seed(
            compared_together(settings),
            settings.num_seeds if length == settings.length else settings.length_seeds,
            learning_rate=settings.learning_rate,
            setting=length,
            frictions=settings.together,
        )
        populations.append(_population(settings, context, members, length))
    return _train(settings, context, TOGETHER, populations)


def _population(
    settings: Settings, context: Context, members: list[Member], length: int
) -> Population:
    return reversals.population(context, members, length=length, num_tokens=settings.num_tokens)


def _train(
    settings: Settings, context: Context, part: str, populations: list[Population]
) -> list[Record]:
    between = settings.num_steps // settings.looks
    every = range(between, settings.num_steps + 1, between)
    return reversals.train(
        populations,
        context,
        part=part,
        num_steps=settings.num_steps,
        precision=settings.precision,
        log_steps=every,
        evaluate_steps=every,
        probe=partial(learner_error.sequence_error, num_prompts=settings.test_prompts),
    )
