"""What a checkpoint must hold of the gate, beside what TRL's holds."""

import logging
import os
from typing import Any

import torch

_logger = logging.getLogger(__name__)

STATE_FILE = "kondo_state.pt"


def save(trainer: Any, folder: str) -> None:
    """Write the gate's window, its random generator and the counters."""
    torch.save(_state(trainer), os.path.join(folder, STATE_FILE))


def load(trainer: Any, folder: str) -> None:
    """Restore what `save` wrote; warn where there is none, or another gate's."""
    path = os.path.join(folder, STATE_FILE)
    if not os.path.exists(path):
        _logger.warning(
            "%s holds no %s (TRL's own trainer writes none): the gate starts with an empty "
            "window and its counters at 0.",
            folder,
            STATE_FILE,
        )
        return
    state: dict[str, Any] = torch.load(path, weights_only=True)
    trainer.empty_steps = state["empty_steps"]
    trainer._draws.set_state(state["draws"])
    has_state = bool(_state(trainer)["gate"])
    if bool(state["gate"]) != has_state:
        _logger.warning(
            "%s was written by another kind of gate: what that one remembered is left behind, "
            "and %r starts anew.",
            path,
            trainer.gate,
        )
    elif has_state:
        trainer.gate.load_state_dict(state["gate"])


def _state(trainer: Any) -> dict[str, Any]:
    gate = trainer.gate.state_dict() if hasattr(trainer.gate, "state_dict") else {}
    return {"empty_steps": trainer.empty_steps, "draws": trainer._draws.get_state(), "gate": gate}
