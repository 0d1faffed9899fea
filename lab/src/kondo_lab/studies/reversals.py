"""Populations on token reversal, with the papers' transformer."""

from collections.abc import Sequence

from kondo_lab.part import Context
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
    num_tokens: int,
    reward: Credit,
) -> Population:
    """Return a population of transformers: d = 64, 2 layers, 2 heads, feed-forward 256."""
    task = ReversalTask(length=length, num_tokens=num_tokens, reward=reward)
    network = StackedTransformer(prompt_length=length, answer_length=length, num_tokens=num_tokens)
    program = SequenceProgram(task, network, num_prompts=NUM_PROMPTS, num_answers=NUM_ANSWERS)
    return Population(program, members, device=context.device)
