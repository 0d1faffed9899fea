"""Actor-learner training on Ray: actors drop what is not worth sending. See
docs/how-to/ray-actors.md.

Names are imported when they are used, so that the command line can list its commands without Ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kondo.actors.driver import Status, run
    from kondo.actors.processes import Summary
    from kondo.actors.setup import Settings, Setup

__all__ = ["Settings", "Setup", "Status", "Summary", "run"]

_HOMES = {
    **dict.fromkeys(("Settings", "Setup"), "setup"),
    **dict.fromkeys(("Status", "run"), "driver"),
    "Summary": "processes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
