"""The gated step over many ranks of torch.distributed: one gate, one denominator, no hangs."""

from kondo.distributed.ranks import RankError
from kondo.distributed.report import RankReport
from kondo.distributed.step import backward
from kondo.distributed.tokens import TokenLogProb

__all__ = ["RankError", "RankReport", "TokenLogProb", "backward"]
