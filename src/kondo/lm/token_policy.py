"""A causal language model as the policy of a step: what it brings beside log-probs.

check       refuses rows, advantages and log-probs that cannot belong to these tokens
mask, unit  completion tokens count; whole completions are gated
compact     rows cut after their last kept token, packed
row_costs   tokens that enter a forward, by which ranks share the work
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kondo.core.delight import ROUNDING
from kondo.engine.compact import MicroBatch
from kondo.engine.policy import Policy
from kondo.engine.screen import LogProb
from kondo.engine.select import Selection, Unit
from kondo.lm.faults import AsGiven, faults
from kondo.lm.model import CausalLM, check_rows
from kondo.lm.pack import Pack, balanced_groups
from kondo.lm.parts import is_sharded
from kondo.lm.rows import TokenRows


class TokenPolicy(Policy):
    """A `CausalLM` as `kondo.backward` sees it.

    Args:
        lm: the policy.
        log_prob: its log-prob, or a wrapped module that ends in it.
    """

    unit: Unit = "sequence"
    screen_rows = "promising"
    plain = False

    def __init__(self, lm: CausalLM, log_prob: LogProb):
        super().__init__(log_prob)
        self.lm = lm

    def check(
        self,
        batch: Any,
        advantages: Tensor,
        screen: Any,
        loss_inputs: dict[str, Tensor],
        unit: Unit,
    ) -> None:
        """Refuse rows that are not tokens, and values that are not aligned with them."""
        rows = check_rows(batch)
        rows.check(self.lm.vocab_size)
        if unit == "sample":
            raise ValueError(
                f'unit must be "sequence" or "token", got {unit!r}; a completion is a "sequence".'
            )
        for name, value in {"advantages": advantages, **loss_inputs}.items():
            _check_per_token(name, value, rows)
        if isinstance(screen, Tensor):
            self.check_log_probs(screen, rows)

    def check_log_probs(self, log_probs: Tensor, rows: Any) -> None:
        """Refuse log-probs that no policy can have given to these tokens."""
        _check_screen(log_probs, rows)

    def faults(self, batch: Any) -> Iterator[str]:
        """Yield what makes tokens of this model depend on others; see `kondo.lm.faults`."""
        return faults(self.lm, self.log_prob, batch)

    def mask(self, batch: Any) -> Tensor:
        """Return the completion mask."""
        return check_rows(batch).completion_mask

    def num_counted(self, batch: Any) -> int | None:
        """Return the number of sampled tokens, which the check of the rows has read."""
        measures = batch.measures
        return None if measures is None else int(measures[2].sum())

    def compact(
        self,
        batch: Any,
        advantages: Tensor,
        selection: Selection,
        *,
        loss_inputs: dict[str, Tensor],
        size: int | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield packs of the kept tokens; see `CausalLM.compact`."""
        return self.lm.compact(batch, advantages, selection, loss_inputs=loss_inputs, size=size)

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many packs a screen of these rows takes."""
        lengths = _lengths(batch, batch.completion_mask)
        chunk = chunk or size or 1
        pieces = [lengths[start : start + chunk] for start in range(0, size, chunk)]
        return sum(self._num_packs(piece) for piece in pieces)

    def _num_packs(self, lengths: Tensor) -> int:
        longest_first = lengths.sort(descending=True).values.tolist()
        padded = self.lm.layout == "padded"
        groups = balanced_groups(
            longest_first, self.lm.max_tokens, padded=padded, max_size=len(lengths)
        )
        return len(groups)

    def row_costs(self, batch: Any, selection: Selection) -> Tensor:
        """Return what each kept row costs, [R] int64 on the CPU: tokens up to its last kept one."""
        return _lengths(batch, selection.keep)[selection.rows.cpu()]

    def cheapest_row(self, batch: Any) -> int:
        """Return the shortest row."""
        return int(_lengths(batch, batch.completion_mask).argmin())

    def one_element(self, batch: Any, like: Tensor) -> Tensor:
        """Return a bool tensor like `like`, [1, S], that is True at the first sampled token."""
        counts = batch.completion_mask.to(like.device)
        place = counts.byte().argmax(dim=-1, keepdim=True)
        return torch.zeros_like(like).scatter(-1, place, True)


class TokenLogProb(nn.Module):
    """`CausalLM.log_prob` as the forward of a module.

    DDP and fully_shard work at the forward of the module they wrap, which `CausalLM` goes around:
    it calls the backbone and reads the head's weights. So wrap this one:

        lm = CausalLM(model)
        log_prob = DistributedDataParallel(TokenLogProb(lm))

        for layer in model.model.layers:      # or, sharded
            fully_shard(layer)
        log_prob = fully_shard(TokenLogProb(lm))

    Args:
        lm: the policy, made before anything is sharded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Bigram(nn.Embedding):
        ...     def forward(self, input_ids, attention_mask, position_ids):
        ...         return super().forward(input_ids)
        >>> log_prob = TokenLogProb(CausalLM(Bigram(10, 4), head=nn.Linear(4, 10)))
        >>> rows = TokenRows(
        ...     input_ids=torch.tensor([[3, 1]]),
        ...     attention_mask=torch.tensor([[1, 1]]),
        ...     completion_mask=torch.tensor([[0, 1]]),
        ... )
        >>> log_prob(rows).shape, len(list(log_prob.parameters()))
        (torch.Size([1, 2]), 3)
    """

    def __init__(self, lm: CausalLM):
        super().__init__()
        self.lm = lm
        self.module = lm.module
        known = {id(parameter) for parameter in lm.module.parameters()}
        if isinstance(lm._head, nn.Module):
            if not known >= {id(parameter) for parameter in lm._head.parameters()}:
                self.head = lm._head
        elif any(part.requires_grad for part in lm.head[:2] if part is not None):
            raise ValueError(
                "lm must have its head as a layer, got a Head of bare tensors that require grad, "
                "which no wrapper would see; give CausalLM(backbone, head=nn.Linear(...))."
            )

    def kondo_policy(self, log_prob: nn.Module | None = None) -> "TokenPolicy":
        """Return what `kondo.backward` knows of this policy, wrapped as `log_prob` or not."""
        return TokenPolicy(self.lm, log_prob or self)

    def forward(self, rows: TokenRows | Pack | AsGiven) -> Tensor:
        """Return log-probs; see `CausalLM.log_prob`."""
        if is_sharded(self.lm.head.weight):
            raise ValueError(
                "lm must have a head whose weights are whole inside TokenLogProb's forward, got a "
                "sharded one: its layer is read, not called, so it cannot be a unit of its own. "
                "Call fully_shard on the layers of the backbone and on TokenLogProb alone."
            )
        return self.lm.log_prob(rows)


def _check_per_token(name: str, value: Tensor, rows: TokenRows) -> None:
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


def _check_screen(screen: Tensor, rows: TokenRows) -> None:
    """Refuse log-probs that no policy can have given to these tokens.

    One device sync; more where there are log-probs beside the completions, as of prompts.
    """
    _check_per_token("screen", screen, rows)
    if screen.shape != rows.input_ids.shape:
        raise ValueError(
            f"screen must have one log-prob per token, {list(rows.input_ids.shape)}, got "
            f"{list(screen.shape)}; sums over sequences do not say which token was surprising."
        )
    sampled, most = rows.completion_mask.to(screen.device), ROUNDING.get(screen.dtype, 1e-2)
    known = screen != 0
    facts = torch.stack([sampled & (screen > most), sampled & known, known > sampled])
    num_above, num_known, num_beside = facts.sum((1, 2)).tolist()
    if num_above:
        above = sampled & (screen > most)
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
        number = int(_shifted_rows(known, sampled, by).sum())
        if 2 * number > screen.shape[0]:
            raise ValueError(
                f"screen must have the log-prob of input_ids[n, t] at screen[n, t], got one that "
                f"stands a column to the {side} in {number} of {screen.shape[0]} rows: there is a "
                f"log-prob beside the completion, and 0 at its other end. Shift it back, e.g. with "
                f"torch.roll(screen, {1 if side == 'left' else -1}, 1)."
            )


def _shifted_rows(known: Tensor, sampled: Tensor, by: int) -> Tensor:
    """Return which rows have log-probs only where sampled tokens would stand `by` columns further.

    Zeros at an end of the completion alone would prove nothing, since a certain token (the last one
    of an answer, a forced first one) has a log-prob of exactly 0. Here there is also a log-prob
    beside the completion, and none anywhere else, as there would be if prompts had been recorded.
    """
    moved = torch.roll(sampled, by, 1)
    return (known & ~sampled).any(1) & ~(known & ~moved).any(1)


def _lengths(batch: TokenRows, keep: Tensor) -> Tensor:
    """Return each row's tokens from the first real to the last kept one, on the CPU; one sync."""
    masks = torch.stack([batch.attention_mask.to(keep.device), keep]).cpu()
    if masks.numel() == 0:
        return torch.zeros(masks.shape[1], dtype=torch.int64)
    real, kept = masks.unbind()
    return kept.shape[1] - kept.flip(1).byte().argmax(1) - real.byte().argmax(1)
