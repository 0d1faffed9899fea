"""A step over many ranks of torch.distributed: one gate, one denominator, no hangs.

`kondo.backward(..., group=...)` runs it. Names are looked up when they are used: DTensor takes
seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kondo.ranks.communicator import RankError
    from kondo.ranks.rank_group import RankReport

__all__ = ["RankError", "RankReport"]

_MODULES = {"RankError": "communicator", "RankReport": "rank_group"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
