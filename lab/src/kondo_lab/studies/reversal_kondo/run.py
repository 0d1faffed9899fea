"""Six parts: learning curves, lengths (three times), vocabularies, and what was tried beside.

Each length and each vocabulary is a population of its own shape; those of a part run side by side.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.losses import PreferenceOptimisation
from kondo_lab.population.member import Update, each_seed
from kondo_lab.population.run import log_spaced
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
    slower = dataclasses.replace(
        settings, learning_rate=settings.slow_learning_rate, sweep_seeds=settings.slow_seeds
    )
    # Figure 10, setting H: every method at the lengths around the longest it can solve; those
    # solved early in training; and a lower learning rate.
    lengths = {
        "lengths": (settings, settings.baseline_lengths, settings.delight_lengths, 180),
        "shorter": (settings, settings.short_baseline_lengths, settings.short_delight_lengths, 40),
        "slow": (slower, settings.slow_lengths, settings.slow_lengths, 80),
    }
    return [
        Part(name="curves", run=partial(_curves, settings), work=100),
        *(
            Part(name=part, run=partial(_by_length, own, part, dense, gated), work=work)
            for part, (own, dense, gated, work) in lengths.items()
        ),
        Part(name="vocabularies", run=partial(_vocabularies, settings), work=25),
        Part(name="tried", run=partial(_tried, settings), work=15),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 8: all methods at H = 10, M = 2."""
    compared = baselines() | delightful(settings)
    exact = updates.kondo_count(settings.rate)
    compared[f"{updates.percent(settings.rate)}, {EXACT_COUNT}"] = exact
    # One population per method: their programs differ in size, and overlap on a GPU.
    populations = []
    for name, update in compared.items():
        one = {name: update}
        members = each_seed(one, settings.num_seeds, learning_rate=settings.learning_rate)
        populations.append(reversals.population(context, members, length=settings.length))
    return reversals.train(
        populations,
        context,
        part="curves",
        num_steps=settings.num_steps,
        precision=settings.precision,
        log_steps=_fine(settings.num_steps),
    )


def _by_length(
    settings: Settings,
    part: str,
    baseline_lengths: Sequence[int],
    delight_lengths: Sequence[int],
    context: Context,
) -> Iterable[Record]:
    populations = []
    for length in sorted({*baseline_lengths, *delight_lengths}, reverse=True):
        compared: dict[str, Update] = {}
        if length in baseline_lengths:
            compared |= baselines()
        if length in delight_lengths:
            compared |= delightful(settings)
        rate = settings.learning_rate
        members = each_seed(compared, settings.sweep_seeds, learning_rate=rate, setting=length)
        populations.append(reversals.population(context, members, length=length))
    precision = settings.precision
    return reversals.train(
        populations, context, part=part, num_steps=settings.num_steps, precision=precision
    )


def _vocabularies(settings: Settings, context: Context) -> Iterable[Record]:
    """How the gates do as the vocabulary grows. Setting: M."""
    compared = {"PG": updates.PG} | delightful(settings)
    seeds, rate = settings.sweep_seeds, settings.learning_rate
    populations = [
        reversals.population(
            context,
            each_seed(compared, seeds, learning_rate=rate, setting=size),
            length=settings.length,
            num_tokens=size,
        )
        for size in settings.vocabularies
    ]
    return reversals.train(
        populations,
        context,
        part="vocabularies",
        num_steps=settings.vocabulary_steps,
        precision=settings.precision,
    )


def _tried(settings: Settings, context: Context) -> Iterable[Record]:
    """What is not known of the paper's runs: PMPO's two numbers, the gate's learning rate."""
    grid = {
        f"PMPO alpha {preferred:g} beta {beta:g}": Update(
            loss=PreferenceOptimisation(alpha=preferred, beta=beta)
        )
        for preferred in settings.preferred
        for beta in settings.betas
    }
    members = each_seed(grid, settings.sweep_seeds, learning_rate=settings.learning_rate)
    for rate in settings.tried_learning_rates:
        name = f"{updates.percent(settings.rate)} lr {rate:g}"
        gated = {name: updates.kondo(settings.rate)}
        members += each_seed(gated, settings.sweep_seeds, learning_rate=rate)
    population = reversals.population(context, members, length=settings.length)
    steps, precision = settings.tried_steps, settings.precision
    return reversals.train(
        [population], context, part="tried", num_steps=steps, precision=precision
    )


def _fine(num_steps: int) -> list[int]:
    """Return every 20th step of the first fifth, where errors fall, and then fewer and fewer."""
    early = max(1, num_steps // 500)
    return [*range(early, num_steps // 5, early), *log_spaced(num_steps, 80)]
