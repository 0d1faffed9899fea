"""The laboratory's tasks as setups: `kondo actors run digits`."""

from functools import partial

from kondo.distributed.ray.setup import Setup
from kondo.lab import seeds
from kondo.lab.policies import MLP, Transformer
from kondo.lab.tasks.digits import NUM_DIGITS, NUM_PIXELS, DigitsBandit
from kondo.lab.tasks.reversal import Reversal


def digits(*, batch: int = 1000, width: int = 256) -> Setup:
    """Return handwritten digits as a bandit, with an MLP."""
    return Setup(
        name="digits",
        make_task=partial(_digits_task, batch),
        make_policy=partial(_digits_policy, width),
        samples=batch,
        limits={"images": (0, 1), "actions": (0, NUM_DIGITS - 1)},
    )


def _digits_task(batch: int, seed: int) -> DigitsBandit:
    return DigitsBandit(batch=batch, seed=seed)


def _digits_policy(width: int, seed: int) -> MLP:
    generator = seeds.generator(seed, "policy")
    return MLP(NUM_PIXELS, NUM_DIGITS, width=width, generator=generator)


def reversal(
    *, length: int = 10, num_tokens: int = 2, num_prompts: int = 100, num_answers: int = 10
) -> Setup:
    """Return token reversal, with a small transformer."""
    return Setup(
        name="reversal",
        make_task=partial(_reversal_task, length, num_tokens, num_prompts, num_answers),
        make_policy=partial(_reversal_policy, length, num_tokens),
        samples=num_prompts * num_answers,
        limits={"prompts": (0, num_tokens - 1), "answers": (0, num_tokens - 1)},
    )


def _reversal_task(
    length: int, num_tokens: int, num_prompts: int, num_answers: int, seed: int
) -> Reversal:
    return Reversal(
        length=length,
        num_tokens=num_tokens,
        num_prompts=num_prompts,
        num_answers=num_answers,
        seed=seed,
    )


def _reversal_policy(length: int, num_tokens: int, seed: int) -> Transformer:
    generator = seeds.generator(seed, "policy")
    return Transformer(prompt_length=length, num_tokens=num_tokens, generator=generator)
