"""`gate` of a trainer: checked whenever one is put in, whatever the config said."""

import contextlib
from collections.abc import Iterator
from typing import Any

import kondo
from kondo.core.contract import as_gate


class GateProperty:
    """Part of a trainer with a gate.

    `_gated` says whether rows are gated at all. It stays True where None takes the place of a gate:
    what the gate has planned is trained as planned, and what follows is kept whole.
    """

    _gate: Any = None
    _gated = False
    _runs_dense = False

    @property
    def gate(self) -> Any:
        """What decides; None keeps everything."""
        return self._gate

    @gate.setter
    def gate(self, gate: Any) -> None:
        found = None if gate is None else as_gate(gate)
        if found is not None and self._runs_dense:
            raise ValueError(
                f"gate must be None in a run of train() that began without one, got {gate!r}: "
                f"batches that are already there were made without it. Set it before train()."
            )
        self._check_gate(found)
        self._gate = gate
        self._gated = self._gated or found is not None

    def _check_gate(self, gate: kondo.BaseGate | None) -> None:
        """Raise ValueError if a gate and the trainer's options do not fit."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _dense_run(self) -> Iterator[None]:
        """Refuse gates inside: a run of `train()` that has none."""
        self._runs_dense = True
        try:
            yield
        finally:
            self._runs_dense = False
