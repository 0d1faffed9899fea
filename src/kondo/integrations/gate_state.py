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

    Example:
        >>> import kondo
        >>> kind_of(kondo.Gate(rate=0.1)), kind_of(None)
        ('Gate by delight', 'dense')
    """
    if gate is None:
        return "dense"
    own = getattr(gate, "function", gate)  # of a gate that is a plain function
    name_of = kondo.signals.name_of
    return f"{name_of(own)} by {name_of(gate.signal)}"


def save(folder: str, gate: kondo.BaseGate | None, draws: torch.Generator, **counters: int) -> None:
    """Write the gate's state and kind, its random generator and the trainer's counters.

    Args:
        folder: of the checkpoint.
        gate: None for dense.
        draws: what the gate draws with.
        **counters: which `load` returns.
    """
    state = counters | {
        "draws": draws.get_state(),
        "gate": _state_of(gate),
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
    if not _restored(gate, saved.pop("gate"), saved.pop("gate_kind", None)):
        _logger.warning(
            "%s was written by another kind of gate: what that one remembered is left behind, "
            "and %r starts anew.",
            path,
            gate,
        )
    return saved


def _restored(gate: kondo.BaseGate | None, state: dict[str, Any], kind: str | None) -> bool:
    """Give a gate its state; return False, and leave the gate alone, if it is another kind's.

    Args:
        gate: None for dense.
        state: by `_state_of`.
        kind: of the gate that had the state; None where an older version did not note it.
    """
    if not state and not _state_of(gate):
        return True  # there is nothing to lose
    if kind is None:
        return _restored_by_shape(gate, state)
    if gate is None or kind != kind_of(gate):
        return False
    gate.load_state_dict(state)
    return True


def _restored_by_shape(gate: kondo.BaseGate | None, state: dict[str, Any]) -> bool:
    """Do what `_restored` does where only the state itself says whose it is."""
    if gate is None or bool(state) != bool(_state_of(gate)):
        return False
    try:
        gate.load_state_dict(state)
    except (KeyError, ValueError):
        return False
    return True


def _state_of(gate: kondo.BaseGate | None) -> dict[str, Any]:
    return {} if gate is None else gate.state_dict()
