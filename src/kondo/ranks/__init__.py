"""The gated step over many ranks of torch.distributed: one gate, one denominator, no hangs.

Names are looked up when they are used: `kondo.actors` starts many processes, and none of
them needs DTensor or language models, which take seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kondo.ranks.ranks import RankError
    from kondo.ranks.report import RankReport
    from kondo.ranks.step import backward
    from kondo.ranks.tokens import TokenLogProb

__all__ = ["RankError", "RankReport", "TokenLogProb", "backward"]

_HOMES = {
    "RankError": "ranks",
    "RankReport": "report",
    "TokenLogProb": "tokens",
    "backward": "step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
