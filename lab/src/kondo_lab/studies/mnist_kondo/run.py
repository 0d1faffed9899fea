"""Four parts: learning curves, rates, noise, priorities."""

import dataclasses
from collections.abc import Iterable
from functools import partial

from kondo.core import signals
from kondo.core.contract import Signal
from kondo.core.delight import delight
from kondo.core.gates import Gate
from kondo_lab.part import Context, Part, Record
from kondo_lab.population.member import Member, Update
from kondo_lab.population.run import log_spaced, train
from kondo_lab.population.train import Population
from kondo_lab.studies import image_bandits, updates
from kondo_lab.studies.mnist_kondo.settings import Settings

SIGNALS: dict[str, Signal] = {
    "delight": delight,
    "advantage": signals.advantage,
    "|advantage|": signals.abs_advantage,
    "surprisal": signals.surprisal,
    "advantage + surprisal": signals.additive,
    "uniform": signals.uniform,
}


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name="curves", run=partial(_curves, settings), work=15),
        Part(name="rates", run=partial(_rates, settings), work=120),
        Part(name="noise", run=partial(_noise, settings), work=25),
        Part(name="priorities", run=partial(_priorities, settings), work=30),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Record]:
    """Figures 1 and 3: PG, DG and DG-K with many seeds, test error on the way."""
    compared = {
        "PG": updates.PG,
        "DG": updates.DG,
        updates.percent(settings.rate): updates.kondo_count(settings.rate),
    }
    members = [
        Member(series=name, seed=seed, learning_rate=settings.learning_rate, update=update)
        for name, update in compared.items()
        for seed in range(settings.num_seeds)
    ]
    every = list(range(settings.log_every, settings.num_steps + 1, settings.log_every))
    return train(
        _populations(settings, context, members),
        context,
        part="curves",
        num_steps=settings.num_steps,
        log_steps=[*log_spaced(settings.log_every, 8), *every],
        evaluate_steps=every,
    )


def _rates(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 2: rates x learning rates, far beyond 1M forward passes. Setting: learning rate."""
    members = [
        Member(
            series=updates.percent(rate),
            seed=seed,
            learning_rate=learning_rate,
            setting=learning_rate,
            update=updates.kondo_count(rate),
        )
        for rate in settings.rates
        for learning_rate in settings.learning_rates
        for seed in range(settings.rate_seeds)
    ]
    return train(
        _populations(settings, context, members),
        context,
        part="rates",
        num_steps=settings.rate_steps,
        log_steps=log_spaced(settings.rate_steps, 60),
        evaluate_steps=[settings.rate_steps],
    )


def _noise(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 4: noise on delight, or on the logits it is computed from. Setting: its size."""
    levels = {"delight noise": settings.delight_noises, "logit noise": settings.logit_noises}
    members = [
        Member(
            series=f"{name}, {way}",
            seed=seed,
            learning_rate=settings.learning_rate,
            setting=level,
            update=_noisy(update, way, level),
        )
        for way in levels
        for name, update in (
            ("DG", updates.DG),
            (updates.percent(settings.rate), updates.kondo_count(settings.rate)),
        )
        for level in levels[way]
        for seed in range(settings.sweep_seeds)
    ]
    return _sweep(settings, context, "noise", members)


def _noisy(update: Update, way: str, level: float) -> Update:
    if way == "delight noise":
        return dataclasses.replace(update, delight_noise=level)
    return dataclasses.replace(update, logit_noise=level)


def _priorities(settings: Settings, context: Context) -> Iterable[Record]:
    """Figure 5: (a) signals by rate, (b) the additive mix. Setting: rate, or surprisal's weight."""
    by_signal = [
        Member(
            series=name,
            seed=seed,
            learning_rate=settings.learning_rate,
            setting=rate,
            update=Update(gate=Gate(rate=rate, signal=signal)),
        )
        for name, signal in SIGNALS.items()
        for rate in settings.priority_rates
        for seed in range(settings.sweep_seeds)
    ]
    by_mix = [
        Member(
            series="additive mix",
            seed=seed,
            learning_rate=settings.learning_rate,
            setting=mix,
            update=Update(
                gate=Gate(rate=settings.rate, signal=partial(signals.additive, alpha=1 - mix))
            ),
        )
        for mix in settings.mixes
        for seed in range(settings.sweep_seeds)
    ]
    return _sweep(settings, context, "priorities", [*by_signal, *by_mix])


def _sweep(
    settings: Settings, context: Context, part: str, members: list[Member]
) -> Iterable[Record]:
    tenth = settings.num_steps // 10
    return train(
        _populations(settings, context, members),
        context,
        part=part,
        num_steps=settings.num_steps,
        log_steps=range(tenth, settings.num_steps + 1, tenth),
        evaluate_steps=[settings.num_steps],
    )


def _populations(settings: Settings, context: Context, members: list[Member]) -> list[Population]:
    return image_bandits.populations(
        context, members, data=settings.data, width=settings.width, batch=settings.batch
    )
