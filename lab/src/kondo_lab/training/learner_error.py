"""What the studies of frictions share: importance-weighted PG, and the error of the learner itself.

The error that a run logs is that of the acting policy, by the rewards that were paid.
With stale or buggy actors and corrupt rewards it says little about the learner, so these studies
measure the learner's own policy, without frictions and with true rewards.
"""

import math

import torch
from torch import Tensor

from kondo_lab.training.arms import Arm
from kondo_lab.training.losses import ImportanceWeighted
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram, SequenceProgram

LEARNER_ERROR = "learner error"
DIVERGED = "diverged"
"""1 where a parameter is no longer finite, else 0."""
IMAGES_AT_ONCE = 1000


def importance_weighted(cap: float = math.inf) -> Arm:
    """Return PG with weights pi / mu, exact or capped; they are not differentiated."""
    return Arm(loss=ImportanceWeighted(cap))


def capped(cap: float) -> str:
    """Return the legend of importance-weighted PG, such as IS-PG cap 10."""
    return "IS-PG" if math.isinf(cap) else f"IS-PG cap {cap:g}"


@torch.no_grad()
def image_error(population: Population, num_images: int) -> dict[str, Tensor]:
    """Return the learners' error on the first training images, and who diverged; each [P].

    The error is 1 - pi(label), what sampled actions would err by in the mean. A policy whose
    parameters are not finite is no distribution: it names no label, error 1.
    """
    program = population.program
    assert isinstance(program, BanditProgram)
    data = program.task.data
    right: list[Tensor] = []
    for start in range(0, min(num_images, len(data.labels)), IMAGES_AT_ONCE):
        some = slice(start, min(start + IMAGES_AT_ONCE, num_images))
        images, labels = data.shown(data.images[some]), data.labels[some]
        probs = program.network.shared_logits(population.parameters, images).softmax(dim=-1)
        of_label = probs.gather(2, labels.view(1, -1, 1).expand(len(probs), -1, 1))
        right.append(of_label.squeeze(2))
    found = torch.cat(right, dim=1).nan_to_num(0.0).double().mean(dim=1)
    return {LEARNER_ERROR: 1 - found, DIVERGED: diverged(population)}


@torch.no_grad()
def sequence_error(population: Population, num_prompts: int) -> dict[str, Tensor]:
    """Return the learners' error on fresh prompts, one answer each, and who diverged; each [P].

    Prompts are those of a negative step, which training never draws.
    """
    own = population.program
    assert isinstance(own, SequenceProgram)
    program = SequenceProgram(own.task, own.network, num_prompts=num_prompts, num_answers=1)
    step = torch.tensor(-population.num_steps, device=population.device)
    rewards = program.pay(program.act(population.parameters, population.draws, step))
    error = 1 - rewards.flatten(1).double().mean(dim=1)
    return {LEARNER_ERROR: error, DIVERGED: diverged(population)}


def diverged(population: Population) -> Tensor:
    """Return 1 where a member has a parameter that is not finite, else 0; [P]."""
    finite = [value.flatten(1).isfinite().all(dim=1) for value in population.parameters.values()]
    return 1 - torch.stack(finite).all(dim=0).double()
