"""Populations on images: MNIST at full size, the bundled digits at small size."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from kondo_lab.part import Context, Record
from kondo_lab.population import run
from kondo_lab.population.member import Member
from kondo_lab.population.programs import BanditProgram
from kondo_lab.population.train import Population
from kondo_lab.tasks.bandits import ImageBandit

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
) -> list[Population]:
    """Return populations of MLP policies on the images, to be trained side by side."""
    program = BanditProgram(task(data, context.device), width=width, batch=batch, samples=samples)
    return run.side_by_side(program, members, context.device)


def train(
    settings: Any, context: Context, members: Sequence[Member], *, samples: int = 1, **options: Any
) -> list[Record]:
    """Train the members on images, `samples` actions for each.

    `settings` have data, width and batch; `options` are those of `run.train`.
    """
    shape = {"data": settings.data, "width": settings.width, "batch": settings.batch}
    several = populations(context, members, samples=samples, **shape)
    return run.train(several, context, **options)
