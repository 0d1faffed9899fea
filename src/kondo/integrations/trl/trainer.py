"""TRL's GRPO trainer, with a forward and backward of the kept rows only.

    _generate_and_score_completions   TRL generates and scores; then screen -> select, over all
                                      processes: one gate decides, alike everywhere
    _prepare_inputs                   TRL shuffles and splits into micro-steps; then kept rows are
                                      dealt to the processes and gathered in the last micro-steps
    _compute_loss                     TRL's own, on whole micro-steps, so that every denominator is
                                      the full batch's; idle micro-steps return at once
    _get_per_token_logps_and_...      the one forward of that loss: on the kept rows, cut after
                                      their last kept token. Elsewhere the log-probs are constant

n rows of this process's generation batch, N of all processes, b of a micro-step, T completion
tokens. A skipped token has advantage, log-ratio and KL exactly 0, so it adds nothing to any term.
The gate's weights multiply the gradients of the log-probs, so they count in every term. A
correction multiplies the advantages as soon as the forward has the log-probs for it. `bnpo` and the
entropy bonus divide by the tokens of a micro-step: gradients of rows that moved are scaled to those
of the micro-step that TRL put them into.
"""

import contextlib
import functools
import logging
import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import get_config_model_id

import kondo
from kondo.integrations.trl import selection
from kondo.integrations.trl._version import check_seams
from kondo.integrations.trl.checks import check_trainer, mean_entropy, turn_off_router_loss
from kondo.integrations.trl.config import OPTIONS, KondoGRPOConfig
from kondo.integrations.trl.correction import at_ratio_one, check_effect, weighted_advantages
from kondo.integrations.trl.gate_options import check_gate, check_options, gate_of
from kondo.integrations.trl.gated_trainer import GatedTrainer
from kondo.integrations.trl.grpo_inputs import gated_inputs, loss_mask, rows_to_try
from kondo.integrations.trl.micro_steps import Part
from kondo.integrations.trl.optimizer_step import COUNTED, Window, left_out_step
from kondo.integrations.trl.plan import plan
from kondo.lm.rows import TokenRows
from kondo.stage_clock import StageClock

_logger = logging.getLogger(__name__)

DEFAULT_GATE = "unbiased:0.1"
"""The gate of a trainer without a config."""

# Place of the config among the positional arguments of TRL's trainer.
_ARGS = 2

# TRL calls itself typed, but hardly is: to mypy, it is Any, and so is what it returns.
# mypy: warn-return-any=False
_Base: Any = GRPOTrainer


