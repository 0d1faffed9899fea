"""One part per number of samples S, then the sweeps of the appendix.

With each S four baselines, PG and DG; at S = 1 the exact gradients too.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from kondo_lab.studies.mnist_dg import paper
from kondo_lab.studies.mnist_dg.settings import Settings
from kondo_lab.training import arms, image_bandits, run
from kondo_lab.training.arms import Arm, BaselineName
from kondo_lab.training.gates import Everything
from kondo_lab.training.losses import CrossEntropy, ExactPG
from kondo_lab.training.member import Member, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram
from kondo_lab.training.record import Run

BASELINES: tuple[BaselineName, ...] = ("zero", "constant", "expected", "oracle")
EXACT = {"exact PG": Arm(loss=ExactPG()), "cross-entropy": Arm(loss=CrossEntropy())}
METHODS = {"PG": arms.PG, "DG": arms.DG}
RATES, BATCHES, WIDTHS = "learning-rates", "batches", "widths"
"""Parts of the appendix."""
ETA = "DG, eta"
"""Series of the part `learning-rates`; its setting is eta."""
TO_PG = "1 - cosine to the exact PG gradient"
TO_CE = "1 - cosine to the cross-entropy gradient"


def series(method: str, baseline: str) -> str:
    """Return the name of a line: method and baseline."""
    return f"{method}, {baseline} baseline"


def part_name(samples: int) -> str:
    """Return the name of the part with S = samples."""
    return f"samples-{samples}"


def parts(settings: Settings) -> list[Part]:
    """Return one part per S, first what stands in most figures, then the appendix."""
    ends = (1, max(settings.samples))
    in_order = sorted(settings.samples, key=lambda samples: samples not in ends)
    work = {1: 36.0, 100: 24.0}
    return [
        *(
            Part(
                name=part_name(samples),
                run=partial(_train, settings, samples),
                work=work.get(samples, 17.0),
            )
            for samples in in_order
        ),
        Part(name=RATES, run=partial(_learning_rates, settings), work=12),
        Part(name=BATCHES, run=partial(_shapes, settings, BATCHES), work=16),
        Part(name=WIDTHS, run=partial(_shapes, settings, WIDTHS), work=21),
    ]


def compared_at(samples: int) -> dict[str, Arm]:
    """Return the updates that are compared at S = samples, by series."""
    compared: dict[str, Arm] = {
        series(method, baseline): dataclasses.replace(update, baseline=baseline)
        for method, update in METHODS.items()
        for baseline in BASELINES
    }
    return compared | EXACT if samples == 1 else compared


def _train(settings: Settings, samples: int, context: Context) -> Iterable[Run]:
    compared = compared_at(samples)
    seeds = settings.num_seeds if samples == 1 else settings.sweep_seeds
    members = each_seed(compared, seeds, learning_rate=settings.learning_rate, setting=samples)
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
        log_steps=image_bandits.logged(settings.num_steps, settings.log_every, paper.FIG_2_STEPS),
        evaluate_steps=range(step, settings.num_steps + 1, step) if probed else [],
        probe=partial(cosine_gaps, num_batches=settings.probe_batches) if probed else None,
    )


def _learning_rates(settings: Settings, context: Context) -> Iterable[Run]:
    """PG and DG by learning rate, and DG by eta. Setting: either."""
    seeds = settings.appendix_seeds
    members = []
    for rate in settings.learning_rates:
        members += each_seed(METHODS, seeds, learning_rate=rate, setting=rate)
    for eta in settings.etas:
        sharper = {ETA: Arm(unit="token", gate=Everything(eta=eta))}
        members += each_seed(sharper, seeds, learning_rate=settings.learning_rate, setting=eta)
    return _sweep(settings, context, RATES, [(settings.width, settings.batch, members)])


def _shapes(settings: Settings, part: str, context: Context) -> Iterable[Run]:
    """PG and DG by the size of a batch or the width of a network. Setting: either."""
    shapes = []
    for size in settings.batches if part == BATCHES else settings.widths:
        rate = settings.learning_rate
        members = each_seed(METHODS, settings.appendix_seeds, learning_rate=rate, setting=size)
        width, batch = (settings.width, size) if part == BATCHES else (size, settings.batch)
        shapes.append((width, batch, members))
    return _sweep(settings, context, part, shapes)


def _sweep(
    settings: Settings,
    context: Context,
    part: str,
    shapes: Sequence[tuple[int, int, list[Member]]],
) -> Iterable[Run]:
    """Train the members of every (width, batch) side by side."""
    task = image_bandits.task(settings.data, context.device)
    start = settings.initialisation
    populations = [
        population
        for width, batch, members in shapes
        for population in run.side_by_side(
            BanditProgram(task, width=width, batch=batch, initialisation=start),
            members,
            context.device,
        )
    ]
    tenth = settings.num_steps // 10
    return run.train(
        populations,
        context,
        part=part,
        num_steps=settings.num_steps,
        log_steps=range(tenth, settings.num_steps + 1, tenth),
    )


def cosine_gaps(population: Population, num_batches: int = 1) -> dict[str, Tensor]:
    """Return 1 - cosine of each member's gradient to two exact ones, a mean over fresh batches.

    Both exact gradients are taken over the actions, not over the images: they are those of the
    same batch of images.
    """
    # Negative steps are never trained on.
    steps = [-num_batches * population.num_steps - number for number in range(num_batches)]
    found = [_cosine_gaps(population, step) for step in steps]
    return {metric: torch.stack([one[metric] for one in found]).mean(dim=0) for metric in found[0]}


def _cosine_gaps(population: Population, step: int) -> dict[str, Tensor]:
    """Return them on the images of a step."""
    gaps: dict[str, list[Tensor]] = {TO_PG: [], TO_CE: []}
    with population.aside(torch.tensor(step, device=population.device)):
        for group in population.groups:
            rows = population.program.num_rows
            own = group.gradients(population, rows)
            for metric, exact in ((TO_PG, "exact PG"), (TO_CE, "cross-entropy")):
                oracle = group.gradients(population, rows, arm=EXACT[exact])
                gaps[metric].append(1 - _cosine(own, oracle))
    return {metric: torch.cat(values) for metric, values in gaps.items()}


def _cosine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """Return the cosine of two gradients of each member, [p]."""

    def dot(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
        terms = [(u.double() * v.double()).flatten(1).sum(dim=1) for u, v in zip(x, y, strict=True)]
        return torch.stack(terms).sum(dim=0)

    return dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
