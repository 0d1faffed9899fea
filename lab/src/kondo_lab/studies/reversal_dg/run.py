"""Three parts, all paid by the token: learning curves, lengths H, vocabularies M."""

from collections.abc import Iterable
from functools import partial

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.member import Member
from kondo_lab.population.run import matmul_precision, train
from kondo_lab.population.train import Population
from kondo_lab.studies import reversals, updates
from kondo_lab.studies.reversal_dg.settings import Settings

COMPARED = {"PG": updates.PG, "PPO": updates.PPO, "PMPO": updates.PMPO, "DG": updates.DG}


def at_learning_rate(name: str, settings: Settings, learning_rate: float) -> str:
    """Return a method's series; a learning rate other than Figure 8's is part of the name."""
    return name if learning_rate == settings.learning_rate else f"{name}, lr {learning_rate:g}"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name="curves", run=partial(_curves, settings), work=20),
        Part(name="vocabularies", run=partial(_vocabularies, settings), work=40),
        Part(name="lengths", run=partial(_lengths, settings), work=90),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 8: H = 10, M = 2."""
    step = max(1, settings.curve_steps // 50)
    with matmul_precision(settings.precision):
        return train(
            _population(context, settings.length, 2, _members(settings, settings.num_seeds)),
            context,
            part="curves",
            num_steps=settings.curve_steps,
            log_steps=range(step, settings.curve_steps + 1, step),
        )


def _lengths(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 9 (a, c): M = 2. Setting: H."""
    populations = [
        _population(context, length, 2, _swept(settings, length))
        for length in sorted(settings.lengths, reverse=True)
    ]
    return _sweep(settings, context, "lengths", populations)


def _vocabularies(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 9 (b, d): H = 10. Setting: M."""
    populations = [
        _population(context, settings.length, num_tokens, _swept(settings, num_tokens))
        for num_tokens in sorted(settings.vocabularies, reverse=True)
    ]
    return _sweep(settings, context, "vocabularies", populations)


def _sweep(
    settings: Settings, context: Context, part: str, populations: list[Population]
) -> Iterable[Record]:
    with matmul_precision(settings.precision):
        return train(
            populations,
            context,
            part=part,
            num_steps=settings.num_steps,
            log_steps=[settings.num_steps * place // 40 for place in range(1, 41)],
        )


def _swept(settings: Settings, setting: float) -> list[Member]:
    return [
        member
        for learning_rate in settings.sweep_learning_rates
        for member in _members(
            settings, settings.sweep_seeds, learning_rate=learning_rate, setting=setting
        )
    ]


def _members(
    settings: Settings,
    num_seeds: int,
    *,
    learning_rate: float | None = None,
    setting: float = float("nan"),
) -> list[Member]:
    learning_rate = settings.learning_rate if learning_rate is None else learning_rate
    return [
        Member(
            series=at_learning_rate(name, settings, learning_rate),
            seed=seed,
            learning_rate=learning_rate,
            update=update,
            setting=setting,
        )
        for name, update in COMPARED.items()
        for seed in range(num_seeds)
    ]


def _population(
    context: Context, length: int, num_tokens: int, members: list[Member]
) -> Population:
    return reversals.population(
        context, members, length=length, num_tokens=num_tokens, reward="bag_of_tokens"
    )
