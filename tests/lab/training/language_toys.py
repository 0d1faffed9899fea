"""A model of a few thousand parameters, and a task it learns in seconds."""

import torch

from kondo_lab.models.architecture import language
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.draws import Draws

CPU = torch.device("cpu")
NUM_TOKENS = 6
TINY = language(width=16, num_layers=2, num_heads=2)


class Echo:
    """Repeat the first of two tokens, then end: "34" -> "3.". Held out is every prompt "x2"."""

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
