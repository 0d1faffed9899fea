"""Policy-gradient training that pays only for the backward passes that are worth it.

Public names are imported when they are first used: `kondo --help` then starts without torch.
"""

import importlib
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kondo.core import advantage, losses, signals
    from kondo.core.contract import BaseGate, Choice
    from kondo.core.delight import delight, surprisal
    from kondo.core.diagnostics import diagnostics
    from kondo.core.gates import Gate
    from kondo.core.specs import parse_gate
    from kondo.core.unbiased import UnbiasedGate
    from kondo.core.variance import VarianceGate
    from kondo.engine.check import CheckError, CheckWarning, check
    from kondo.engine.distribution import DistributionPolicy
    from kondo.engine.options import Options
    from kondo.engine.planner import Plan, plan
    from kondo.engine.report import Report
    from kondo.engine.step import backward

__version__ = "0.2.0"

__all__ = [
    "BaseGate",
    "CheckError",
    "CheckWarning",
    "Choice",
    "DistributionPolicy",
    "Gate",
    "Options",
    "Plan",
    "Report",
    "UnbiasedGate",
    "VarianceGate",
    "advantage",
    "backward",
    "check",
    "delight",
    "diagnostics",
    "losses",
    "parse_gate",
    "plan",
    "signals",
    "surprisal",
]

_MODULES = ("core", "engine", "core.advantage", "core.losses", "core.signals")
_HOMES = {
    "core.contract": ("BaseGate", "Choice"),
    "core.delight": ("delight", "surprisal"),
    "core.diagnostics": ("diagnostics",),
    "core.gates": ("Gate",),
    "core.specs": ("parse_gate",),
    "core.unbiased": ("UnbiasedGate",),
    "core.variance": ("VarianceGate",),
    "engine.check": ("CheckError", "CheckWarning", "check"),
    "engine.distribution": ("DistributionPolicy",),
    "engine.options": ("Options",),
    "engine.planner": ("Plan", "plan"),
    "engine.report": ("Report",),
    "engine.step": ("backward",),
}

if find_spec("numpy") is None:
    # The base install has torch without NumPy and needs none; torch warns of that when imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


def _load() -> None:
    """Import every public name into this module."""
    for path in _MODULES:
        globals()[path.rpartition(".")[2]] = importlib.import_module(f"{__name__}.{path}")
    for path, names in _HOMES.items():
        module = importlib.import_module(f"{__name__}.{path}")
        globals().update({name: getattr(module, name) for name in names})


def __getattr__(name: str) -> Any:
    # All at once: whoever uses one name finds the others, and their modules, as after an import.
    if name in (*__all__, "core", "engine"):
        _load()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
