"""Rows of tokens: prompt and completion in one tensor, everything per token aligned with it.

log_probs[n, t] = log pi(input_ids[n, t] | input_ids[n, :t]),  exactly 0 where completion_mask is
False. Whatever has one value per token (screens, advantages, old log-probs) has this shape [N, S].
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kondo.arguments import check_dense
from kondo.core.delight import ROUNDING


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
        for name in ("input_ids", "attention_mask", "completion_mask", "position_ids"):
            value, is_mask = getattr(self, name), name.endswith("_mask")
            if value is None and name == "position_ids":
                continue
            kind = "bool, or 0 and 1 as integers" if is_mask else "integers"
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} must be a tensor of {kind}, got {type(value).__name__}; wrap it with "
                    f"torch.as_tensor(...)."
                )
            truths = value.dtype == torch.bool and not is_mask
            if value.is_floating_point() or value.is_complex() or truths:
                raise ValueError(f"{name} must hold {kind}, got {value.dtype}; give {name}.long().")
            check_dense(name, value)
            if value.ndim != 2:
                raise ValueError(
                    f"{name} must have shape [N, S], rows of tokens, got {list(value.shape)}; use "
                    f"{name}.unsqueeze(0) for one row."
                )
            if value.shape != self.input_ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids, {list(self.input_ids.shape)}, got "
                    f"{list(value.shape)}; give one value per token of prompt and completion."
                )
            object.__setattr__(self, name, value.bool() if is_mask else value.long())

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
        if self.device.type != "cpu" and passed is not None and passed[0] == vocab_size:
            return
        read = _row_facts(*self._parts, vocab_size).cpu()
        if bool(((read[0] == 1) & ~read[1:4].any(0) & (read[6] > 0)).all()):
            object.__setattr__(self, "_latest", (vocab_size, self._versions, read[4:]))
            return
        starts, outside, first, unknown, _, _, num_sampled = read
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
            return _row_facts(*self._parts, passed[0])[4:]
        return None if passed is None else passed[2]

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.attention_mask, self.completion_mask

    @property
    def _versions(self) -> list[tuple[int, int]] | None:
        """What changes when a tensor is written to; None where nobody counts that."""
        inference = any(part.is_inference() for part in self._parts)
        return None if inference else [(id(part), part._version) for part in self._parts]

    @property
    def _passed(self) -> tuple[int, Any, Tensor] | None:
        """Vocabulary, versions and measures of the latest check, unless a write was counted."""
        latest: tuple[int, Any, Tensor] | None = self.__dict__.get("_latest")
        known = latest is not None and latest[1] is not None and latest[1] == self._versions
        return latest if known else None


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


def check_per_token(name: str, value: Tensor, rows: TokenRows) -> None:
    """Refuse values per completion token, [N, C], which would not say where the prompt ends."""
    num_rows, num_columns = rows.input_ids.shape
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] in (1, num_columns):
        return  # other shapes are the engine's to refuse
    missing = num_columns - value.shape[1]
    raise ValueError(
        f"{name} must have shape [{num_rows}, {num_columns}] like input_ids (prompt and "
        f"completion), got {list(value.shape)}; "
        + (
            f"if these are completions that end the rows, put zeros before them: "
            f"torch.nn.functional.pad({name}, ({missing}, 0))."
            if missing > 0
            else "cut it to the rows' columns."
        )
    )


def check_screen(screen: Tensor, rows: TokenRows) -> None:
    """Refuse log-probs that no policy can have given to these tokens.

    One device sync; more where there are log-probs beside the completions, as of prompts.
    """
    check_per_token("screen", screen, rows)
    if screen.shape != rows.input_ids.shape:
        raise ValueError(
            f"screen must have one log-prob per token, {list(rows.input_ids.shape)}, got "
            f"{list(screen.shape)}; sums over sequences do not say which token was surprising."
        )
    sampled, most = rows.completion_mask.to(screen.device), ROUNDING.get(screen.dtype, 1e-2)
    known, above = screen != 0, sampled & (screen > most)
    facts = torch.stack([above, sampled & known, known > sampled])
    num_above, num_known, num_beside = facts.sum((1, 2)).tolist()
    if num_above:
        raise ValueError(
            f"screen must hold log-probs, at most 0, got {num_above} sampled tokens above "
            f"{most}, first at {above.nonzero()[0].tolist()}; logits, probabilities, "
            f"surprisals or values of another tokenisation are no log-probs of these tokens."
        )
    if not num_known:
        raise ValueError(
            "screen must hold the log-probs of the sampled tokens, got 0 for every one of them; "
            "they were not recorded, or they stand in other columns than their tokens: "
            "screen[n, t] belongs to input_ids[n, t]."
        )
    if not num_beside:
        return
    for by, side in ((-1, "left"), (1, "right")):
        # Zeros at an end of the completion alone would prove nothing, since a certain token (the
        # last one of an answer, a forced first one) has a log-prob of exactly 0. Here there is also
        # a log-prob beside the completion, and none beside where it would stand if it were moved.
        moved = torch.roll(sampled, by, 1)
        number = int(((known & ~sampled).any(1) & ~(known & ~moved).any(1)).sum())
        if 2 * number > screen.shape[0]:
            raise ValueError(
                f"screen must have the log-prob of input_ids[n, t] at screen[n, t], got one that "
                f"stands a column to the {side} in {number} of {screen.shape[0]} rows: there is a "
                f"log-prob beside the completion, and 0 at its other end. Shift it back, e.g. with "
                f"torch.roll(screen, {-by}, 1)."
            )


def lengths_of(rows: TokenRows, keep: Tensor) -> Tensor:
    """Return each row's tokens from the first real to the last kept one, on the CPU; one sync."""
    masks = torch.stack([rows.attention_mask.to(keep.device), keep]).cpu()
    if masks.numel() == 0:
        return torch.zeros(masks.shape[1], dtype=torch.int64)
    real, kept = masks.unbind()
    return kept.shape[1] - kept.flip(1).byte().argmax(1) - real.byte().argmax(1)
