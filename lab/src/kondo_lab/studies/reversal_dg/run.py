"""Three parts, all paid by the token: learning curves, lengths H, vocabularies M."""

from collections.abc import Iterable
from functools import partial

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.member import Member, each_seed
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
        Part(name="vocabularies", run=partial(_sweep, settings, "vocabularies"), work=40),
        Part(name="lengths", run=partial(_sweep, settings, "lengths"), work=90),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 8: H = 10, M = 2."""
    step = max(1, settings.curve_steps // 50)
    members = _members(settings, settings.num_seeds, settings.learning_rate)
    return reversals.train(
        [reversals.population(context, members, length=settings.length, reward="bag_of_tokens")],
        context,
        part="curves",
        num_steps=settings.curve_steps,
        precision=settings.precision,
        log_steps=range(step, settings.curve_steps + 1, step),
    )


def _sweep(settings: Settings, part: str, context: Context) -> Iterable[Record]:
    """Figure 9: (a, c) by H with M = 2, (b, d) by M with H = 10. Setting: H or M."""
    if part == "lengths":
        shapes = [(length, length, 2) for length in settings.lengths]
    else:
        shapes = [(size, settings.length, size) for size in settings.vocabularies]
    populations = []
    for setting, length, num_tokens in sorted(shapes, reverse=True):
        members = [
            member
            for rate in settings.sweep_learning_rates
            for member in _members(settings, settings.sweep_seeds, rate, setting)
        ]
        made = reversals.population(
            context, members, length=length, num_tokens=num_tokens, reward="bag_of_tokens"
        )
        populations.append(made)
    precision = settings.precision
    return reversals.train(
        populations, context, part=part, num_steps=settings.num_steps, precision=precision
    )


def _members(
    settings: Settings, num_seeds: int, learning_rate: float, setting: float = float("nan")
) -> list[Member]:
    named = {at_learning_rate(n, settings, learning_rate): update for n, update in COMPARED.items()}
    return each_seed(named, num_seeds, learning_rate=learning_rate, setting=setting)
