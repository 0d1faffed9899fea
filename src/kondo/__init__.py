"""Policy-gradient training that pays only for the backward passes that are worth it.

Public names are imported when they are first used: `kondo --help` then starts without torch.
"""

import importlib
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kondo import actors, lm, ranks, rows
    from kondo.core import adapters, advantage, losses, quantiles, ratios, sampling, signals
    from kondo.core.base_gate import BaseGate, Choice, Unit
    from kondo.core.delight import delight, surprisal
    from kondo.core.diagnostics import diagnostics
    from kondo.core.gates import Gate
    from kondo.core.specs import parse_gate
    from kondo.core.unbiased import UnbiasedGate
    from kondo.core.variance import VarianceGate
    from kondo.engine.check import CheckError, CheckWarning, check
    from kondo.engine.distribution import DistributionPolicy
    from kondo.engine.monitor import monitor
    from kondo.engine.options import Options
    from kondo.engine.planner import Plan, plan
    from kondo.engine.policy import Policy
    from kondo.engine.report import Report
    from kondo.engine.select import select
    from kondo.engine.selection import Selection
    from kondo.engine.step import Group, backward

__version__ = "0.3.0"

__all__ = [
    "BaseGate",
    "CheckError",
    "CheckWarning",
    "Choice",
    "DistributionPolicy",
    "Gate",
    "Group",
    "Options",
    "Plan",
    "Policy",
    "Report",
    "Selection",
    "UnbiasedGate",
    "Unit",
    "VarianceGate",
    "actors",
    "adapters",
    "advantage",
    "backward",
    "check",
    "delight",
    "diagnostics",
    "lm",
    "losses",
    "monitor",
    "parse_gate",
    "plan",
    "quantiles",
    "ranks",
    "ratios",
    "rows",
    "sampling",
    "select",
    "signals",
    "surprisal",
]

_MODULES = {
    "actors": "actors",
    "adapters": "core.adapters",
    "advantage": "core.advantage",
    "lm": "lm",
    "losses": "core.losses",
    "quantiles": "core.quantiles",
    "ranks": "ranks",
    "ratios": "core.ratios",
    "rows": "rows",
    "sampling": "core.sampling",
    "signals": "core.signals",
}
_HOMES = {
    "core.base_gate": ("BaseGate", "Choice", "Unit"),
    "core.delight": ("delight", "surprisal"),
    "core.diagnostics": ("diagnostics",),
    "core.gates": ("Gate",),
    "core.specs": ("parse_gate",),
    "core.unbiased": ("UnbiasedGate",),
    "core.variance": ("VarianceGate",),
    "engine.check": ("CheckError", "CheckWarning", "check"),
    "engine.distribution": ("DistributionPolicy",),
    "engine.monitor": ("monitor",),
    "engine.options": ("Options",),
    "engine.planner": ("Plan", "plan"),
    "engine.policy": ("Policy",),
    "engine.report": ("Report",),
    "engine.select": ("select",),
    "engine.selection": ("Selection",),
    "engine.step": ("Group", "backward"),
}

if find_spec("numpy") is None:
    # The base install has torch without NumPy and needs none; torch warns of that when imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


def _load() -> None:
    """Import every class and function into this module."""
    for path, names in _HOMES.items():
        module = importlib.import_module(f"{__name__}.{path}")
        globals().update({name: getattr(module, name) for name in names})


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # each by itself: actors, ranks and language models take time
        globals()[name] = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    elif name in __all__:
        _load()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return ["__version__", *__all__]
