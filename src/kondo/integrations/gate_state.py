"""What a checkpoint must hold of a gate, beside what the framework's own holds."""

import logging
import os
from typing import Any

import torch

import kondo

_logger = logging.getLogger(__name__)

STATE_FILE = "kondo_state.pt"


def kind_of(gate: kondo.BaseGate | None) -> str:
    """Return what a gate's state belongs to: its class, or its function, and its signal.

    A rate, a price or the length of a window may change from run to run: past values stay what they
    were.
    """
    if gate is None:
        return "dense"
    own = getattr(gate, "function", gate)  # of a gate that is a plain function
    name_of = kondo.signals.name_of
    return f"{name_of(own)} by {name_of(gate.signal)}"


def save(folder: str, gate: kondo.BaseGate | None, draws: torch.Generator, **counters: int) -> None:
    """Write the gate's state and kind, the generator it draws with, and the trainer's counters."""
    state = counters | {
        "draws": draws.get_state(),
        "gate": {} if gate is None else gate.state_dict(),
        "gate_kind": kind_of(gate),
    }
    torch.save(state, os.path.join(folder, STATE_FILE))


def load(folder: str, gate: kondo.BaseGate | None, draws: torch.Generator) -> dict[str, int]:
    """Restore what `save` wrote, and return the counters; warn where there is nothing that fits.

    Raises:
        ValueError: a state of the same kind of gate that is damaged.
    """
    path = os.path.join(folder, STATE_FILE)
    if not os.path.exists(path):
        _logger.warning(
            "%s holds no %s (the framework's own trainer writes none): the gate starts anew, and "
            "its counters at 0.",
            folder,
            STATE_FILE,
        )
        return {}
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    draws.set_state(saved.pop("draws"))
    state, kind = saved.pop("gate"), saved.pop("gate_kind", None)
    remembers = gate is not None and kondo.adapters.adapter_of(gate).remembers
    if gate is not None and remembers and kind == kind_of(gate):
        gate.load_state_dict(state)
    elif state or remembers:
        _logger.warning(
            "%s was written by another kind of gate, or by an older version of kondo: what that "
            "one remembered is left behind, and %r starts anew.",
            path,
            gate,
        )
    return saved
