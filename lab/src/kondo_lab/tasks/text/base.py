"""What a text task is: it draws prompts, shows how to answer, and pays for right answers.

    prompts [M, N, P] -> completions [M, N, A] -> reward [M, N], 1 or 0

M members of a population, N prompts, P tokens of a prompt, A of the longest completion. All of it
is tensor code that never waits for the device, hence it can stand in a CUDA graph. `check` says
the same as `reward` for one text, in plain Python.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kondo import sampling
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import CHARACTERS, END, PAD, move_right, write

CANDIDATES = 16
"""Prompts drawn at once for each place, of which the first on the right side is taken."""
TRAIN_ROUNDS, HELD_OUT_ROUNDS = 1, 8
"""Times the candidates are drawn: one in eight is held out, so these need more of them."""


class TextTask(ABC):
    """Read a prompt of exactly P tokens, write at most A of them; the last must be END.

    Train and held-out prompts are disjoint: a hash of a prompt's content puts one content in eight
    on the held-out side. A prompt takes the first of its candidates that is on its side; the chance
    that there is none is (1/8)^16 = 4e-15 for training and (7/8)^128 = 4e-8 for held-out prompts,
    and then a fixed prompt of the right side stands in.

    Args:
        name: as `kondo_lab.tasks.text.make` knows it.
        level: how hard it is, from 1 to `hardest`.
        hardest: the last level there is.
        prompt_length: P.
        answer_length: A, END included.
    """

    def __init__(
        self, name: str, *, level: int, hardest: int, prompt_length: int, answer_length: int
    ):
        if not 1 <= level <= hardest:
            raise ValueError(f"level must lie in 1 .. {hardest} for {name}, got {level}.")
        self.name, self.level = name, level
        self.prompt_length, self.answer_length = prompt_length, answer_length
        self._stand_ins = {side: self._first_of(side) for side in (False, True)}

    @property
    def title(self) -> str:
        """Name and level, as records have it."""
        return f"{self.name}-{self.level}"

    def prompts(
        self,
        draws: Draws,
        stream: str,
        step: int | Tensor,
        count: int,
        *,
        held_out: bool = False,
    ) -> Tensor:
        """Return [M, count, P] int64, fresh at every step; no PAD, no END.

        Args:
            draws: of M members.
            stream: what they are for; different names share no numbers.
            step: when; a 0-d int64 tensor stays on the device.
            count: prompts per member.
            held_out: which side to draw from.
        """
        members = len(draws.keys)
        stand_in = _constant(self._stand_ins[held_out], draws.keys.device)
        chosen = stand_in.expand(members, count, -1)
        found = torch.zeros((members, count, 1), dtype=torch.bool, device=draws.keys.device)
        for attempt in range(HELD_OUT_ROUNDS if held_out else TRAIN_ROUNDS):
            drawn = self._draw(draws, f"{stream}/{attempt}", step, count * CANDIDATES)
            drawn = drawn.view(members, count, CANDIDATES, -1)
            fits = self.is_held_out(drawn) == held_out
            first = _first(fits).unsqueeze(-1)
            there = first < CANDIDATES
            place = first.clamp(max=CANDIDATES - 1).unsqueeze(-1).expand(-1, -1, 1, drawn.shape[-1])
            chosen = torch.where(there & ~found, drawn.gather(2, place).squeeze(2), chosen)
            found = found | there
        return chosen

    def is_held_out(self, prompts: Tensor) -> Tensor:
        """Return [...] bool of prompts [..., P]: whether their content is never trained on."""
        content = self._content(prompts)
        place = torch.arange(1, content.shape[-1] + 1, device=content.device)
        bits = sampling.mix_bits(sampling.mix_bits(content + place * sampling.GOLDEN).sum(dim=-1))
        return bits >> 61 & 7 == 0

    @abstractmethod
    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Return a right completion with its working, END, then PAD: [..., P] -> [..., A]."""

    def reward(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Return [...] float32: 1 where the final answer is right, else 0.

        What follows END is ignored. A completion without END earns nothing.

        Args:
            prompts: [..., P] int64.
            completions: [..., A] int64, the same leading shape.
        """
        for name, ids, length in (
            ("prompts", prompts, self.prompt_length),
            ("completions", completions, self.answer_length),
        ):
            if ids.ndim < 1 or ids.shape[-1] != length:
                raise ValueError(
                    f"{name} must have {length} tokens in the last dimension, got shape "
                    f"{list(ids.shape)}."
                )
        if prompts.shape[:-1] != completions.shape[:-1]:
            raise ValueError(
                f"completions must have the leading shape of prompts, "
                f"{list(prompts.shape[:-1])}, got {list(completions.shape[:-1])}; repeat each "
                f"prompt for each of its completions."
            )
        return self._is_right(prompts, completions).float()

    @abstractmethod
    def check(self, prompt: str, completion: str) -> bool:
        """Whether a completion is right, as `reward` but of texts and in plain Python.

        Args:
            prompt: P characters.
            completion: as `decode` writes it, with a full stop for END.
        """

    @property
    @abstractmethod
    def guess_rate(self) -> float:
        """The mean reward of the best policy found that does not do the task; see its class."""

    @abstractmethod
    def _draw(self, draws: Draws, stream: str, step: int | Tensor, rows: int) -> Tensor:
        """Return [M, rows, P] prompts of either side."""

    @abstractmethod
    def _is_right(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Return [...] bool."""

    def _content(self, prompts: Tensor) -> Tensor:
        """Return [..., K] int64, equal for prompts that must be on the same side."""
        return prompts

    def _first_of(self, held_out: bool) -> list[int]:
        """Return the first of a few prompts that is on this side."""
        few = self._draw(Draws([0]), "stand-in", 0, 256)[0]
        fits = few[self.is_held_out(few) == held_out]
        first: list[int] = fits[0].tolist()
        return first


class AnswerTask(TextTask):
    """A task with one right answer, which is all that stands between the last `mark` and END.

    What stands before that mark is working, and free.
    """

    mark: str

    @abstractmethod
    def solve(self, prompt: str) -> str:
        """Return the right answer in plain Python."""

    def check(self, prompt: str, completion: str) -> bool:
        """Whether the text between the last mark and the first full stop is the right answer."""
        text, end, _ = completion.partition(CHARACTERS[END])
        _, mark, answer = text.rpartition(self.mark)
        return bool(end and mark) and answer == self.solve(prompt)

    @abstractmethod
    def _answer(self, prompts: Tensor) -> Tensor:
        """Return [..., W] ids of the right answers, with PAD where they are shorter than W."""

    def _is_right(self, prompts: Tensor, completions: Tensor) -> Tensor:
        return ends_with(completions, write(self.mark, self._answer(prompts)))


def ends_with(completions: Tensor, ending: Tensor) -> Tensor:
    """Return [...] bool: whether the tokens just before the first END are those of `ending`.

    Args:
        completions: [..., A] int64.
        ending: [..., W] int64; its PAD are gaps.
    """
    ending = move_right(ending)
    end = _first(completions == END).unsqueeze(-1)
    place = end - torch.arange(ending.shape[-1], 0, -1, device=end.device)
    inside = (place >= 0) & (end < completions.shape[-1])
    there = completions.gather(-1, place.clamp(min=0)) == ending
    return (torch.where(ending == PAD, True, inside & there)).all(dim=-1)


def _first(flags: Tensor) -> Tensor:
    """Return the place [...] of the first True of flags [..., L]; L where there is none."""
    # Not argmax: which of several maxima it names differs between devices.
    length = flags.shape[-1]
    return torch.where(flags, torch.arange(length, device=flags.device), length).amin(dim=-1)


def _constant(ids: list[int], device: torch.device) -> Tensor:
    """Return [L] int64 without a copy from the host, which a CUDA graph could not record."""
    return torch.cat([torch.full((1,), number, device=device) for number in ids])
