"""Language models over ranks: their log-prob as a module, and what their rows cost."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kondo.engine.screen import LogProb
from kondo.engine.select import Selection
from kondo.lm.model import CausalLM
from kondo.lm.pack import Pack, balanced_groups
from kondo.lm.rows import TokenRows


class TokenMasks(NamedTuple):
    """The masks of `TokenRows`, all that a `BudgetGate` is bound to."""

    attention_mask: Tensor
    completion_mask: Tensor

    def packed(self) -> Tensor:
        """Return both as one tensor, [N, S] uint8, that can travel."""
        return self.attention_mask.byte() + 2 * self.completion_mask.byte()

    @classmethod
    def unpacked(cls, packed: Tensor) -> "TokenMasks":
        """Return what `packed` was made of; what was filled up with zeros is padding."""
        return cls(packed % 2 == 1, packed >= 2)


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

    def forward(self, rows: TokenRows | Pack) -> Tensor:
        """Return log-probs; see `CausalLM.log_prob`."""
        if isinstance(self.lm.head.weight, DTensor):
            raise ValueError(
                "lm must have a head whose weights are whole inside TokenLogProb's forward, got a "
                "sharded one: its layer is read, not called, so it cannot be a unit of its own. "
                "Call fully_shard on the layers of the backbone and on TokenLogProb alone."
            )
        return self.lm.log_prob(rows)


def causal_lm(log_prob: Any) -> CausalLM | None:
    """Return the language model behind a log-prob function, if it is one of ours."""
    owner = getattr(log_prob, "__self__", log_prob)
    if isinstance(owner, DistributedDataParallel):
        owner = owner.module
    if isinstance(owner, TokenLogProb):
        owner = owner.lm
    return owner if isinstance(owner, CausalLM) else None


def screen_calls(model: LogProb, batch: Any, size: int, chunk: int | None) -> int:
    """Return how many forwards a screen of these rows makes on this rank."""
    pieces = [slice(start, start + (chunk or size)) for start in range(0, size, chunk or size or 1)]
    lm = causal_lm(model)
    if lm is None or not isinstance(batch, TokenRows):
        return len(pieces)
    lengths = _lengths(batch, batch.completion_mask)
    return sum(_num_packs(lm, lengths[piece]) for piece in pieces)


def _num_packs(lm: CausalLM, lengths: Tensor) -> int:
    longest_first = lengths.sort(descending=True).values.tolist()
    padded = lm.layout == "padded"
    return len(balanced_groups(longest_first, lm.max_tokens, padded=padded, max_size=len(lengths)))


def row_costs(batch: Any, chosen: Selection) -> Tensor:
    """Return what each kept row costs, [R] int64 on the CPU: tokens that enter the forward.

    For rows of tokens those up to the last kept one; otherwise elements that count.
    """
    if isinstance(batch, TokenRows):
        return _lengths(batch, chosen.keep)[chosen.rows.cpu()]
    counted = chosen.mask if chosen.mask.ndim == 1 else chosen.mask.sum(dim=1)
    return counted.index_select(0, chosen.rows).long().cpu()


def cheapest_row(batch: Any) -> int:
    """Return a row that costs little to run only to keep step."""
    if isinstance(batch, TokenRows):
        return int(_lengths(batch, batch.completion_mask).argmin())
    return 0


def one_element(batch: Any, mask: Tensor) -> Tensor:
    """Return a bool tensor like `mask`, of one row, that is True once: at an element to read."""
    counts = batch.completion_mask.to(mask.device) if isinstance(batch, TokenRows) else mask
    place = counts.byte().argmax(dim=-1, keepdim=True)
    return torch.zeros_like(mask).scatter(-1, place, True)


def _lengths(batch: TokenRows, keep: Tensor) -> Tensor:
    """Return each row's tokens from the first real to the last kept one, on the CPU; one sync."""
    masks = torch.stack([batch.attention_mask.to(keep.device), keep]).cpu()
    if masks.numel() == 0:
        return torch.zeros(masks.shape[1], dtype=torch.int64)
    real, kept = masks.unbind()
    return kept.shape[1] - kept.flip(1).byte().argmax(1) - real.byte().argmax(1)
