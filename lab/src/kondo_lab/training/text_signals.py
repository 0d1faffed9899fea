"""Signals that need more of an answer than its log-probs: whoever decides looks at the answers."""

import dataclasses
from typing import Literal

from torch import Tensor

from kondo import delight
from kondo_lab.tasks.text.alphabet import encode
from kondo_lab.training.gates import unchecked


def entropy(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Stand for the entropy of the distribution that each token was drawn from.

    A signal that nobody can compute from log-probs: whoever decides puts the sampler's in.
    """
    raise ValueError("entropy is known to the sampler alone; let `decide` look at a batch.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialDelight:
    """Stand for the delight of some tokens of an answer, one value per answer.

        U * sum over the counted tokens of -log pi, or U * their mean

    It needs the answer's text: whoever decides has it.

    Args:
        part: "answer" counts what follows the last mark, END included; "working" what comes before
            that, the mark included. An answer without a mark is all working.
        mark: the character that the task puts before its answer, `AnswerTask.mark`.
        mean: divide by the number of counted tokens.

    Example:
        >>> import torch
        >>> from kondo_lab.training.text_signals import PartialDelight
        >>> from kondo_lab.tasks.text.alphabet import encode
        >>> text = torch.tensor(encode(">ab>abc."))
        >>> PartialDelight(part="answer", mark=">").counts(text, text > 0).long()
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    part: Literal["all", "answer", "working"] = "all"
    mark: str = ""
    mean: bool = False

    def __post_init__(self) -> None:
        if self.part not in ("all", "answer", "working"):
            raise ValueError(f"part must be 'all', 'answer' or 'working', got {self.part!r}.")
        if self.part != "all" and len(self.mark) != 1:
            raise ValueError(
                f"mark must be one character for part {self.part!r}, got {self.mark!r}; take the "
                f"task's."
            )

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """Refuse: log-probs do not say which tokens are the answer."""
        raise ValueError("PartialDelight needs the text of answers; let `decide` look at a batch.")

    def counts(self, completions: Tensor, mask: Tensor) -> Tensor:
        """Return which tokens count, bool [..., T], of completions and their mask."""
        if self.part == "all":
            return mask
        marks = mask & (completions == encode(self.mark)[0])
        marks_ahead = marks.flip(-1).cumsum(-1).flip(-1)  # its own included
        answer = mask & (marks_ahead == 0) & marks.any(dim=-1, keepdim=True)
        return answer if self.part == "answer" else mask & ~answer

    def values(self, log_probs: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
        """Return [P, N] of log-probs and counted tokens [P, N, T] and advantages [P, N]."""
        spread = advantages.unsqueeze(2).expand_as(log_probs)
        total = unchecked(delight)(log_probs.detach(), spread, mask=counted).sum(dim=2)
        return total / counted.sum(dim=2).clamp(min=1) if self.mean else total
