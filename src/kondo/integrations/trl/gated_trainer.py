"""What TRL's trainers with a gate share: the gate, its check, empty steps and checkpoints."""

import contextlib
import logging
import math
import os
import time
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id

import kondo
from kondo.integrations import gate_state
from kondo.integrations.trl.config import DEFAULT_GATE, shown
from kondo.lm import TokenRows
from kondo.lm.trained_forward import Forward, Run, TrainedForward

_logger = logging.getLogger(__name__)

WHOLE_MODELS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Accelerate's ways to run whole models on every process. A micro-step without a forward is known
to be safe there: gradients are synchronised by hooks of the last one. Elsewhere (FSDP) each has at
least a filler."""

# Place of the config among the positional arguments of TRL's trainers.
_ARGS = 2

# To mypy, what the Trainer returns is Any.
_Base: Any = Trainer


class GatedTrainer(_Base):  # type: ignore[misc]
    """Part of a trainer with a gate, before the trainer of TRL among its bases.

    `_gated` says whether rows are gated at all. It stays True where None takes the place of a gate:
    what the gate has planned is trained as planned, and what follows is kept whole. Subclasses
    define `_check_gate`, which raises a ValueError for a gate that does not fit the options.
    """

    _config_class: type[Any]
    _folder_ends: str
    """In the output folder of a trainer without a config, as TRL names it."""
    _gate: kondo.BaseGate | None = None
    _gated = False
    _runs_dense = False
    _tried = False

    def __init__(self, *args: Any, **kwargs: Any):
        given = list(args)  # TRL's order: model, reward_funcs, args, ...
        model = given[0] if given else kwargs.get("model")
        if len(given) > _ARGS:
            given[_ARGS] = self._config(model, given[_ARGS])
        else:
            kwargs["args"] = self._config(model, kwargs.get("args"))
        super().__init__(*given, **kwargs)
        # Weights by delight are a gate's matter where everything is kept, too.
        self._gated = getattr(self.args, "delight_eta", None) is not None
        self.gate = self._config_class.make_gate(self.args)
        self.empty_steps = 0
        self._draws = torch.Generator().manual_seed(self.args.seed)
        self._left_out_step = contextlib.ExitStack()

    def _config(self, model: Any, args: Any) -> Any:
        """Return the config that was given, or by default one that TRL would name alike."""
        kind = self._config_class
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            folder = f"{name.split('/')[-1]}-{self._folder_ends}"
            return kind(folder, **self._default_options())
        if not isinstance(args, kind):
            raise ValueError(
                f"args must be a {kind.__name__}, got {type(args).__name__}; write "
                f"{kind.__name__}(..., kondo_gate={DEFAULT_GATE!r}), which takes all options of "
                f"TRL's config. Where another library makes the config of a GRPOTrainer, use the "
                f"class KondoGRPOTrainer.with_gate({DEFAULT_GATE!r})."
            )
        return args

    def _default_options(self) -> dict[str, Any]:
        """Return the options of a trainer without a config."""
        return {}

    # The gate

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

    # A run of `train()`

    def _start_run(self) -> None:
        """Forget the run before, which may have ended anywhere."""
        self._tried = False

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._start_run()
        self._runs_dense = not self._gated
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._runs_dense = False
            self._left_out_step.close()

    def _try_first(
        self, run: Run, rows: TokenRows, *, most: int, unit: Any, everywhere: bool
    ) -> None:
        """Run `kondo.check` on the first batch, with the forward that TRL trains with.

        Args:
            run: the forward.
            rows: of this process, N >= 1, each with a token that counts.
            most: rows that one forward can hold with a graph.
            unit: what is gated.
            everywhere: every process tries rows of its own, in the same number of forwards.

        Raises:
            kondo.CheckError: what makes the model one that rows cannot be dropped from.
        """
        self._tried = True
        args, accelerator = self.args, self.accelerator
        kind = accelerator.distributed_type.value
        if kind not in WHOLE_MODELS:
            _logger.warning(
                "kondo.check is left out: with %s parameters are not whole outside of TRL's own "
                "step. Try the model on one process.",
                kind,
            )
            return
        ranks = accelerator.num_processes > 1
        together = ranks and everywhere
        checkpointing = args.gradient_checkpointing_kwargs or {}
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(accelerator.autocast())  # else rounding is judged as float32's
            if args.torch_compile:  # graphs of a few rows would serve nothing else
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if checkpointing.get("use_reentrant"):
                stack.enter_context(disable_gradient_checkpointing(self.model, checkpointing))
            try:
                kondo.check(
                    TrainedForward(Forward(self.model, run), most),
                    rows,
                    torch.ones(rows.input_ids.shape[0], device=rows.device),
                    unit=unit,
                    group="world" if together else "local" if ranks else None,
                    options=kondo.Options(all_reduce=True if together else None),
                )
            except kondo.CheckError as error:
                error.add_note("kondo_check=False trains without this check.")
                raise
        self._log("seconds_check", time.perf_counter() - start)

    def _leave_out_step(self) -> None:
        """Count an optimizer step that kept nothing, and make it do nothing.

        The step counts as skipped, as after an overflow, so the Trainer leaves the learning-rate
        schedule alone too. `_left_out_step.close()` takes both back, whether the step came or an
        error ended the run before it.
        """
        self.empty_steps += 1
        optimizer, step = self.optimizer, self.optimizer.step  # a schedule has wrapped it

        def skip(closure: Any = None) -> None:
            optimizer._is_overflow = True

        def restore() -> None:
            optimizer.step, optimizer._is_overflow = step, False

        optimizer.step = skip
        self._left_out_step.callback(restore)

    # Logs and checkpoints

    def _log(self, name: str, value: float) -> None:
        # A price is infinite where nothing was kept or there is none; TRL's log drops NaN.
        number = value if math.isfinite(value) else math.nan
        self._metrics["train"][f"kondo/{name}"].append(number)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, without the metrics that have no number since the last log: TRL would write None."""
        if self._gated:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, values in list(metrics.items()):  # some of TRL's are tuples of sums
                if all(isinstance(value, float) and math.isnan(value) for value in values):
                    del metrics[name]
        super().log(logs, start_time)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        # The config is pickled beside the weights, and not every gate can be.
        given = self.args.kondo_gate
        self.args.kondo_gate = shown(given)
        try:
            super()._save(*args, **kwargs)
        finally:
            self.args.kondo_gate = given

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
