"""Policy-gradient training that pays only for the backward passes that are worth it."""

from kondo.core import advantage, losses, signals
from kondo.core.contract import BaseGate, Choice
from kondo.core.delight import delight, surprisal
from kondo.core.diagnostics import diagnostics
from kondo.core.gates import Gate
from kondo.core.specs import parse_gate
from kondo.core.unbiased import UnbiasedGate
from kondo.core.variance import VarianceGate
from kondo.engine.distribution import DistributionPolicy
from kondo.engine.options import Options
from kondo.engine.planner import Plan, plan
from kondo.engine.report import Report
from kondo.engine.step import backward

__version__ = "0.2.0"

__all__ = [
    "BaseGate",
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
    "delight",
    "diagnostics",
    "losses",
    "parse_gate",
    "plan",
    "signals",
    "surprisal",
]
