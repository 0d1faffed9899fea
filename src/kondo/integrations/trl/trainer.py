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
import dataclasses
import logging
import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer

import kondo
from kondo.integrations.trl import selection
from kondo.integrations.trl._version import check_seams
from kondo.integrations.trl.config import (
    DEFAULT_GATE,
    OPTIONS,
    AnyGate,
    KondoGRPOConfig,
    check_gate,
    check_options,
    check_trainer,
    mean_entropy,
    shown,
)
from kondo.integrations.trl.correction import at_ratio_one, weighted_advantages
from kondo.integrations.trl.gated_trainer import GatedTrainer
from kondo.integrations.trl.plan import Part, plan
from kondo.integrations.trl.selection import gated_inputs, loss_mask
from kondo.lm.rows import TokenRows
from kondo.stage_clock import StageClock

_logger = logging.getLogger(__name__)

# TRL calls itself typed, but hardly is: to mypy, it is Any, and so is what it returns.
# mypy: warn-return-any=False
_Base: Any = GRPOTrainer

# What an optimizer step counts, per process, prompts included.
_COUNTED = ("tokens_seen", "rows_seen", "tokens_trained", "rows_trained")


@dataclasses.dataclass
class Window:
    """What happened since the last optimizer step."""

    clock: StageClock
    trained: bool = False  # whether any micro-step ran a forward and backward
    counts: Tensor | int = 0  # [4]: see `_COUNTED`


