"""Five parts, one for each figure, the cheapest to tell pairs apart first; then more seeds of the
pairs that are ahead, for the figures of which the first parts have few.

All learning rates of a width are members of one population; widths run side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import pandas as pd

from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_fit.settings import Pair, Settings
from kondo_lab.tasks.base import Credit
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.record import Run

PREFIX, TOKENS = "prefix", "tokens"
VOCABULARIES, SOLVED, LONGEST = "vocabularies", "lengths", "longest"


def named(method: str, pair: Pair) -> str:
    """Return the series of a method at a pair."""
    return f"{method}, {pair.name}"


def prefix_methods(settings: Settings) -> dict[str, Arm]:
    """Return what is compared on Kondo Figure 8."""
    return {
        "DG": arms.DG,
        arms.dg_k(settings.rate): arms.kondo(settings.rate),
        "DG-K price 0": arms.PRICE_0,
        "PG": arms.PG,
        "PMPO": arms.PMPO,
        "PMPO float32": arms.PMPO_FLOAT32,
    }


TOKEN_METHODS = {"PG": arms.PG, "DG": arms.DG, "PMPO float32": arms.PMPO_FLOAT32}
"""Compared on the DG paper's figures."""


FINAL = "-finalists"
"""Ends the names of the parts with more seeds of the finalists."""


def joined(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the parts of a figure under one name."""
    return records.assign(part=records["part"].str.removesuffix(FINAL))


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    first = [
        Part(name=PREFIX, run=partial(_prefix, settings), work=150),
        Part(name=TOKENS, run=partial(_tokens, settings), work=18),
    ]
    final: list[Part] = []
    for figure, run, num_seeds, work in (
        (VOCABULARIES, _vocabularies, settings.sweep_seeds, 75),
        (SOLVED, _solved, settings.solved_seeds, 75),
        (LONGEST, _longest, settings.sweep_seeds, 220),
    ):
        of_all = partial(run, settings, figure, settings.pairs, range(num_seeds))
        first.append(Part(name=figure, run=of_all, work=work))
        more = range(num_seeds, settings.final_seeds)
        if more and settings.finalists:
            name = figure + FINAL
            of_some = partial(run, settings, name, settings.finalists, more)
            share = len(settings.finalists) * len(more) / (len(settings.pairs) * num_seeds)
            final.append(Part(name=name, run=of_some, work=work * share))
    return [*first, *final]


def _prefix(settings: Settings, context: Context) -> Iterable[Run]:
    """Kondo Figure 8: H = 10, M = 2, paid by the correct prefix."""
    methods, seeds, steps = prefix_methods(settings), settings.prefix_seeds, settings.prefix_steps
    made = _populations(context, settings.pairs, methods, range(seeds), length=settings.length)
    return _train(settings, context, PREFIX, made, steps, looks=125)


def _tokens(settings: Settings, context: Context) -> Iterable[Run]:
    """DG Figure 8: H = 10, M = 2, paid by the token."""
    seeds, steps = settings.token_seeds, settings.token_steps
    made = _populations(
        context,
        settings.pairs,
        TOKEN_METHODS,
        range(seeds),
        length=settings.length,
        reward="bag_of_tokens",
    )
    return _train(settings, context, TOKENS, made, steps, looks=50)


def _vocabularies(
    settings: Settings, part: str, pairs: Sequence[Pair], seeds: range, context: Context
) -> Iterable[Run]:
    """DG Figure 9b: H = 10, paid by the token. Setting: M."""
    made = [
        population
        for size in sorted(settings.vocabularies, reverse=True)
        for population in _populations(
            context,
            pairs,
            TOKEN_METHODS,
            seeds,
            length=settings.length,
            num_tokens=size,
            setting=size,
            reward="bag_of_tokens",
        )
    ]
    return _train(settings, context, part, made, settings.sweep_steps)


def _longest(
    settings: Settings, part: str, pairs: Sequence[Pair], seeds: range, context: Context
) -> Iterable[Run]:
    """DG Figure 9a: the longest length, M = 2, paid by the token. Setting: H."""
    made = _populations(
        context,
        pairs,
        TOKEN_METHODS,
        seeds,
        length=settings.longest,
        setting=settings.longest,
        reward="bag_of_tokens",
    )
    return _train(settings, context, part, made, settings.sweep_steps)


def _solved(
    settings: Settings, part: str, pairs: Sequence[Pair], seeds: range, context: Context
) -> Iterable[Run]:
    """Kondo Figure 10: M = 2, paid by the correct prefix. Setting: H."""
    methods = prefix_methods(settings)
    made: list[Population] = []
    for length in sorted({*settings.baseline_lengths, *settings.delight_lengths}, reverse=True):
        names = ["PG"] if length in settings.baseline_lengths else []
        if length in settings.delight_lengths:
            names += ["DG", arms.dg_k(settings.rate)]
        own = {name: methods[name] for name in names}
        made += _populations(context, pairs, own, seeds, length=length, setting=length)
    return _train(settings, context, part, made, settings.solved_steps)


def _populations(
    context: Context,
    pairs: Sequence[Pair],
    methods: Mapping[str, Arm],
    seeds: range,
    *,
    length: int,
    num_tokens: int = 2,
    reward: Credit = "to_first_error",
    setting: float = float("nan"),
) -> list[Population]:
    """Return one population for each width: every method, seed and learning rate."""
    found = []
    for width in dict.fromkeys(pair.feed_forward for pair in pairs):
        members = []
        for pair in pairs:
            if pair.feed_forward == width:
                own = {named(method, pair): update for method, update in methods.items()}
                rate = pair.learning_rate
                members += each_seed(own, seeds, learning_rate=rate, setting=setting)
        population = reversals.population(
            context,
            members,
            length=length,
            num_tokens=num_tokens,
            reward=reward,
            feed_forward=width,
        )
        found.append(population)
    return found


def _train(
    settings: Settings,
    context: Context,
    part: str,
    populations: Sequence[Population],
    num_steps: int,
    *,
    looks: int = 40,
) -> list[Run]:
    every = max(1, num_steps // looks)
    return reversals.train(
        populations,
        context,
        part=part,
        num_steps=num_steps,
        precision=settings.precision,
        log_steps=range(every, num_steps + 1, every),
    )
