"""Addition by columns and long multiplication.

Numbers of a prompt have zeros in front, so that every prompt has the same length; numbers of a
completion have none.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import ZERO, move_left, padded, plain, value, write
from kondo_lab.tasks.text.base import AnswerTask


class _TwoNumbers(AnswerTask):
    """A sign between two numbers, whose order does not matter to the answer."""

    mark = "="
    sign: str
    operation: Callable[[Any, Any], Any]
    digits: tuple[int, int]
    """Of the two numbers."""
    answer_digits: int
    """Of the largest answer."""

    def solve(self, prompt: str) -> str:
        """Return the sum or the product."""
        return str(self.operation(*map(int, prompt.split(self.sign))))

    def _answer(self, prompts: Tensor) -> Tensor:
        return plain(self.operation(*self._numbers(prompts)), self.answer_digits)

    def _content(self, prompts: Tensor) -> Tensor:
        return torch.stack(self._numbers(prompts), dim=-1).sort(dim=-1).values

    def _numbers(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        digits = self.digits[0]
        return value(prompts[..., :digits]), value(prompts[..., digits + 1 :])


class Addition(_TwoNumbers):
    """Add two numbers of level + 1 digits, each digit uniform.

    The working writes the sum of each column, with the carry that came into it, from the right:

        0347+0585=12,13,9,0=932.

    Guessing: one sum for all prompts is right for 10^-digits of them at best, 99..9.

    Args:
        level: 1 .. 16.

    Example:
        >>> from kondo_lab.tasks.text import decode, encode, make
        >>> import torch
        >>> prompt = torch.tensor(encode("347+585"))
        >>> decode(make("addition", 2).demonstrations(prompt))
        '=12,13,9=932.'
    """

    sign, operation = "+", staticmethod(operator.add)

    def __init__(self, level: int):
        digits = level + 1
        self.digits, self.answer_digits = (digits, digits), digits + 1
        super().__init__(
            "addition",
            level=level,
            hardest=16,  # sums must fit into an int64
            prompt_length=2 * digits + 1,
            answer_length=len("=") + 3 * digits - 1 + len("=") + digits + 1 + len("."),
        )

    @property
    def guess_rate(self) -> float:
        """10^-digits: of all sums 99..9 is the most frequent."""
        return 10.0 ** -self.digits[0]

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return each column's sum from the right, then the sum."""
        first, second = (number.unsqueeze(-1) for number in self._numbers(prompts))
        power = 10 ** torch.arange(self.digits[0], device=prompts.device)
        carry = (first % power + second % power) // power
        columns = first // power % 10 + second // power % 10 + carry
        working: list[Tensor | str] = []
        for column in columns.unbind(-1):
            working += [",", plain(column, 2)]
        return move_left(write("=", *working[1:], "=", self._answer(prompts), "."))

    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        digits = ZERO + draws.integers(stream, step, 10, rows, sum(self.digits))
        first, second = digits.chunk(2, dim=-1)
        return write(first, "+", second)


class Multiplication(_TwoNumbers):
    """Multiply two numbers, of which level by level one gets a further digit.

    | level | 1 | 2 | 3 | 4 | 5 | 6 |
    |---|---|---|---|---|---|---|
    | digits | 2 x 1 | 2 x 2 | 3 x 2 | 3 x 3 | 4 x 3 | 4 x 4 |

    No number begins with a zero. The working takes the second number's digits from the right. It
    adds each product of a digit, moved to its place, to the sum so far:

        47*36=282+141=1692.         47 * 6 = 282, 47 * 3 = 141, 282 + 1410 = 1692

    Guessing: the most frequent product, one for all prompts.

    Args:
        level: 1 .. 6.

    Example:
        >>> from kondo_lab.tasks.text import decode, encode, make
        >>> import torch
        >>> prompt = torch.tensor(encode("347*58"))
        >>> decode(make("multiplication", 3).demonstrations(prompt))
        '=2776+1735=20126.'
    """

    sign, operation = "*", staticmethod(operator.mul)
    most_frequent = (6, 16, 26, 50, 75, 140)
    """Prompts of each level that have the level's most frequent product."""

    def __init__(self, level: int):
        self.digits = first, second = (level + 3) // 2, (level + 2) // 2
        self.answer_digits, further = first + second, range(1, second)
        super().__init__(
            "multiplication",
            level=level,
            hardest=len(self.most_frequent),
            prompt_length=first + 1 + second,
            answer_length=len("=")
            + (first + 1)
            + sum(len("+=") + (first + 1) + (first + 1 + place) for place in further)
            + len("."),
        )

    @property
    def guess_rate(self) -> float:
        """The share of the prompts that have the most frequent product."""
        first, second = self.digits
        return self.most_frequent[self.level - 1] / (81 * 10.0 ** (first + second - 2))

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return the products of the digits and the sums so far; the last is the product."""
        first, second = self._numbers(prompts)
        width = self.digits[0] + 1
        sum_so_far = first * (second % 10)
        text: list[Tensor | str] = ["=", plain(sum_so_far, width)]
        for place in range(1, self.digits[1]):
            product = first * (second // 10**place % 10)
            sum_so_far = sum_so_far + product * 10**place
            text += ["+", plain(product, width), "=", plain(sum_so_far, width + place)]
        return move_left(write(*text, "."))

    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        first, second = (
            least + draws.integers(f"{stream}/{which}", step, 9 * least, rows)
            for which, least in enumerate(10 ** (digits - 1) for digits in self.digits)
        )
        return write(padded(first, self.digits[0]), "*", padded(second, self.digits[1]))
