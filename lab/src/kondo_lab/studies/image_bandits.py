"""Populations on images: MNIST at full size, the bundled digits at small size."""

from collections.abc import Sequence
from typing import Literal

import torch

from kondo_lab.part import Context
from kondo_lab.population.member import Member
from kondo_lab.population.programs import BanditProgram
from kondo_lab.population.run import side_by_side
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
    return side_by_side(program, members, context.device)
