"""A `CausalLM` as a module, for what wraps the forward of one: DDP and fully_shard."""

from torch import Tensor, nn

from kondo.lm.architecture import is_sharded
from kondo.lm.faults import AsGiven
from kondo.lm.model import CausalLM
from kondo.lm.pack import Pack
from kondo.lm.rows import TokenRows


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
        self.lm = self.kondo_policy = lm
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

    def forward(self, rows: TokenRows | Pack | AsGiven) -> Tensor:
        """Return log-probs; see `CausalLM.log_prob`."""
        if is_sharded(self.lm.head.weight):
            raise ValueError(
                "lm must have a head whose weights are whole inside TokenLogProb's forward, got a "
                "sharded one: its layer is read, not called, so it cannot be a unit of its own. "
                "Call fully_shard on the layers of the backbone and on TokenLogProb alone."
            )
        return self.lm.log_prob(rows)