class KondoGRPOTrainer(GatedTrainer, _Base):  # type: ignore[misc]
    """`trl.GRPOTrainer` whose training forward and backward run on the rows that are worth it.

    Takes the arguments of TRL's trainer, with a `KondoGRPOConfig` as `args`; without one, it trains
    a tenth of the completions (`kondo_gate="unbiased:0.1"`). The gradient of an optimizer step
    equals that of TRL's loss, its denominators those of the full batch, with everything skipped
    left out of the numerators, and the gate's weights in them.

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

    _config_class = KondoGRPOConfig
    _folder_ends = "GRPO"
    _corrects = False
    _rewards: Tensor | None = None  # [N, K], of all processes
    _part: Part | None = None  # of the micro-step whose loss is computed
    _behaviour: Tensor | None = None  # log-probs of the sampler, in a loss with sequence ratios
    kondo_options: ClassVar[dict[str, Any]] = {}
    """Our options, for configs that cannot carry them; see `with_gate`."""

    @classmethod
    def with_gate(cls, gate: AnyGate, **options: Any) -> type[Self]:
        """Return this class with a gate of its own, for configs that are not a `KondoGRPOConfig`.

        Frameworks that build the config themselves, such as axolotl, let one name the trainer's
        class. Assign what this returns to a name of a module, and name that.

        Args:
            gate: as `KondoGRPOConfig.kondo_gate`.
            **options: other options that `KondoGRPOConfig` has and TRL's config has not.

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
        chosen = {"kondo_gate": gate, **options}
        return type(cls.__name__, (cls,), {"kondo_options": chosen, "__doc__": cls.__doc__})

    def __init__(self, *args: Any, **kwargs: Any):
        check_seams(GRPOTrainer)
        super().__init__(*args, **kwargs)
        config = self.args
        self._corrects = config.kondo_correction != "none"
        served = config.steps_per_generation * config.num_iterations
        stale = config.gradient_accumulation_steps % served != 0
        if self._corrects and not stale and not self.use_vllm and self.rollout_func is None:
            raise ValueError(
                f"kondo_correction='sequence' has no effect here: completions are sampled by the "
                f"policy that is trained, and num_iterations ({config.num_iterations}) and "
                f"steps_per_generation ({config.steps_per_generation}) use them for one optimizer "
                f"step, so every ratio is 1. Leave it out."
            )
        self._inputs: dict[str, Any] = {}  # of the loss that is computed
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._window = Window(StageClock(self.accelerator.device))
        self._backward_timer = contextlib.ExitStack()

    def _config(self, model: Any, args: Any) -> Any:
        """Return `args` with our options: its own, or those of this class."""
        own = self.kondo_options
        if isinstance(args, KondoGRPOConfig) and own:
            raise ValueError(
                f"args must not be a KondoGRPOConfig for a trainer that was made with "
                f"with_gate({shown(own['kondo_gate'])!r}): both say what is kept. Use "
                f"KondoGRPOTrainer itself, or TRL's GRPOConfig."
            )
        if args is None or not own:
            return super()._config(model, args)
        for name, option in OPTIONS.items():
            setattr(args, name, own.get(name, option.default))
        check_options(args)
        return args

    def _default_options(self) -> dict[str, Any]:
        if self.kondo_options:
            return self.kondo_options
        _logger.warning(
            "args is None: training with kondo_gate=%r. Give KondoGRPOConfig(...) to choose "
            "another gate.",
            DEFAULT_GATE,
        )
        return {"kondo_gate": DEFAULT_GATE}

    def _check_gate(self, gate: kondo.BaseGate | None) -> None:
        check_gate(gate, self.args)
        if self._gated or gate is not None:
            check_trainer(self)

    @property
    def vllm_importance_sampling_correction(self) -> bool:
        """TRL's own; in training ours takes its place, as its ratio is to vLLM's own log-probs."""
        return self._vllm_corrects and not (self._corrects and self.model.training)

    @vllm_importance_sampling_correction.setter
    def vllm_importance_sampling_correction(self, corrects: bool) -> None:
        self._vllm_corrects = corrects

    def _start_run(self) -> None:
        super()._start_run()
        if self._gated:
            # Micro-steps are planned for whole optimizer steps, so what an earlier run left of a
            # generation batch does not fit the steps of this one.
            self._window = Window(StageClock(self.accelerator.device))
            self._step, self._buffered_inputs = 0, None

    # Generate and score -> screen -> select

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not (self._gated and self.model.training):
            return output
        if self.args.kondo_check and not self._tried:
            self._check_first(output)
        log_probs = None
        # None, which keeps everything, may need them for its eta.
        if self.gate is None or kondo.signals.needs_log_probs(self.gate.signal):
            with self._window.clock.stage("screen"):
                log_probs = selection.screen(self, output)
        assert self._rewards is not None
        with self._window.clock.stage("select"):
            decision = selection.decide(self, log_probs, output, self._rewards)
        return output | gated_inputs(output, *decision, unit=self.args.kondo_unit)

    def _check_first(self, output: dict[str, Any]) -> None:
        """Run `kondo.check` on as much as a micro-step holds: of a single row, halves of two."""
        size = self.args.per_device_train_batch_size
        ids, mask = output["completion_ids"], loss_mask(output)
        columns = -(-ids.shape[1] // 2) if size == 1 else ids.shape[1]
        mask = mask[:, :columns].clone()
        mask[:, 0] |= ~mask.any(dim=1)  # TRL may mask all tokens of a row
        prompts = output["prompt_ids"], output["prompt_mask"]
        num_prompt = prompts[0].shape[1]

        def run(model: nn.Module, rows: TokenRows) -> Tensor:
            ids, real = rows.input_ids, rows.attention_mask.long()
            width = ids.shape[1] - num_prompt
            found = self._get_per_token_logps_and_entropies(model, ids, real, width)[0]
            return nn.functional.pad(found, (num_prompt, 0))

        rows = TokenRows.join(*prompts, ids[:, :columns], mask)
        self._try_first(run, rows, most=max(2, size), unit=self.args.kondo_unit, everywhere=True)

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
        """Run one micro-step; see TRL. At the end of an optimizer step, log what it paid for."""
        if not self._gated:
            return super().training_step(model, inputs, num_items_in_batch)
        self._left_out_step.close()
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._backward_timer.close()
        if not self.accelerator.sync_gradients:
            return loss
        window = self._window
        self._window = Window(StageClock(self.accelerator.device))
        if not window.trained:
            self._leave_out_step()
        # TRL logs means since the last log; of a total only the latest makes sense.
        self._metrics["train"]["kondo/empty_steps"] = [self.empty_steps]
        counts = self.accelerator.reduce(window.counts, reduction="sum").tolist()
        for name, count in zip(_COUNTED, counts, strict=True):
            self._log(name, count)
        spent = window.clock.seconds()
        for stage in ("screen", "select", "forward", "backward"):
            self._log(f"seconds_{stage}", spent[stage])
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        part: Part | None = inputs.get("kondo_part")
        if part is None:  # evaluation, or nothing to gate
            return self._trl_loss(model, inputs)
        # Where earlier micro-steps ran, the one in which processes synchronise must run too.
        runs = not part.idle or (self._window.trained and self.accelerator.sync_gradients)
        rows = part.rows if runs else []
        prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
        tokens = prompt[rows].sum() + completion[rows, : part.width].sum()
        numbers = (inputs["kondo_seen"], prompt.shape[0], tokens, len(rows))
        tensors = [torch.as_tensor(number, device=prompt.device) for number in numbers]
        self._window.counts = self._window.counts + torch.stack(tensors)
        if not runs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self._window.trained = True
        self._part = part
        try:
            with self._window.clock.stage("forward"):
                loss = self._trl_loss(model, inputs)
        finally:
            self._part = None
        # TRL's mean entropy and KL count skipped tokens as 0; log those of the trained ones.
        totals = torch.stack([loss_mask(inputs).sum(), inputs["kondo_keep"].sum()])
        seen, trained = self.accelerator.reduce(totals, reduction="sum").tolist()
        for name in ("entropy", "kl"):
            if values := self._metrics["train"].get(name):
                values[-1] *= seen / trained if trained else math.nan
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
        """Return log-probs, entropies and the router's loss; see TRL.

        In the loss of a micro-step with skipped rows, run the kept ones alone, cut after their last
        kept token; everything else is constant.
        """
        forward = super()._get_per_token_logps_and_entropies
        part, inputs = self._part, self._inputs
        if part is None:
            found = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        else:
            keep, weight = inputs["kondo_keep"], inputs["kondo_weight"]
            # The tokens of this micro-step over those of the one that TRL put each row into.
            moved = (loss_mask(inputs).sum() / inputs["kondo_counted"].clamp(min=1))[:, None]
            index = torch.tensor(part.rows, device=input_ids.device)
            stop = input_ids.shape[1] - logits_to_keep + part.width
            compact = (values[index, :stop] for values in (input_ids, attention_mask))
            log_probs, entropies, aux_loss = forward(model, *compact, part.width, *args, **kwargs)

            def spread(values: Tensor, weight: Tensor) -> Tensor:  # [kept rows, width] -> [b, T]
                wide = nn.functional.pad(values, (0, logits_to_keep - part.width))
                rows = wide.new_zeros(keep.shape).index_copy(0, index, wide)
                whole = torch.where(keep, rows, 0.0)
                if whole.requires_grad:
                    # Every term of the loss, KL included, reaches the model through these alone.
                    whole.register_hook(  # type: ignore[no-untyped-call]
                        lambda gradient: gradient * weight.to(gradient.dtype)
                    )
                return whole

            log_probs = spread(log_probs, weight * moved if self.loss_type == "bnpo" else weight)
            if entropies is not None:
                entropies = spread(entropies, weight * moved if mean_entropy(self) else weight)
            found = log_probs, entropies, aux_loss
        if self._behaviour is not None:  # inside the loss, which reads the advantages next
            inputs["advantages"] = weighted_advantages(
                found[0], self._behaviour, inputs, self.args.kondo_correction_cap
            )
        return found
