"""Countdown: reach the target with the given numbers, each used exactly once.

Every number is written with two digits, results included: what is negative or above 99 cannot be
written. Hence all steps have the same length, and are read side by side.
"""

import re

import torch
from torch import Tensor

from kondo_lab.tasks.base import permutations
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import CHARACTERS, END, ZERO, encode, padded, value, write
from kondo_lab.tasks.text.base import TextTask

SIGNS = "+-*"
LARGEST_GIVEN, LARGEST = 20, 99
"""Of the numbers given, and of results and targets."""
NUMBER = 2
"""Characters of a number."""
STEP = len("01+02=03,")
"""Characters of a step, with the comma or END after it."""
NUMBERS_AT = (0, 3, 6)
"""Where its numbers begin."""

GUESS_RATES = (0.188, 0.092, 0.046, 0.025)
"""Of each level: the share of prompts whose target is the sum, of 500,000."""

_FIRST_SIGN = CHARACTERS.index(SIGNS)
_UNWRITABLE = -1


class Countdown(TextTask):
    """Reach a target with all of level + 2 numbers from 1 to 20.

    A completion is a list of true steps. Each takes two numbers that are there, given or made by an
    earlier step, and makes one of them; the last makes the target.

        03,07,18:39     03*07=21,21+18=39.

    The target is drawn by folding the numbers in a random order, each time with a sign uniform
    among those with a writable result, so there is always a solution. The demonstration is the
    first of all size! * 3^(size - 1) folds that makes the target, hence no harder levels; any other
    solution is right as well.

    Guessing: adding all numbers up is right for 19, 9, 5 and 2% of the prompts of levels 1 to 4,
    and random true steps for somewhat fewer.

    Args:
        level: 1 .. 4.

    Example:
        >>> from kondo_lab.tasks.text import decode, encode, make
        >>> import torch
        >>> decode(make("countdown", 1).demonstrations(torch.tensor(encode("03,07,18:39"))))
        '03*07=21,21+18=39.'
    """

    def __init__(self, level: int):
        size = self.size = level + 2
        super().__init__(
            "countdown",
            level=level,
            hardest=len(GUESS_RATES),
            prompt_length=(NUMBER + 1) * size + NUMBER,
            answer_length=STEP * (size - 1),
        )

    @property
    def guess_rate(self) -> float:
        """The measured share of prompts that adding up solves."""
        return GUESS_RATES[self.level - 1]

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return the steps of the first fold that makes the target.

        A prompt without a solution, which is never drawn, gets steps that earn nothing.
        """
        numbers, target = self._parts(prompts)
        fold = _first_fold(numbers, target)
        first, signs = _unfold(fold, self.size)
        so_far, left = _take(numbers, first)
        text: list[Tensor | str] = []
        for pick, sign in signs:
            other, left = _take(left, pick)
            made = _results(so_far, other).gather(-1, sign.unsqueeze(-1)).squeeze(-1)
            large = torch.where(sign == SIGNS.index("-"), torch.maximum(so_far, other), so_far)
            small = so_far + other - large
            sign_id = _FIRST_SIGN + sign.unsqueeze(-1)
            text += [_two(large), sign_id, _two(small), "=", _two(made), ","]
            so_far = made
        return write(*text[:-1], ".")

    def check(self, prompt: str, completion: str) -> bool:
        """Whether each step is true, takes what is there, and the target alone is left."""
        text, end, _ = completion.partition(CHARACTERS[END])
        given, target = prompt.split(":")
        there = [int(number) for number in given.split(",")]
        for step in text.split(","):
            match = re.fullmatch(r"([0-9]{2})([-+*])([0-9]{2})=([0-9]{2})", step)
            if match is None:
                return False
            first, second, result = (int(match[group]) for group in (1, 3, 4))
            for taken in (first, second):
                if taken not in there:
                    return False
                there.remove(taken)
            true = {"+": first + second, "-": first - second, "*": first * second}[match[2]]
            if result != true:
                return False
            there.append(result)
        return bool(end) and there == [int(target)]

    def _is_right(self, prompts: Tensor, completions: Tensor) -> Tensor:
        numbers, target = self._parts(prompts)
        steps = completions.reshape(*completions.shape[:-1], self.size - 1, STEP)
        right = _is_written_well(steps).all(dim=-1)
        first, second, result = (value(steps[..., at : at + NUMBER]) for at in NUMBERS_AT)
        sign = steps[..., 2] - _FIRST_SIGN
        true = torch.stack([first + second, first - second, first * second], dim=-1)
        is_sign = torch.arange(len(SIGNS), device=sign.device) == sign.unsqueeze(-1)
        right &= (is_sign & (true == result.unsqueeze(-1))).any(dim=-1).all(dim=-1)
        there = torch.cat([numbers, result], dim=-1)
        # A result is there only after its step.
        free = torch.arange(there.shape[-1], device=there.device).expand_as(there) < self.size
        for step in range(self.size - 1):
            for taken in (first[..., step], second[..., step]):
                same = free & (there == taken.unsqueeze(-1))
                right &= same.any(dim=-1)
                free = free & ~(same & (same.cumsum(dim=-1) == 1))
            free = free | (torch.arange(there.shape[-1], device=there.device) == self.size + step)
        right &= result[..., -1] == target
        return right

    def _content(self, prompts: Tensor) -> Tensor:
        numbers, target = self._parts(prompts)
        return torch.cat([numbers.sort(dim=-1).values, target.unsqueeze(-1)], dim=-1)

    def _parts(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers [..., size] and the target [...]."""
        given = prompts[..., :-NUMBER].reshape(*prompts.shape[:-1], self.size, NUMBER + 1)
        return value(given[..., :NUMBER]), value(prompts[..., -NUMBER:])

    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        numbers = 1 + draws.integers(f"{stream}/numbers", step, LARGEST_GIVEN, rows, self.size)
        # Below 6, so that its remainder by 1, 2 or 3 signs is uniform.
        lots = draws.integers(f"{stream}/signs", step, 6, rows, self.size - 1)
        target = numbers[..., 0]
        for place in range(1, self.size):
            made = _results(target, numbers[..., place])
            writable = made != _UNWRITABLE
            lot = lots[..., place - 1 : place] % writable.sum(dim=-1, keepdim=True)
            drawn = writable & (writable.cumsum(dim=-1) == lot + 1)
            target = (made * drawn).sum(dim=-1)
        order = permutations(draws, f"{stream}/order", step, rows, self.size)
        text: list[Tensor | str] = []
        for number in numbers.gather(-1, order).unbind(-1):
            text += [",", _two(number)]
        return write(*text[1:], ":", _two(target))


