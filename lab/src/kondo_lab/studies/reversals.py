"""Populations on token reversal, with the papers' transformer."""

from collections.abc import Sequence
from typing import Any

from kondo_lab.part import Context, Record
from kondo_lab.population import run
from kondo_lab.population.member import Member
from kondo_lab.population.networks import StackedTransformer
from kondo_lab.population.programs import SequenceProgram
from kondo_lab.population.train import Population
from kondo_lab.tasks.base import Credit
from kondo_lab.tasks.reversal import ReversalTask

NUM_PROMPTS = 10
NUM_ANSWERS = 10


def population(
    context: Context,
    members: Sequence[Member],
    *,
    length: int,
    num_tokens: int = 2,
    reward: Credit = "to_first_error",
) -> Population:
    """Return a population of transformers: d = 64, 2 layers, 2 heads, feed-forward 256."""
    task = ReversalTask(length=length, num_tokens=num_tokens, reward=reward)
    network = StackedTransformer(prompt_length=length, answer_length=length, num_tokens=num_tokens)
    program = SequenceProgram(task, network, num_prompts=NUM_PROMPTS, num_answers=NUM_ANSWERS)
    return Population(program, members, device=context.device)


def train(
    populations: Sequence[Population],
    context: Context,
    *,
    part: str,
    num_steps: int,
    precision: str,
    log_steps: Sequence[int] | None = None,
    **options: Any,
) -> list[Record]:
    """Train with products of this precision, logged at every fortieth of the way unless told."""
    if log_steps is None:
        log_steps = [num_steps * place // 40 for place in range(1, 41)]
    with run.matmul_precision(precision):
        return run.train(
            populations, context, part=part, num_steps=num_steps, log_steps=log_steps, **options
        )
