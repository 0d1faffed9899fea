"""Four parts: learning curves, noise, priorities, rates; the last takes most of the time."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

from kondo import Gate, delight, signals
from kondo_lab.studies.mnist_kondo import paper
from kondo_lab.studies.mnist_kondo.settings import Settings
from kondo_lab.training import arms, image_bandits
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Run
from kondo_lab.training.run import log_spaced

SIGNALS: dict[str, signals.Signal] = {
    "delight": delight,
    "advantage": signals.advantage,
    "|advantage|": signals.abs_advantage,
    "surprisal": signals.surprisal,
    "advantage + surprisal": signals.additive,
    "uniform": signals.uniform,
}
DELIGHT_NOISE, LOGIT_NOISE = "delight noise", "logit noise"
NOISES = (DELIGHT_NOISE, LOGIT_NOISE, "logit noise in the surprisal alone")
"""Logits give surprisal and baseline; in the last the baseline is free of noise."""


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name="curves", run=partial(_curves, settings), work=17),
        Part(name="noise", run=partial(_noise, settings), work=30),
        Part(name="priorities", run=partial(_priorities, settings), work=29),
        Part(name="rates", run=partial(_rates, settings), work=140),
    ]


def _curves(settings: Settings, context: Context) -> Iterable[Run]:
    """Figures 1 and 3: PG, DG and DG-K with many seeds, test error on the way."""
    compared = {"PG": arms.PG} | _delightful(settings)
    members = each_seed(compared, settings.num_seeds, learning_rate=settings.learning_rate)
    every, num_steps = settings.log_every, settings.num_steps
    points = [passes / settings.batch for passes in paper.FORWARD]
    return image_bandits.train(
        settings,
        context,
        members,
        part="curves",
        num_steps=num_steps,
        log_steps=image_bandits.logged(num_steps, every, points),
        evaluate_steps=range(every, num_steps + 1, every),
    )


def _delightful(settings: Settings) -> dict[str, Arm]:
    gate = arms.kondo_count(settings.rate)
    return {"DG": arms.DG, arms.dg_k(settings.rate): gate}


def _rates(settings: Settings, context: Context) -> Iterable[Run]:
    """Figure 2: rates x learning rates, far beyond 1M forward passes. Setting: learning rate."""
    members = []
    for rate in settings.rates:
        gate = {arms.dg_k(rate): arms.kondo_count(rate)}
        for learning_rate in settings.learning_rates:
            options = {"learning_rate": learning_rate, "setting": learning_rate}
            members += each_seed(gate, settings.rate_seeds, **options)
    return image_bandits.train(
        settings,
        context,
        members,
        part="rates",
        num_steps=settings.rate_steps,
        log_steps=log_spaced(settings.rate_steps, 60),
        evaluate_steps=[settings.rate_steps],
    )


def _noise(settings: Settings, context: Context) -> Iterable[Run]:
    """Figure 4: noise on delight, or on the logits it is computed from. Setting: its size."""
    members = []
    for way in NOISES:
        for name, update in _delightful(settings).items():
            for size in levels(settings, way):
                noisy = dataclasses.replace(update, **noise(way, size))
                members += _swept(settings, f"{name}, {way}", noisy, size)
    return _sweep(settings, context, "noise", members)


def levels(settings: Settings, way: str) -> tuple[float, ...]:
    """Return the sizes of noise that are tried."""
    return settings.delight_noises if way == DELIGHT_NOISE else settings.logit_noises


def noise(way: str, size: float) -> dict[str, Any]:
    """Return options of `Arm`."""
    if way == DELIGHT_NOISE:
        return {"delight_noise": size}
    return {"logit_noise": size, "screened": "both" if way == LOGIT_NOISE else "surprisal"}


def _priorities(settings: Settings, context: Context) -> Iterable[Run]:
    """Figure 5: (a) signals by rate, (b) the additive mix. Setting: rate, or surprisal's weight."""
    members = []
    for name, signal in SIGNALS.items():
        for rate in settings.priority_rates:
            members += _swept(settings, name, Arm(gate=Gate(rate=rate, signal=signal)), rate)
    for mix in settings.mixes:
        gate = Gate(rate=settings.rate, signal=partial(signals.additive, alpha=1 - mix))
        members += _swept(settings, "additive mix", Arm(gate=gate), mix)
    return _sweep(settings, context, "priorities", members)


def _swept(settings: Settings, series: str, update: Arm, setting: float) -> list[Member]:
    rate = settings.learning_rate
    return each_seed({series: update}, settings.sweep_seeds, learning_rate=rate, setting=setting)


def _sweep(settings: Settings, context: Context, part: str, members: list[Member]) -> Iterable[Run]:
    tenth = settings.num_steps // 10
    return image_bandits.train(
        settings,
        context,
        members,
        part=part,
        num_steps=settings.num_steps,
        log_steps=range(tenth, settings.num_steps + 1, tenth),
        evaluate_steps=[settings.num_steps],
    )