class KondoGRPOTrainer(GatedTrainer, _Base):  # type: ignore[misc]
    """`trl.GRPOTrainer` whose training forward and backward run on the rows that are worth it.

    Takes the arguments of TRL's trainer, with a `KondoGRPOConfig` as `args`; without one, it trains
    a tenth of the completions (`kondo_gate="unbiased:0.1"`). The gradient of an optimizer step
    equals that of TRL's loss, its denominators those of the full batch, with
    everything skipped left out of the numerators, and the gate's weights in them.

    Attributes:
        gate: decides. Another `kondo.BaseGate`, or a callable (values, mask, generator) ->
            `kondo.Choice`, may replace it, before `train()` if there was none; None keeps
            everything.
        empty_steps: optimizer steps that kept nothing. Neither the optimizer nor the learning-rate
            schedule moved in them.

    Raises:
        ValueError: options that cannot be right together with a gate, saying why.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "kondo"]

    _corrects = False
    kondo_options: ClassVar[dict[str, Any]] = {}
    """Our options, for configs that cannot carry them; see `with_gate`."""

    @classmethod
    def with_gate(cls, spec: str, **options: Any) -> type[Self]:
        """Return this class with a gate of its own, for configs that are not a `KondoGRPOConfig`.

        Frameworks that build the config themselves, such as axolotl, let one name the trainer's
        class. Assign what this returns to a name of a module, and name that.

        Args:
            spec: the gate, as in `KondoGRPOConfig.kondo_gate`.
            **options: further options of `KondoGRPOConfig`: kondo_unit, kondo_screen,
                kondo_correction, kondo_correction_cap, kondo_check, delight_eta.

        Raises:
            ValueError: an option that is not ours.

        Example:
            >>> from kondo.integrations.trl import KondoGRPOTrainer
            >>> KondoGRPOTrainer.with_gate("unbiased:0.1").kondo_options
            {'kondo_gate': 'unbiased:0.1'}
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"options must be of {sorted(OPTIONS)}, got {unknown}.")
        chosen = {"kondo_gate": spec, **options}
        return type(cls.__name__, (cls,), {"kondo_options": chosen, "__doc__": cls.__doc__})

    def __init__(self, *args: Any, **kwargs: Any):
        check_seams(GRPOTrainer)
        given = list(args)  # TRL's order: model, reward_funcs, args, ...
        model = given[0] if given else kwargs.get("model")
        if len(given) > _ARGS:
            given[_ARGS] = self._config(model, given[_ARGS])
        else:
            kwargs["args"] = self._config(model, kwargs.get("args"))
        super().__init__(*given, **kwargs)
        # Dense: there is nothing to decide, and nothing below is entered.
        self._gated = self.args.delight_eta is not None
        self.gate = gate_of(self.args)
        self.empty_steps = 0
        self._corrects = self.args.kondo_correction != "none"
        self._behaviour: Tensor | None = None
        if self._corrects:
            check_effect(self)
        self._draws = torch.Generator().manual_seed(self.args.seed)
        self._rewards: Tensor | None = None
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._part: Part | None = None
        self._inputs: dict[str, Any] = {}
        self._window = Window(StageClock(self.accelerator.device))
        self._backward_timer = contextlib.ExitStack()
        self._left_out_step = contextlib.ExitStack()

    def _check_gate(self, gate: kondo.BaseGate | None) -> None:
        check_gate(gate, self.args)
        if self._gated or gate is not None:
            turn_off_router_loss(self)
            check_trainer(self)

    @property
    def vllm_importance_sampling_correction(self) -> bool:
        """TRL's own; in training ours takes its place, as its ratio is to vLLM's own log-probs."""
        return self._vllm_corrects and not (self._corrects and self.model.training)

    @vllm_importance_sampling_correction.setter
    def vllm_importance_sampling_correction(self, corrects: bool) -> None:
        self._vllm_corrects = corrects

    def _config(self, model: Any, args: Any) -> Any:
        """Return `args` with our options: its own, or those of this class."""
        own = self.kondo_options
        if args is None:
            options = own or {"kondo_gate": DEFAULT_GATE}
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            if not own:
                _logger.warning(
                    "args is None: training with kondo_gate=%r. Give KondoGRPOConfig(...) to "
                    "choose another gate.",
                    DEFAULT_GATE,
                )
            return KondoGRPOConfig(f"{name.split('/')[-1]}-GRPO", **options)
        if isinstance(args, KondoGRPOConfig):
            if own:
                raise ValueError(
                    f"args must not be a KondoGRPOConfig for a trainer that was made with "
                    f"with_gate({own['kondo_gate']!r}): both say what is kept. Use "
                    f"KondoGRPOTrainer itself, or TRL's GRPOConfig."
                )
            return args
        if not own:
            raise ValueError(
                f"args must be a KondoGRPOConfig, got {type(args).__name__}; write "
                f"KondoGRPOConfig(..., kondo_gate={DEFAULT_GATE!r}), which takes all options of "
                f"GRPOConfig. Where another library makes the config, use the class "
                f"KondoGRPOTrainer.with_gate({DEFAULT_GATE!r})."
            )
        for option, default in OPTIONS.items():
            setattr(args, option, own.get(option, default))
        check_options(args)
        return args

    # A run of `train()`

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not self._gated:
            with self._dense_run():
                return super()._inner_training_loop(*args, **kwargs)
        # The run before may have ended anywhere. Micro-steps are planned for whole optimizer steps,
        # so what is left of a generation batch does not fit the steps of this run.
        self._window = Window(StageClock(self.accelerator.device))
        self._step, self._buffered_inputs, self._tried = 0, None, False
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._left_out_step.close()

    # Generate and score -> screen -> select

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # [N, K], of all processes
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not (self._gated and self.model.training):
            return output
        if self.args.kondo_check and not self._tried:
            size = self.args.per_device_train_batch_size
            # As much as a micro-step holds: of a single row, halves of two.
            rows, most = rows_to_try(output, halves=size == 1), max(2, size)
            run = functools.partial(self._plain_forward, output["prompt_ids"].shape[1])
            self._try_first(run, rows, most=most, unit=self.args.kondo_unit)
        log_probs = None
        if selection.screens(self.gate):
            with self._window.clock.stage("screen"):
                log_probs = selection.screen(self, output)
        assert self._rewards is not None
        with self._window.clock.stage("select"):
            decision = selection.decide(self, log_probs, output, self._rewards)
        return output | gated_inputs(output, *decision, unit=self.args.kondo_unit)

    def _plain_forward(self, num_prompt: int, model: nn.Module, rows: TokenRows) -> Tensor:
        """Return log-probs of whole rows, [n, S], whose completions begin at `num_prompt`."""
        ids, mask = rows.input_ids, rows.attention_mask.long()
        width = ids.shape[1] - num_prompt
        found = self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
        return nn.functional.pad(found, (num_prompt, 0))

    # Plan

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        slices = self._buffered_inputs
        if not self._gated or slices is None or slices is before:
            return inputs
        with self._window.clock.stage("select"):
            self._buffered_inputs = slices = plan(self, slices)
        return slices[self._step % self.args.steps_per_generation]

    # Loss, forward and backward

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one micro-step; see TRL."""
        if not self._gated:
            return super().training_step(model, inputs, num_items_in_batch)
        self._left_out_step.close()
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._backward_timer.close()
        if self.accelerator.sync_gradients:
            self._end_window()
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        part: Part | None = inputs.get("kondo_part")
        if part is None:  # evaluation, or nothing to gate
            return self._trl_loss(model, inputs)
        # Where earlier micro-steps ran, the one in which processes synchronise must run too.
        runs = not part.idle or (self._window.trained and self.accelerator.sync_gradients)
        self._count(inputs, part.rows if runs else [], part.width)
        if not runs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self._window.trained = True
        self._part = part
        try:
            with self._window.clock.stage("forward"):
                loss = self._trl_loss(model, inputs)
        finally:
            self._part = None
        self._undilute_metrics(inputs)
        self._backward_timer.enter_context(self._window.clock.stage("backward"))
        return loss

    def _trl_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's own loss; in training with sequence ratios, if they are wanted."""
        if self._corrects and self.model.training:
            inputs, self._behaviour = at_ratio_one(inputs)
        self._inputs = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._inputs, self._behaviour = {}, None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        run = super()._get_per_token_logps_and_entropies
        forward = run if self._part is None else functools.partial(self._kept_forward, run)
        found = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self._behaviour is not None:  # inside the loss, which reads the advantages next
            self._inputs["advantages"] = weighted_advantages(
                found[0], self._behaviour, self._inputs, self.args.kondo_correction_cap
            )
        return found

    def _kept_forward(
        self,
        forward: Any,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the kept rows, cut after their last kept token; constants for everything else."""
        assert self._part is not None
        keep, weight = self._inputs["kondo_keep"], self._inputs["kondo_weight"]
        moved = self._moved()
        width = self._part.width
        index = torch.tensor(self._part.rows, device=input_ids.device)
        stop = input_ids.shape[1] - logits_to_keep + width
        compact = (values[index, :stop] for values in (input_ids, attention_mask))
        log_probs, entropies, aux_loss = forward(model, *compact, width, *args, **kwargs)

        # [kept rows, width] -> [b, T], 0 where not kept
        def spread(values: Tensor, weight: Tensor) -> Tensor:
            wide = nn.functional.pad(values, (0, logits_to_keep - width))
            whole = torch.where(keep, wide.new_zeros(keep.shape).index_copy(0, index, wide), 0.0)
            if whole.requires_grad:
                # Every term of the loss, KL included, reaches the model through these alone.
                whole.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: gradient * weight.to(gradient.dtype)
                )
            return whole

        log_probs = spread(log_probs, weight * moved if self.loss_type == "bnpo" else weight)
        if entropies is not None:
            entropies = spread(entropies, weight * moved if mean_entropy(self) else weight)
        return log_probs, entropies, aux_loss

    def _moved(self) -> Tensor:
        """Return the tokens of this micro-step over those of the one TRL put each row into."""
        return (loss_mask(self._inputs).sum() / self._inputs["kondo_counted"].clamp(min=1))[:, None]

    # Counting, and steps that keep nothing

    def _log(self, name: str, value: float) -> None:
        # A price is infinite where nothing was kept or there is none; TRL's log drops NaN.
        number = value if math.isfinite(value) else math.nan
        self._metrics["train"][f"kondo/{name}"].append(number)

    def _count(self, inputs: dict[str, Any], rows: list[int], width: int) -> None:
        prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
        trained = prompt[rows].sum() + completion[rows, :width].sum()
        numbers = (inputs["kondo_seen"], prompt.shape[0], trained, len(rows))
        tensors = [torch.as_tensor(number, device=prompt.device) for number in numbers]
        self._window.counts = self._window.counts + torch.stack(tensors)

    def _undilute_metrics(self, inputs: dict[str, Any]) -> None:
        """Make TRL's mean entropy and KL those of the trained tokens, not of zeros for the rest."""
        totals = torch.stack([loss_mask(inputs).sum(), inputs["kondo_keep"].sum()])
        seen, trained = self.accelerator.reduce(totals, reduction="sum").tolist()
        for name in ("entropy", "kl"):
            if values := self._metrics["train"].get(name):
                values[-1] *= seen / trained if trained else math.nan

    def _end_window(self) -> None:
        """Log what the optimizer step paid for, and leave it out if it kept nothing."""
        window = self._window
        self._window = Window(StageClock(self.accelerator.device))
        if not window.trained:
            self.empty_steps += 1
            self._left_out_step.enter_context(left_out_step(self.optimizer))
        # TRL logs means since the last log; of a total only the latest makes sense.
        self._metrics["train"]["kondo/empty_steps"] = [self.empty_steps]
        counts = self.accelerator.reduce(window.counts, reduction="sum").tolist()
        for name, count in zip(COUNTED, counts, strict=True):
            self._log(name, count)
        spent = window.clock.seconds()
        for stage in ("screen", "select", "forward", "backward"):
            self._log(f"seconds_{stage}", spent[stage])
