"""A model of a few thousand parameters, a task it learns in seconds, and experience that is given.

warmed, member, population      runs of the task
Given, decide, weights          one decision about answers that nobody sampled
"""

import functools
from typing import NamedTuple

import torch

from kondo.engine.select import choose, units_of
from kondo_lab.models.architecture import language
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import decisions
from kondo_lab.training.member import NONE, Member
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Shape, TextProgram
from kondo_lab.training.supervised import warm_start

CPU = torch.device("cpu")
NUM_TOKENS = 6
TINY = language(width=16, num_layers=2, num_heads=2)


class Echo:
    """Repeat the first of two tokens, then end: "34" -> "3.". Held out is every prompt "x2"."""

    title = "echo"
    prompt_length, answer_length = 2, 3

    def prompts(self, draws, stream, step, count, *, held_out=False):
        first = draws.integers(f"{stream} first", step, NUM_TOKENS - 2, count) + 2
        second = draws.integers(f"{stream} second", step, NUM_TOKENS - 3, count) + 3
        return torch.stack([first, torch.full_like(second, 2) if held_out else second], dim=2)

    def demonstrations(self, prompts):
        token = prompts[..., :1]
        return torch.cat([token, torch.ones_like(token), torch.zeros_like(token)], dim=-1)

    def reward(self, prompts, completions):
        right = (completions[..., 0] == prompts[..., 0]) & (completions[..., 1] == 1)
        return right.float()


def model(size=TINY, *, prompt_length=2, answer_length=3, num_tokens=NUM_TOKENS, dtype=None):
    return StackedDecoder(
        size,
        prompt_length=prompt_length,
        answer_length=answer_length,
        num_tokens=num_tokens,
        dtype=dtype,
    )


def parameters(own, seeds=(0, 1), *, dtype=torch.float64, device=CPU):
    fresh = own.initialise(Draws(list(seeds)))
    return {name: value.to(device, dtype) for name, value in fresh.items()}


def tokens(own, *, members=2, rows=5, device=CPU):
    columns = own.prompt_length + own.answer_length
    drawn = Draws(range(members)).integers("tokens", 0, own.num_tokens, rows, columns)
    return drawn.to(device)


def part(values, members):
    return {name: value[members] for name, value in values.items()}


def program(*, num_prompts=6, repeats=4, num_held_out=20, own_model=None, **options):
    shape = Shape(num_prompts=num_prompts, repeats=repeats, num_held_out=num_held_out, **options)
    return TextProgram(Echo(), own_model or model(), shape)


@functools.cache
def warmed():
    """Two seeds that are right now and then."""
    start, _ = warm_start(
        model(), Echo(), [0, 1], num_steps=8, batch=16, learning_rate=1e-2, device=CPU
    )
    return start


def member(arm, frictions=NONE, *, seed=0, learning_rate=1e-3, series=None, **options):
    return Member(
        series=arm.name if series is None else series,
        seed=seed,
        learning_rate=learning_rate,
        arm=arm,
        frictions=frictions,
        **options,
    )


def population(members, *, kind=Population, device=CPU, dtype=torch.float32, **shape):
    return kind(program(**shape), members, device=device, dtype=dtype, start=warmed())


def select_as_on_a_gpu(log_probs, advantages, *, gate, mask, unit, generator=None):
    """Stand for `kondo.select`, which reads where reading is free: on the CPU."""
    units = units_of(gate, log_probs.detach(), advantages.detach(), unit, mask)
    return choose(units, gate, generator, reads=False)


class Given(NamedTuple):
    """Experience that was not sampled, and who decides on it."""

    program: TextProgram
    rolled: dict[str, torch.Tensor]
    draws: Draws
    step: int | torch.Tensor


def given(
    log_probs,
    rewards,
    mask,
    *,
    group,
    prompt_length,
    entropies=None,
    tokens=None,
    draws=None,
    step=0,
):
    """Return experience with these log-probs, [P, N, T] each, and rewards [P, N]."""
    num_members, num_rows, length = mask.shape
    if tokens is None:
        tokens = mask.new_zeros((num_members, num_rows, prompt_length + length), dtype=torch.int64)
    own = model(prompt_length=prompt_length, answer_length=length)
    rolled = {
        "tokens": tokens,
        "log_probs": log_probs,
        "entropies": torch.zeros_like(log_probs) if entropies is None else entropies,
        "mask": mask,
        "rewards": rewards,
    }
    shape = Shape(num_prompts=num_rows // group, repeats=group)
    lengths = Echo()
    lengths.prompt_length, lengths.answer_length = prompt_length, length
    draws = draws or Draws(range(num_members))
    return Given(TextProgram(lengths, own, shape), rolled, draws, step)


def decide(arm, given):
    return decisions.decide(given.program, arm, arm.gate, given.rolled, given.draws, given.step)


def loss(arm, log_probs, given, decision, rows=None, **options):
    return decisions.loss(given.program, arm, log_probs, given.rolled, decision, rows, **options)


def weights(decision, given):
    """Return the factor of each token's loss, [P, N, T]; 0 where it is not trained."""
    mask = given.rolled["mask"]
    weight = mask.to(given.rolled["log_probs"].dtype)
    return weight if decision.weight is None else decision.weight * mask


def kept_tokens(decision, given):
    """Return which tokens are kept, bool [P, N, T]."""
    mask = given.rolled["mask"]
    return mask if decision.keep is None else decision.keep & mask
