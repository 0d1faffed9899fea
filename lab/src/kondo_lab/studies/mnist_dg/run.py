"""One part per number of samples S: four baselines, PG and DG; at S = 1 the exact gradients too."""

import dataclasses
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.losses import CrossEntropy, ExactPG
from kondo_lab.population.member import BaselineName, Update, each_seed
from kondo_lab.population.run import log_spaced
from kondo_lab.population.train import Population
from kondo_lab.studies import image_bandits, updates
from kondo_lab.studies.mnist_dg.settings import Settings

BASELINES: tuple[BaselineName, ...] = ("zero", "constant", "expected", "oracle")
EXACT = {"exact PG": Update(loss=ExactPG()), "cross-entropy": Update(loss=CrossEntropy())}
TO_PG = "1 - cosine to the exact PG gradient"
TO_CE = "1 - cosine to the cross-entropy gradient"


def series(method: str, baseline: str) -> str:
    """Return the name of a line: method and baseline."""
    return f"{method}, {baseline} baseline"


def part_name(samples: int) -> str:
    """Return the name of the part with S = samples."""
    return f"samples-{samples}"


def parts(settings: Settings) -> list[Part]:
    """Return one part per S."""
    return [
        Part(name=part_name(samples), run=partial(_train, settings, samples), work=20 + samples / 4)
        for samples in settings.samples
    ]


def _train(settings: Settings, samples: int, context: Context) -> Iterable[Record]:
    compared = {
        series(method, baseline): dataclasses.replace(update, baseline=baseline)
        for method, update in (("PG", updates.PG), ("DG", updates.DG))
        for baseline in BASELINES
    }
    if samples == 1:
        compared |= EXACT
    seeds = settings.num_seeds if samples == 1 else settings.sweep_seeds
    members = each_seed(compared, seeds, learning_rate=settings.learning_rate, setting=samples)
    every = list(range(settings.log_every, settings.num_steps + 1, settings.log_every))
    # S = 1 and the largest S stand in Figure 4.
    probed = samples in (1, max(settings.samples))
    step = settings.num_steps // settings.num_probes
    return image_bandits.train(
        settings,
        context,
        members,
        samples=samples,
        part=part_name(samples),
        num_steps=settings.num_steps,
        log_steps=[*log_spaced(settings.log_every, 8), *every],
        evaluate_steps=range(step, settings.num_steps + 1, step) if probed else [],
        probe=cosine_gaps if probed else None,
    )


def cosine_gaps(population: Population) -> dict[str, Tensor]:
    """Return 1 - cosine of each member's gradient to two exact ones, on fresh images.

    Both exact gradients are taken over the actions, not over the images: they are those of the
    same batch of images.
    """
    gaps: dict[str, list[Tensor]] = {TO_PG: [], TO_CE: []}
    # Negative steps are never trained on.
    with population.aside(torch.tensor(-population.num_steps, device=population.device)):
        for group in population.groups:
            rows = population.program.num_rows
            own = group.gradients(population, rows)
            for metric, exact in ((TO_PG, "exact PG"), (TO_CE, "cross-entropy")):
                oracle = group.gradients(population, rows, loss_of=EXACT[exact])
                gaps[metric].append(1 - _cosine(own, oracle))
    return {metric: torch.cat(values) for metric, values in gaps.items()}


def _cosine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """Return the cosine of two gradients of each member, [p]."""

    def dot(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
        terms = [(u.double() * v.double()).flatten(1).sum(dim=1) for u, v in zip(x, y, strict=True)]
        return torch.stack(terms).sum(dim=0)

    return dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
