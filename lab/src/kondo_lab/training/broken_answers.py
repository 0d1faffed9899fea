"""Answers as a broken actor would hand them over."""

import torch
from torch import Tensor

from kondo_lab.models.sampler import completion_mask
from kondo_lab.tasks.text.alphabet import END, PAD

_TRUNCATED, _EMPTY, _REPEATED, _OTHER = range(4)
"""Kinds of broken answers, equally frequent."""


def break_answers(
    completions: Tensor, mask: Tensor, kind: Tensor, where: Tensor, repeats: int
) -> tuple[Tensor, Tensor]:
    """Return every answer broken, int64 [P, N, La], and its mask.

    | kind | answer                                                    |
    |------|-----------------------------------------------------------|
    | 0    | truncated after a drawn token, without END                |
    | 1    | empty: END alone                                          |
    | 2    | from a drawn token on that token alone, without END       |
    | 3    | that of the same place in the group before: another prompt |

    Args:
        completions: int64 [P, N, La], N = G * repeats answers.
        mask: bool like completions, the tokens that are real.
        kind: int64 [P, N], 0 .. 3.
        where: [P, N] uniform on (0, 1), of the drawn token.
        repeats: A, answers of a prompt.
    """
    place = torch.arange(mask.shape[2], device=mask.device)
    # The last token that stays as it is: any but the last of the answer, if there are two.
    last = (where * (mask.sum(dim=2) - 1)).long().unsqueeze(2)
    inside = place <= last
    truncated = torch.where(inside, completions, PAD)
    empty = torch.where(place == 0, END, torch.full_like(place, PAD)).expand_as(completions)
    repeated = torch.where(inside, completions, completions.gather(2, last))
    other, other_mask = completions.roll(repeats, dims=1), mask.roll(repeats, dims=1)
    of_repeated = completion_mask(repeated)
    tokens, counted = other, other_mask
    for number, answer, own in (
        (_TRUNCATED, truncated, inside),
        (_EMPTY, empty, (place == 0).expand_as(mask)),
        (_REPEATED, repeated, of_repeated),
    ):
        chosen = (kind == number).unsqueeze(2)
        tokens, counted = torch.where(chosen, answer, tokens), torch.where(chosen, own, counted)
    return torch.where(counted, tokens, PAD), counted
