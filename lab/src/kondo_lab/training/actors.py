"""The laboratory's tasks as setups: `kondo actors run digits`."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kondo.actors.setup import Rollout, Setup, Task, incarnation_of
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.tasks import seeds
from kondo_lab.tasks.digits import NUM_DIGITS, NUM_PIXELS, DigitsBandit
from kondo_lab.tasks.reversal import Reversal


def digits(*, batch: int = 1000, width: int = 256) -> Setup:
    """Return handwritten digits as a bandit, with an MLP."""
    return Setup(
        name="digits",
        make_task=partial(_seeded, DigitsBandit, {"batch": batch}),
        make_policy=partial(_digits_policy, width),
        samples=batch,
        limits={"images": (0, 1), "actions": (0, NUM_DIGITS - 1)},
    )


def _seeded(make: Callable[..., Task], options: Mapping[str, int], seed: int) -> Task:
    return make(seed=seed, **options)


def _digits_policy(width: int, seed: int) -> MLP:
    generator = seeds.generator(seed, "policy")
    return MLP(NUM_PIXELS, NUM_DIGITS, width=width, generator=generator)


def reversal(
    *, length: int = 10, num_tokens: int = 2, num_prompts: int = 100, num_answers: int = 10
) -> Setup:
    """Return token reversal, with a small transformer."""
    shape = {"length": length, "num_tokens": num_tokens}
    batch = {"num_prompts": num_prompts, "num_answers": num_answers}
    return Setup(
        name="reversal",
        make_task=partial(_seeded, Reversal, shape | batch),
        make_policy=partial(_reversal_policy, length, num_tokens),
        samples=num_prompts * num_answers,
        limits={"prompts": (0, num_tokens - 1), "answers": (0, num_tokens - 1)},
    )


def _reversal_policy(length: int, num_tokens: int, seed: int) -> Decoder:
    generator = seeds.generator(seed, "policy")
    return Decoder.fresh(prompt_length=length, num_tokens=num_tokens, generator=generator)


def slowed(setup: Setup, pauses: Sequence[float]) -> Setup:
    """Return the setup with slow actors: real stale weights.

    Args:
        setup: what they do otherwise.
        pauses: seconds that the first, second, ... rollout process waits in every rollout; who
            comes after the last begins with the first again. The learner, process 0, never waits.
    """
    if not pauses or min(pauses) < 0:
        raise ValueError(f"pauses must be seconds >= 0, one or more, got {list(pauses)}.")
    make = partial(_slowed_task, setup.make_task, tuple(pauses))
    return dataclasses.replace(setup, make_task=make)


def _slowed_task(make_task: Callable[[int], Task], pauses: Sequence[float], seed: int) -> Task:
    task, process = make_task(seed), incarnation_of(seed)
    return _Slowed(task, pauses[(process - 1) % len(pauses)]) if process else task


class _Slowed:
    """A task whose rollouts take longer."""

    def __init__(self, task: Task, pause: float):
        self.unit, self._task, self._pause = task.unit, task, pause

    def rollout(self, policy: Any) -> Rollout:
        time.sleep(self._pause)
        return self._task.rollout(policy)