def _two(numbers: Tensor) -> Tensor:
    return padded(numbers, NUMBER)


def _is_written_well(steps: Tensor) -> Tensor:
    """Return [..., S] bool of steps [..., S, 9]: digits, = and commas stand in their places."""
    # Slices, not a list of places: an index is copied from the host.
    numbers = torch.cat([steps[..., at : at + NUMBER] for at in NUMBERS_AT], dim=-1)
    digits = ((numbers >= ZERO) & (numbers < ZERO + 10)).all(dim=-1)
    equals, comma = encode("=,")
    last = torch.arange(steps.shape[-2], device=steps.device) == steps.shape[-2] - 1
    after = torch.where(last, steps[..., 8] == END, steps[..., 8] == comma)
    return digits & (steps[..., 5] == equals) & after


def _results(first: Tensor, second: Tensor) -> Tensor:
    """Return [..., 3]: sum, difference and product, -1 for what cannot be written.

    What follows from an unwritable number is unwritable.
    """
    made = torch.stack([first + second, (first - second).abs(), first * second], dim=-1)
    writable = (first != _UNWRITABLE).unsqueeze(-1) & (made <= LARGEST)
    return torch.where(writable, made, _UNWRITABLE)


def _take(numbers: Tensor, pick: Tensor) -> tuple[Tensor, Tensor]:
    """Return the picked [...] of numbers [..., k], and the others [..., k - 1] in order."""
    pick = pick.unsqueeze(-1)
    others = torch.arange(numbers.shape[-1] - 1, device=numbers.device)
    others = others + (others >= pick)
    return numbers.gather(-1, pick).squeeze(-1), numbers.gather(-1, others)


def _without(numbers: Tensor, pick: int) -> Tensor:
    return torch.cat([numbers[..., :pick], numbers[..., pick + 1 :]], dim=-1)


def _first_fold(numbers: Tensor, target: Tensor) -> Tensor:
    """Return the number [...] of the first fold that makes the target; see `_unfold`."""
    size = numbers.shape[-1]
    small = numbers.to(torch.int16)  # there are many folds
    found: list[Tensor] = []
    for first in range(size):
        so_far = small[..., first : first + 1]
        left = _without(small, first).unsqueeze(-2)
        for count in range(size - 1, 0, -1):
            made = _results(so_far.unsqueeze(-1), left)  # [..., folds, count, 3]
            so_far = made.flatten(-3)
            rest = torch.stack([_without(left, pick) for pick in range(count)], dim=-2)
            rest = rest.unsqueeze(-2).expand(*made.shape, count - 1)
            left = rest.flatten(-4, -2)
        folds = torch.arange(so_far.shape[-1], device=numbers.device)
        makes = so_far == target.unsqueeze(-1)
        absent = size * so_far.shape[-1]
        found.append(torch.where(makes, first * so_far.shape[-1] + folds, absent).amin(dim=-1))
    return torch.stack(found).amin(dim=0)


def _unfold(fold: Tensor, size: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return which number comes first, and for each step which of those left, and the sign.

    The number of a fold has these as its digits, the first number's in front.
    """
    steps = []
    for count in range(1, size):
        steps.append((fold // len(SIGNS) % count, fold % len(SIGNS)))
        fold = fold // (len(SIGNS) * count)
    return fold % size, steps[::-1]
