"""One alphabet for all text tasks: a character is a token, and tokens are written by tensor code.

Ids: 0 is PAD, 1 is END, then digits, letters and signs. On paper PAD is `_` and END is `.`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHARACTERS = "_.0123456789abcdefghijklmnopqrstuvwxyz+-*=,:>?"
"""The character of each id."""
NUM_TOKENS = len(CHARACTERS)
PAD, END = 0, 1
ZERO = CHARACTERS.index("0")
"""The id of the digit 0; the others follow in order."""
LETTER_A = CHARACTERS.index("a")
"""The id of the letter a; the others follow in order."""

_IDS = {character: number for number, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """Return the ids of a text's characters.

    Example:
        >>> from kondo_lab.tasks.text.alphabet import decode, encode
        >>> encode("3+4."), decode([5, 38, 6, 1, 0, 0])
        ([5, 38, 6, 1], '3+4.')
    """
    unknown = sorted(set(text) - set(_IDS))
    if unknown:
        raise ValueError(f"text must be written in {CHARACTERS!r}, got {unknown} in {text!r}.")
    return [_IDS[character] for character in text]


def decode(ids: Sequence[int] | Tensor) -> str:
    """Return the text of ids [L] up to its END, a full stop; a text without one has no END."""
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    strange = [number for number in numbers if not 0 <= number < NUM_TOKENS]
    if strange:
        raise ValueError(f"ids must lie in 0 .. {NUM_TOKENS - 1}, got {strange}.")
    text = "".join(CHARACTERS[number] for number in numbers)
    before, end, _ = text.partition(CHARACTERS[END])
    return before + end


def write(*parts: Tensor | str) -> Tensor:
    """Return the parts one after another, [..., L]; a string is written in every row.

    Nothing is copied from the host, so it can be captured in a CUDA graph.

    Args:
        parts: ids [..., l], all with the same leading shape, and strings; at least one of ids.
    """
    rows = next(part for part in parts if isinstance(part, Tensor))
    written: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            written.append(part)
        else:
            written += [rows.new_full((*rows.shape[:-1], 1), number) for number in encode(part)]
    return torch.cat(written, dim=-1)


def padded(numbers: Tensor, width: int) -> Tensor:
    """Return the decimal digits of numbers [...] >= 0 as ids [..., width], zeros in front."""
    places = torch.arange(width - 1, -1, -1, device=numbers.device)
    return ZERO + numbers.unsqueeze(-1) // 10**places % 10


def plain(numbers: Tensor, width: int) -> Tensor:
    """Return the decimal digits of numbers [...] >= 0 as ids [..., width], PAD in front.

    `move_left` closes the gaps that this leaves in a text.
    """
    places = torch.arange(width - 1, -1, -1, device=numbers.device)
    leading = (numbers.unsqueeze(-1) < 10**places) & (places > 0)
    return torch.where(leading, PAD, padded(numbers, width))


def value(digits: Tensor) -> Tensor:
    """Return the numbers [...] that the ids of digits [..., width] spell."""
    places = torch.arange(digits.shape[-1] - 1, -1, -1, device=digits.device)
    return ((digits - ZERO) * 10**places).sum(dim=-1)


def move_left(ids: Tensor) -> Tensor:
    """Return ids [..., L] with every PAD moved behind the text; the order is kept otherwise."""
    return _stably_sorted(ids, ids == PAD)


def move_right(ids: Tensor) -> Tensor:
    """Return ids [..., L] with every PAD moved in front of the text."""
    return _stably_sorted(ids, ids != PAD)


def _stably_sorted(ids: Tensor, last: Tensor) -> Tensor:
    return ids.gather(-1, last.byte().argsort(dim=-1, stable=True))
