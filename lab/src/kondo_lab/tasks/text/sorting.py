"""Sorting letters, with the trace of an insertion sort."""

import math

from torch import Tensor

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import LETTER_A, write
from kondo_lab.tasks.text.base import AnswerTask

NUM_LETTERS = 26


class Sorting(AnswerTask):
    """Sort level + 3 letters, drawn uniformly with repetition.

    The working is an insertion sort's: the first two letters sorted, the first three, and so on.

        wgpc>gw>gpw>cgpw.

    Guessing: the letters as they stand are right where they are sorted already.

    Args:
        level: 1 .. 12.

    Example:
        >>> from kondo_lab.tasks.text import decode, encode, make
        >>> import torch
        >>> decode(make("sorting", 1).demonstrations(torch.tensor(encode("kilo"))))
        '>ik>ikl>iklo.'
    """

    mark = ">"

    def __init__(self, level: int):
        size = self.size = level + 3
        super().__init__(
            "sorting",
            level=level,
            hardest=12,
            prompt_length=size,
            answer_length=sum(len(">") + length for length in range(2, size + 1)) + len("."),
        )

    @property
    def guess_rate(self) -> float:
        """Sorted texts over texts, C(25 + size, size) / 26^size."""
        return math.comb(NUM_LETTERS - 1 + self.size, self.size) / float(NUM_LETTERS) ** self.size

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return the sorted beginnings of the prompt, longer and longer."""
        text: list[Tensor | str] = []
        for length in range(2, self.size + 1):
            text += [">", prompts[..., :length].sort(dim=-1).values]
        return write(*text, ".")

    def solve(self, prompt: str) -> str:
        """Return the letters in order."""
        return "".join(sorted(prompt))

    def _answer(self, prompts: Tensor) -> Tensor:
        return prompts.sort(dim=-1).values

    def _content(self, prompts: Tensor) -> Tensor:
        return self._answer(prompts)

    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        return LETTER_A + draws.integers(stream, step, NUM_LETTERS, rows, self.size)
