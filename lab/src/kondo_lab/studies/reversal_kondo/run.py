"""Six parts: learning curves, lengths (three times), vocabularies, and what was tried beside.

Each length and each vocabulary is a population of its own shape; those of a part run side by side.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.losses import PreferenceOptimisation
from kondo_lab.population.member import Member, Update
from kondo_lab.population.run import log_spaced, matmul_precision, train
from kondo_lab.population.train import Population
from kondo_lab.studies import reversals, updates
from kondo_lab.studies.reversal_kondo.settings import Settings

EXACT_COUNT = "exact count"
"""Marks the gate of `kondo.Gate(rate=...)`: never more than the rate, ties broken at random."""


def baselines() -> dict[str, Update]:
    """Return the rules that gate nothing."""
    return {"PG": updates.PG, "PPO": updates.PPO, "PMPO": updates.PMPO}


def delightful(settings: Settings) -> dict[str, Update]:
    """Return DG and the two gates of the paper."""
    return {
        "DG": updates.DG,
        updates.percent(settings.rate): updates.kondo(settings.rate),
        "DG-K price 0": updates.PRICE_0,
    }


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name="curves", run=partial(_curves, settings), work=100),
        Part(name="lengths", run=partial(_lengths, settings), work=180),
        Part(name="shorter", run=partial(_shorter, settings), work=40),
        Part(name="slow", run=partial(_slow, settings), work=80),
        Part(name="vocabularies", run=partial(_vocabularies, settings), work=25),
        Part(name="tried", run=partial(_tried, settings), work=15),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 8: all methods at H = 10, M = 2."""
    compared = baselines() | delightful(settings)
    exact = updates.kondo_count(settings.rate)
    compared[f"{updates.percent(settings.rate)}, {EXACT_COUNT}"] = exact
    # One population per method: their programs differ in size, and overlap on a GPU.
    populations = [
        _population(settings, context, _members(settings, {name: update}, settings.num_seeds))
        for name, update in compared.items()
    ]
    return _train(
        settings,
        context,
        "curves",
        populations,
        settings.num_steps,
        log_steps=_fine(settings.num_steps),
    )


def _lengths(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 10: every method at the lengths around the longest it can solve. Setting: H."""
    return _by_length(
        settings, context, "lengths", settings.baseline_lengths, settings.delight_lengths
    )


def _shorter(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 10, the lengths solved early in training. Setting: H."""
    return _by_length(
        settings,
        context,
        "shorter",
        settings.short_baseline_lengths,
        settings.short_delight_lengths,
    )


def _slow(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 10 at a lower learning rate. Setting: H."""
    slower = dataclasses.replace(
        settings, learning_rate=settings.slow_learning_rate, sweep_seeds=settings.slow_seeds
    )
    return _by_length(slower, context, "slow", settings.slow_lengths, settings.slow_lengths)


def _by_length(
    settings: Settings,
    context: Context,
    part: str,
    baseline_lengths: Sequence[int],
    delight_lengths: Sequence[int],
) -> list[Record]:
    populations = []
    for length in sorted({*baseline_lengths, *delight_lengths}, reverse=True):
        compared: dict[str, Update] = {}
        if length in baseline_lengths:
            compared |= baselines()
        if length in delight_lengths:
            compared |= delightful(settings)
        members = _members(settings, compared, settings.sweep_seeds, setting=length)
        populations.append(_population(settings, context, members, length=length))
    return _train(settings, context, part, populations, settings.num_steps)


def _vocabularies(settings: Settings, context: Context) -> Iterable[Record]:
    """How the gates do as the vocabulary grows. Setting: M."""
    compared = {"PG": updates.PG} | delightful(settings)
    populations = [
        _population(
            settings,
            context,
            _members(settings, compared, settings.sweep_seeds, setting=num_tokens),
            num_tokens=num_tokens,
        )
        for num_tokens in settings.vocabularies
    ]
    return _train(settings, context, "vocabularies", populations, settings.vocabulary_steps)


def _tried(settings: Settings, context: Context) -> Iterable[Record]:
    """What is not known of the paper's runs: PMPO's two numbers, the gate's learning rate."""
    grid = {
        f"PMPO alpha {preferred:g} beta {beta:g}": Update(
            loss=PreferenceOptimisation(alpha=preferred, beta=beta)
        )
        for preferred in settings.preferred
        for beta in settings.betas
    }
    members = _members(settings, grid, settings.sweep_seeds)
    for rate in settings.tried_learning_rates:
        faster = dataclasses.replace(settings, learning_rate=rate)
        name = f"{updates.percent(settings.rate)} lr {rate:g}"
        gated = {name: updates.kondo(settings.rate)}
        members += _members(faster, gated, settings.sweep_seeds)
    population = _population(settings, context, members)
    return _train(settings, context, "tried", [population], settings.tried_steps)


def _train(
    settings: Settings,
    context: Context,
    part: str,
    populations: list[Population],
    num_steps: int,
    *,
    log_steps: Sequence[int] | None = None,
) -> list[Record]:
    """Train the populations of a part, logged at every fortieth of the way unless told."""
    fortieths = [num_steps * place // 40 for place in range(1, 41)]
    with matmul_precision(settings.precision):
        return train(
            populations,
            context,
            part=part,
            num_steps=num_steps,
            log_steps=fortieths if log_steps is None else log_steps,
        )


def _population(
    settings: Settings,
    context: Context,
    members: list[Member],
    *,
    length: int | None = None,
    num_tokens: int = 2,
) -> Population:
    return reversals.population(
        context,
        members,
        length=settings.length if length is None else length,
        num_tokens=num_tokens,
        reward="to_first_error",
    )


def _members(
    settings: Settings,
    compared: Mapping[str, Update],
    num_seeds: int,
    *,
    setting: float = float("nan"),
) -> list[Member]:
    return [
        Member(
            series=name,
            seed=seed,
            learning_rate=settings.learning_rate,
            update=update,
            setting=setting,
        )
        for name, update in compared.items()
        for seed in range(num_seeds)
    ]


def _fine(num_steps: int) -> list[int]:
    """Return every 20th step of the first fifth, where errors fall, and then fewer and fewer."""
    early = max(1, num_steps // 500)
    return [*range(early, num_steps // 5, early), *log_spaced(num_steps, 80)]
