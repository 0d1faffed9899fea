"""What a task is: a rule that draws inputs and pays for actions, for P members at once.

Rules keep no state and draw by counting (`draws`), so a member's inputs depend on its own seed
alone. Drawing and paying never wait for the device, hence both can stand in a CUDA graph.
"""

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from kondo_lab.tasks.draws import Draws

Credit = Literal["to_first_error", "bag_of_tokens"]
"""How right an answer is: the Kondo paper counts its correct prefix, the DG paper each token."""


def to_first_error(correct: Tensor) -> Tensor:
    """Return the length of the correct prefix over the length: [..., H] bool -> [...] float32.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.base import to_first_error
        >>> to_first_error(torch.tensor([[True, False, True, True]]))
        tensor([0.2500])
    """
    return correct.cumprod(dim=-1).float().mean(dim=-1)


def bag_of_tokens(correct: Tensor) -> Tensor:
    """Return the share of correct tokens: [..., H] bool -> [...] float32.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.base import bag_of_tokens
        >>> bag_of_tokens(torch.tensor([[True, False, True, True]]))
        tensor([0.7500])
    """
    return correct.float().mean(dim=-1)


def label_reward(labels: Tensor, actions: Tensor) -> Tensor:
    """Return 1{action = label} as float32, in the shape of both."""
    return (actions == labels).float()


class SequenceTask(ABC):
    """Read a prompt, write an answer; there is one right answer, and part of it earns a part.

        c = credit(answer = target),  R = kappa c + (1 - kappa) 1{answer = target}

    Args:
        name: as a legend says it.
        prompt_length: tokens read.
        answer_length: tokens written.
        num_tokens: size of the one vocabulary of prompts and answers.
        reward: what c counts.
        kappa: in [0, 1]; 1 pays for parts, 0 for the whole answer only.
    """

    def __init__(
        self,
        name: str,
        *,
        prompt_length: int,
        answer_length: int,
        num_tokens: int,
        reward: Credit,
        kappa: float,
    ):
        at_least("num_tokens", num_tokens, 2)
        if reward not in get_args(Credit):
            raise ValueError(f"reward must be one of {get_args(Credit)}, got {reward!r}.")
        if not 0 <= kappa <= 1:
            raise ValueError(f"kappa must be in [0, 1], got {kappa}.")
        self.name = name
        self.prompt_length, self.answer_length = prompt_length, answer_length
        self.num_tokens = num_tokens
        self.credit, self.kappa = reward, kappa

    @property
    def title(self) -> str:
        """Name, length H, vocabulary M and what is paid for, as records have it."""
        paid = "prefix" if self.credit == "to_first_error" else "tokens"
        return f"{self.name} H={self.answer_length} M={self.num_tokens}, {paid}"

    @abstractmethod
    def prompts(self, draws: Draws, step: int | Tensor, num_prompts: int) -> Tensor:
        """Return [P, num_prompts, prompt_length] int64, fresh at every step."""

    @abstractmethod
    def target(self, prompts: Tensor) -> Tensor:
        """Return the right answers [..., answer_length] of prompts [..., prompt_length]."""

    def reward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Return [...] float32 in [0, 1]; exactly 1 for the right answer and no other.

        Args:
            prompts: [..., prompt_length] int64.
            answers: [..., answer_length] int64, the same leading shape.
        """
        self._check("prompts", prompts, self.prompt_length)
        self._check("answers", answers, self.answer_length)
        if prompts.shape[:-1] != answers.shape[:-1]:
            raise ValueError(
                f"answers must have the leading shape of prompts, {tuple(prompts.shape[:-1])}, got "
                f"{tuple(answers.shape[:-1])}. Repeat each prompt for each of its answers."
            )
        correct = answers == self.target(prompts)
        part = (
            to_first_error(correct) if self.credit == "to_first_error" else bag_of_tokens(correct)
        )
        return part.lerp(correct.all(dim=-1).float(), 1 - self.kappa)

    def _check(self, name: str, tokens: Tensor, length: int) -> None:
        if tokens.shape[-1] != length:
            raise ValueError(
                f"{name} must have {length} tokens in the last dimension, got shape "
                f"{tuple(tokens.shape)}."
            )


def permutations(draws: Draws, stream: str, step: int | Tensor, rows: int, size: int) -> Tensor:
    """Return [P, rows, size] int64, each row a random order of 0 .. size-1."""
    # Stable, so that two equal numbers are ordered the same way on every device.
    return torch.argsort(draws.uniform(stream, step, rows, size), dim=-1, stable=True)


def at_least(name: str, value: int, least: int) -> None:
    """Raise unless value >= least."""
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}.")
