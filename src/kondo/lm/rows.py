"""Rows of tokens: prompt and completion in one tensor, everything per token aligned with it.

log_probs[n, t] = log pi(input_ids[n, t] | input_ids[n, :t]),  exactly 0 where completion_mask is
False. Whatever has one value per token (screens, advantages, old log-probs) has this shape [N, S].
"""

import dataclasses

import torch
from torch import Tensor

from kondo.arguments import check_dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRows:
    """N rows of S tokens: a batch for `kondo.backward`, and what `CausalLM.log_prob` reads.

    Padding may stand on the left, on the right or on both sides. Shapes and dtypes are checked
    when it is made; values, which cost a device sync, by `check`.

    Example:
        >>> import torch
        >>> rows = TokenRows.join(
        ...     prompt_ids=torch.tensor([[0, 5], [6, 7]]),
        ...     prompt_mask=torch.tensor([[0, 1], [1, 1]]),
        ...     completion_ids=torch.tensor([[1, 2, 3], [4, 0, 0]]),
        ...     completion_mask=torch.tensor([[1, 0, 1], [1, 0, 0]]),
        ... )
        >>> rows.attention_mask.int().tolist()  # the tool output inside row 0 is read, not sampled
        [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
        >>> rows.completion_mask.int().tolist()
        [[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]
    """

    input_ids: Tensor
    """int64 [N, S]."""
    attention_mask: Tensor
    """bool [N, S] (0/1 integers are made bool): a real token; contiguous in each row."""
    completion_mask: Tensor
    """bool [N, S] (0/1 integers are made bool): the policy sampled this token, and its log-prob
    is read. May have holes, e.g. the outputs of tools."""
    position_ids: Tensor | None = None
    """int64 [N, S]; by default real tokens are counted from 0."""

    def __post_init__(self) -> None:
        ids = _check_integers("input_ids", self.input_ids)
        if ids.ndim != 2:
            raise ValueError(
                f"input_ids must have shape [N, S], rows of tokens, got {list(ids.shape)}; use "
                f"input_ids.unsqueeze(0) for one row."
            )
        object.__setattr__(self, "input_ids", ids.long())
        for name in ("attention_mask", "completion_mask"):
            mask = _check_integers(name, getattr(self, name), "bool, or 0 and 1 as integers")
            object.__setattr__(self, name, _check_like(name, mask, ids).bool())
        if self.position_ids is not None:
            positions = _check_integers("position_ids", self.position_ids)
            if positions.dtype == torch.bool:
                raise ValueError(
                    "position_ids must hold integers, got torch.bool, as masks have; leave them "
                    "out to count the real tokens from 0."
                )
            object.__setattr__(self, "position_ids", _check_like("position_ids", positions, ids))

    @classmethod
    def join(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> "TokenRows":
        """Return rows of prompts [N, P], padded on the left, and completions [N, C] after them.

        A completion is real up to its last sampled token: what lies in a hole of completion_mask
        before that (the output of a tool) was read by the policy, what follows cannot matter.
        """
        sampled = completion_mask.bool()
        prompt = prompt_mask.bool()
        real = sampled.flip(1).cummax(1).values.flip(1)
        return cls(
            input_ids=torch.cat([prompt_ids, completion_ids], 1),
            attention_mask=torch.cat([prompt, real], 1),
            completion_mask=torch.cat([torch.zeros_like(prompt), sampled], 1),
        )

    def check(self, vocab_size: int) -> None:
        """Raise a ValueError for rows that cannot be right.

        On a GPU one device sync; none where these rows passed before, unless a tensor of theirs was
        written to since (a version that inference mode does not count). In the memory of the CPU,
        where NumPy may write unseen, they are read every time.

        Args:
            vocab_size: rows of the model's embedding; ids must be below it.
        """
        passed = self._passed
        if self.device.type != "cpu" and passed is not None and passed.vocab_size == vocab_size:
            return
        read = _row_facts(*self._parts, vocab_size).cpu()
        sound = (read[0] == 1) & ~read[1:4].any(0) & (read[6] > 0)
        if not bool(sound.all()):
            _refuse_rows(read, vocab_size)
        object.__setattr__(self, "_latest", _Passed(vocab_size, self._parts, read[4:]))

    def __getstate__(self) -> dict[str, Tensor | None]:
        """Return the tensors: a copy counts writes anew, so what was read of them is left out."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.input_ids.device

    @property
    def measures(self) -> Tensor | None:
        """What `check` reads of every row, [3, N] int64 on the CPU; None if that is outdated.

        First real token, end of the last sampled one, and number of sampled tokens.
        """
        passed = self._passed
        if passed is not None and self.device.type == "cpu":
            return _row_facts(*self._parts, passed.vocab_size)[4:]
        return None if passed is None else passed.measures

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.attention_mask, self.completion_mask

    @property
    def _passed(self) -> "_Passed | None":
        """What the latest check read, unless a write since then was counted."""
        latest: _Passed | None = self.__dict__.get("_latest")
        return latest if latest is not None and latest.holds_for(self._parts) else None


class _Passed:
    """What a check of some tensors read.

    Args:
        vocab_size: that they were checked for.
        parts: the tensors.
        measures: of every row.
    """

    def __init__(self, vocab_size: int, parts: tuple[Tensor, ...], measures: Tensor):
        self.vocab_size, self.measures = vocab_size, measures
        self._parts, self._versions = parts, _versions(parts)

    def holds_for(self, parts: tuple[Tensor, ...]) -> bool:
        """Whether these are the tensors, and no write to them was counted."""
        same = all(one is other for one, other in zip(parts, self._parts, strict=True))
        return same and self._versions is not None and self._versions == _versions(parts)


def _versions(parts: tuple[Tensor, ...]) -> list[int] | None:
    """Return what changes when a tensor is written to; None where nobody counts that."""
    if any(part.is_inference() for part in parts):
        return None
    return [part._version for part in parts]


def _refuse_rows(facts: Tensor, vocab_size: int) -> None:
    """Name the first rule that a row breaks; `facts` by `_row_facts`."""
    starts, outside, first, unknown, _, _, num_sampled = facts
    suspects = {
        "attention_mask must have a real token in every row; drop the rows that are all "
        "padding": starts == 0,
        "attention_mask must be contiguous in every row; prompts that were padded on the right "
        "before a completion was joined need padding on the left": starts > 1,
        "completion_mask must lie inside attention_mask; a sampled token is a real token": (
            outside > 0
        ),
        "completion_mask must have a sampled token in every row: a sequence with no completion "
        "token has no log-prob; drop the row": num_sampled == 0,
        "completion_mask must not hold the first real token of a row: nothing precedes it, so "
        "no policy sampled it; put a prompt or a start token before it": first > 0,
        f"input_ids must lie in [0, {vocab_size}), the model's vocabulary, wherever "
        f"attention_mask is True; rollout and model do not share a tokeniser": unknown > 0,
    }
    for rule, where in suspects.items():
        if bool(where.any()):
            raise ValueError(
                f"{rule}. Got row {int(where.nonzero()[0])}, {int(where.sum())} of "
                f"{where.numel()} rows in all."
            )


def _row_facts(ids: Tensor, real: Tensor, sampled: Tensor, vocab_size: int) -> Tensor:
    """Return seven numbers of every row, [7, N] int64.

    Starts of runs of real tokens; sampled tokens outside the real ones; sampled tokens without a
    real one before them; real ids outside the vocabulary; the first real token; the end of the last
    sampled one; the number of sampled ones.
    """
    width = ids.shape[1]
    before = torch.nn.functional.pad(real[:, :-1], (1, 0))
    unknown = real & (ids != ids.clamp(0, vocab_size - 1))
    # On masks, a > b is "a and not b" in one kernel.
    masks = torch.stack([real > before, sampled > real, sampled > before, unknown, sampled])
    first, last = torch.stack([real, sampled.flip(1)]).byte().argmax(2)
    counts = masks.sum(2)
    return torch.cat([counts[:4], torch.stack([first, width - last]), counts[4:]])


def _check_integers(name: str, value: object, wanted: str = "integers") -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a tensor of {wanted}, got {type(value).__name__}; wrap it with "
            f"torch.as_tensor(...)."
        )
    if value.is_floating_point() or value.is_complex():
        raise ValueError(
            f"{name} must hold {wanted}, got {value.dtype}; convert it with {name}.long()."
        )
    check_dense(name, value)
    return value


def _check_like(name: str, value: Tensor, ids: Tensor) -> Tensor:
    if value.shape != ids.shape:
        raise ValueError(
            f"{name} must have the shape of input_ids, {list(ids.shape)}, got {list(value.shape)}; "
            f"give one value per token of prompt and completion."
        )
    return value
