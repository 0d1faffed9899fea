"""Populations on images: MNIST at full size, the bundled digits at small size."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from kondo_lab.models.networks import Initialisation
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.training import run
from kondo_lab.training.member import Member
from kondo_lab.training.part import Context
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram
from kondo_lab.training.record import Run

Data = Literal["mnist", "digits"]


def task(data: Data, device: torch.device) -> ImageBandit:
    """Return the bandit of these images."""
    make = ImageBandit.mnist if data == "mnist" else ImageBandit.digits
    return make(device=device)


def populations(
    context: Context,
    members: Sequence[Member],
    *,
    data: Data,
    width: int,
    batch: int,
    samples: int = 1,
    initialisation: Initialisation = "uniform",
) -> list[Population]:
    """Return populations of MLP policies on the images, to be trained side by side."""
    program = BanditProgram(
        task(data, context.device),
        width=width,
        batch=batch,
        samples=samples,
        initialisation=initialisation,
    )
    return run.side_by_side(program, members, context.device)


def train(
    settings: Any, context: Context, members: Sequence[Member], *, samples: int = 1, **options: Any
) -> list[Run]:
    """Train the members on images, `samples` actions for each.

    `settings` have data, width, batch and initialisation; `options` are those of `run.train`.
    """
    names = ("data", "width", "batch", "initialisation")
    shape = {name: getattr(settings, name) for name in names}
    several = populations(context, members, samples=samples, **shape)
    return run.train(several, context, **options)


def logged(num_steps: int, every: int, points: Iterable[float]) -> list[int]:
    """Return steps to log an online error at: every so many, denser at first, and at the points.

    What is logged is a mean since the step before. At a point it is over the last `every` steps, or
    over the last tenth of the steps so far where that is less: early on errors fall fast.
    """
    steps = {*run.log_spaced(every, 8), *range(every, num_steps + 1, every)}
    early = [round(point) for point in points if point <= min(num_steps, 10 * every)]
    return sorted(steps.union(early, (round(0.9 * point) for point in early)))
