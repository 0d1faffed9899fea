"""What TRL's trainers with a gate share: the gate, checked whenever one is put in; checkpoints."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import kondo
from kondo.integrations import gate_state
from kondo.integrations.trl.first_batch import check_forward
from kondo.lm import TokenRows
from kondo.lm.trained_forward import Run

# To mypy, what the Trainer returns is Any.
_Base: Any = Trainer


class GatedTrainer(_Base):  # type: ignore[misc]
    """Part of a trainer with a gate, before the trainer of TRL among its bases.

    `_gated` says whether rows are gated at all. It stays True where None takes the place of a gate:
    what the gate has planned is trained as planned, and what follows is kept whole.
    """

    empty_steps: int
    _draws: torch.Generator
    _gate: kondo.BaseGate | None = None
    _gated = False
    _runs_dense = False
    _tried = False

    @property
    def gate(self) -> kondo.BaseGate | None:
        """What decides; None keeps everything. May be set to what `kondo.parse_gate` takes."""
        return self._gate

    @gate.setter
    def gate(self, gate: Any) -> None:
        found = kondo.parse_gate(gate)
        if found is not None and self._runs_dense:
            raise ValueError(
                f"gate must be None in a run of train() that began without one, got {gate!r}: "
                f"batches that are already there were made without it. Set it before train()."
            )
        self._check_gate(found)
        self._gate = found
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

    def _try_first(self, run: Run, rows: TokenRows, *, most: int, unit: str) -> None:
        """Run `kondo.check` on the first batch of a run of `train()`; log its seconds."""
        self._tried = True
        seconds = check_forward(self, run, rows, most=most, unit=unit)
        if seconds is not None:
            self._metrics["train"]["kondo/seconds_check"].append(seconds)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, without the metrics that have no number since the last log: TRL would write None."""
        if self._gated:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name, values in metrics.items() if all(map(_is_nan, values))]:
                del metrics[name]
        super().log(logs, start_time)

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._gated and self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial=trial), folder)
            gate_state.save(path, self.gate, self._draws, empty_steps=self.empty_steps)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._gated:
            found = gate_state.load(checkpoint, self.gate, self._draws)
            self.empty_steps = found.get("empty_steps", self.empty_steps)


def _is_nan(value: Any) -> bool:
    """Return whether a metric has no number; some of TRL's are tuples of sums."""
    return isinstance(value, float) and math.isnan(value)
