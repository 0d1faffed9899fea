"""Key-value recall: many pairs, some of them asked for."""

import math

import torch
from torch import Tensor

from kondo_lab.tasks.base import permutations
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import LETTER_A, padded, write
from kondo_lab.tasks.text.base import AnswerTask

NUM_KEYS, NUM_VALUES = 26, 100
PAIR = 3
"""Characters of a pair: a letter and two digits."""


class Recall(AnswerTask):
    """Read 2 (level + 1) pairs of a letter and two digits; write the digits of level + 1 letters.

    The letters of a prompt are distinct. The working repeats each pair that is asked for:

        a52k07x81c07?ka=k07a52=0752.

    Guessing: some values of the prompt, each at most once. Where two values are equal by chance
    this earns a little more than `guess_rate`.

    Args:
        level: 1 .. 12.

    Example:
        >>> from kondo_lab.tasks.text import decode, encode, make
        >>> import torch
        >>> prompt = torch.tensor(encode("a52k07x81c07?ka"))
        >>> decode(make("recall", 1).demonstrations(prompt))
        '=k07a52=0752.'
    """

    mark = "="

    def __init__(self, level: int):
        asked, pairs = self.num_asked, self.num_pairs = level + 1, 2 * (level + 1)
        super().__init__(
            "recall",
            level=level,
            hardest=12,  # no more letters
            prompt_length=PAIR * pairs + len("?") + asked,
            answer_length=len("=") + PAIR * asked + len("=") + (PAIR - 1) * asked + len("."),
        )

    @property
    def guess_rate(self) -> float:
        """(pairs - asked)! / pairs!."""
        return 1 / math.perm(self.num_pairs, self.num_asked)

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return the pairs asked for, then their values alone."""
        pairs = self._pairs_asked_for(prompts)
        return write("=", pairs.flatten(-2), "=", pairs[..., 1:].flatten(-2), ".")

    def solve(self, prompt: str) -> str:
        """Return the values asked for."""
        pairs, asked = prompt.split("?")
        values = {pairs[at]: pairs[at + 1 : at + PAIR] for at in range(0, len(pairs), PAIR)}
        return "".join(values[key] for key in asked)

    def _answer(self, prompts: Tensor) -> Tensor:
        return self._pairs_asked_for(prompts)[..., 1:].flatten(-2)

    def _pairs_asked_for(self, prompts: Tensor) -> Tensor:
        """Return [..., asked, 3]."""
        rows = prompts.shape[:-1]
        pairs = prompts[..., : PAIR * self.num_pairs].reshape(*rows, self.num_pairs, PAIR)
        asked = prompts[..., PAIR * self.num_pairs + 1 :]
        # [..., asked, pairs], true at one pair of each.
        wanted = asked.unsqueeze(-1) == pairs[..., 0].unsqueeze(-2)
        return (wanted.unsqueeze(-1) * pairs.unsqueeze(-3)).sum(dim=-2)

    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        keys = permutations(draws, f"{stream}/keys", step, rows, NUM_KEYS)
        keys = LETTER_A + keys[..., : self.num_pairs]
        values = draws.integers(f"{stream}/values", step, NUM_VALUES, rows, self.num_pairs)
        pairs = torch.cat([keys.unsqueeze(-1), padded(values, PAIR - 1)], dim=-1)
        order = permutations(draws, f"{stream}/asked", step, rows, self.num_pairs)
        return write(pairs.flatten(-2), "?", keys.gather(-1, order[..., : self.num_asked]))
