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
correction multiplies the advantages as soon as the forward has the log-probs for it.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer

import kondo
from kondo.core.contract import as_gate, needs_log_probs, value_name
from kondo.core.prechosen import Prechosen
from kondo.engine.report import StageClock
from kondo.engine.select import Selection, select
from kondo.engine.watch import watch
from kondo.integrations.trl._version import check_seams
from kondo.integrations.trl.checks import check_gate, check_trainer
from kondo.integrations.trl.config import KondoGRPOConfig
from kondo.integrations.trl.correction import at_ratio_one, check_effect, weighted_advantages
from kondo.integrations.trl.grpo_inputs import (
    gated_inputs,
    joined,
    loss_advantages,
    loss_mask,
    planned,
    token_rows,
)
from kondo.integrations.trl.micro_steps import Part, steps_needed, widths_of
from kondo.integrations.trl.row_exchange import exchange
from kondo.ranks.communicator import Ranks

_logger = logging.getLogger(__name__)

_STATE_FILE = "kondo_state.pt"

# A micro-step without a forward is known to be safe where gradients are synchronised by hooks of
# the last one. Elsewhere (FSDP) each has at least a filler.
_MAY_IDLE = ("NO", "MULTI_CPU", "MULTI_GPU")

_COUNTED = ("tokens_seen", "rows_seen", "tokens_trained", "rows_trained")


@dataclasses.dataclass
class _Window:
    """What happened since the last optimizer step."""

    clock: StageClock
    trained: bool = False  # whether any micro-step ran a forward and backward
    counts: Tensor | int = 0  # [4]: see `_COUNTED`; of this process, prompts included


# TRL calls itself typed, but hardly is: to mypy, it is Any, and so is what it returns.
# mypy: warn-return-any=False
_Base: Any = GRPOTrainer


class KondoGRPOTrainer(_Base):  # type: ignore[misc]
    """`trl.GRPOTrainer` whose training forward and backward run on the rows that are worth it.

    Takes the arguments of TRL's trainer, with a `KondoGRPOConfig` as `args`. The gradient of an
    optimizer step equals that of TRL's loss, its denominators those of the full batch, with
    everything skipped left out of the numerators, and the gate's weights in them.

    Attributes:
        gate: decides. Another `kondo.BaseGate`, or a callable (values, mask, generator) ->
            `kondo.Choice`, may replace it; None keeps everything.
        empty_steps: optimizer steps that kept nothing. Neither the optimizer nor the learning-rate
            schedule moved in them.

    Raises:
        ValueError: options that cannot be right together with a gate, saying why.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "kondo"]

    def __init__(self, *args: Any, **kwargs: Any):
        check_seams(GRPOTrainer)
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, KondoGRPOConfig):
            raise ValueError(
                f"args must be a KondoGRPOConfig, got {type(self.args).__name__}; it takes all "
                f"options of GRPOConfig and kondo_rate, kondo_noise or kondo_price."
            )
        self.gate: Any = self.args.make_gate()
        self.empty_steps = 0
        # At rate 1 there is nothing to decide, and nothing below is entered.
        self._gated = self.args.kondo_rate != 1.0 or self.args.delight_eta is not None
        if self._gated:
            check_trainer(self)
        self._corrects = self.args.kondo_correction != "none"
        self._behaviour: Tensor | None = None
        if self._corrects:
            check_effect(self)
            self.vllm_importance_sampling_correction = False  # the ratio is to vLLM's own log-probs
        self._deals = self.accelerator.num_processes > 1 and _may_deal(self)
        self._draws = torch.Generator().manual_seed(self.args.seed)
        self._gate_rewards: Tensor | None = None
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._part: Part | None = None
        self._inputs: dict[str, Any] = {}
        self._window = _Window(StageClock(self.accelerator.device))
        self._backward_timer = contextlib.ExitStack()
        self._left_out_step = contextlib.ExitStack()

    # A run of `train()`

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not self._gated:
            return super()._inner_training_loop(*args, **kwargs)
        # The run before may have ended anywhere. Micro-steps are planned for whole optimizer steps,
        # so what is left of a generation batch does not fit the steps of this run.
        self._window = _Window(StageClock(self.accelerator.device))
        self._step, self._buffered_inputs = 0, None
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._left_out_step.close()

    # Generate and score -> screen -> select

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # [N, rewards], of all processes
        weighted = rewards * self.reward_weights.to(rewards.device)
        unscored = rewards.isnan().all(dim=1)
        self._gate_rewards = weighted.nansum(dim=1).masked_fill(unscored, torch.nan)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not (self._gated and self.model.training):
            return output
        log_probs = None
        if self.gate is None or needs_log_probs(as_gate(self.gate).signal):
            with self._window.clock.stage("screen"):
                log_probs = self._screen(output)
        with self._window.clock.stage("select"):
            decision = self._select(log_probs, output)
        return output | gated_inputs(output, *decision, unit=self.args.kondo_unit)

    def _screen(self, output: dict[str, Any]) -> Tensor:
        """Return log-probs of the completion tokens, [n, T], from the cheapest source allowed."""
        source = self.args.kondo_screen
        if source != "rollout" and "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        if source != "exact" and "sampling_per_token_logps" in output:
            log_probs = output["sampling_per_token_logps"]
            # vLLM cannot score some tokens. As in TRL's own correction they count as unsurprising.
            unscored = log_probs.isnan() & loss_mask(output)
            self._log("unscored_tokens", unscored.sum().item())
            return log_probs.masked_fill(log_probs.isnan(), 0.0)
        if source == "rollout":
            raise ValueError(
                "kondo_screen='rollout' needs the sampler's log-probs, and this rollout returned "
                "none; return them as 'logprobs', or set kondo_screen='exact'."
            )
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        quiet = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        width, batch_size = output["completion_ids"].shape[1], self.args.per_device_train_batch_size
        with torch.no_grad(), quiet:
            return self._get_per_token_logps_and_entropies(
                self.model, ids, mask, width, batch_size=batch_size
            )[0]

    def _select(
        self, log_probs: Tensor | None, output: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gate the rows of all processes on the CPU; return the decision on this one's, [n, T].

        log_probs: None where the gate's signal does not read them.
        """
        mask, prompt = loss_mask(output), 0
        watched = gate = None if self.gate is None else as_gate(self.gate)
        facts = None if gate is None else gate.row_facts(token_rows(output))
        if gate is not None and facts is not None:  # they describe prompts and completions
            prompt = output["prompt_ids"].shape[1]
            gate = gate.bind(self._gather(facts).cpu())
        whole = functools.partial(nn.functional.pad, pad=(prompt, 0))
        counted = self._gather(whole(mask.int())).bool().cpu()
        known = torch.zeros(counted.shape)
        if log_probs is not None:
            known = self._gather(whole(log_probs.float())).cpu()
        if gate is None:
            gate = Prechosen(counted if self.args.kondo_unit == "token" else counted.any(dim=1))
        check_gate(gate, self.args)
        eta = self.args.delight_eta
        if eta is not None and gate.signal is not kondo.delight:
            raise ValueError(
                f"delight_eta must be None for a gate by another signal than delight, got {eta} "
                f"and {gate!r}; it weighs what is trained by delight."
            )
        chosen = select(
            known,
            self._gate_advantages(gate, log_probs, output).cpu(),
            gate=gate,
            unit=self.args.kondo_unit,
            mask=counted,
            generator=self._draws,
        )
        signal, units = value_name(gate.signal), chosen.unit_mask
        for name, value in kondo.diagnostics(
            chosen.values, chosen.choice, mask=units, eta=eta or 1.0, name=signal
        ).items():
            self._log(name, value)
        counts = chosen.counts
        if log_probs is None:
            counts = counts._replace(surprisal=math.nan)
        self._log("entropy", counts.entropy)
        assert self._gate_rewards is not None
        if self.accelerator.is_main_process:
            watch(watched, counts, reward=float(self._gate_rewards.nanmean()))
        columns = slice(prompt, prompt + mask.shape[1])
        keep, weight, factor = self._local_decision(chosen, mask.shape[0])[:, :, columns]
        return keep.bool(), weight, factor

    def _gate_advantages(
        self, gate: kondo.BaseGate, log_probs: Tensor | None, output: dict[str, Any]
    ) -> Tensor:
        """Return the advantages that the gate looks at, of all processes: [N] or [N, T].

        They are centred rewards, whatever the loss divides them by. An unbiased gate needs what
        enters the loss instead: it must be able to keep whatever has a gradient.
        """
        assert self._gate_rewards is not None
        groups = self.num_generations
        centred = kondo.advantage.group_mean(self._gate_rewards, groups, skip_nan=True)
        if not isinstance(gate, kondo.UnbiasedGate):
            return centred
        own = centred.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        found = loss_advantages(output, own, log_probs, self.args)
        return self._gather(found) if found.ndim == 2 else self.accelerator.gather(found)

    def _gather(self, values: Tensor) -> Tensor:
        """Gather [n, T] of every process, T being each process's own, into [N, largest T]."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def _local_decision(self, chosen: Selection, num_rows: int) -> Tensor:
        """Return keep, weight and the advantage's factor of this process's n rows: [3, n, T].

        They are those of the first process. All processes decided on the same numbers, but the
        last bit may differ between machines, and processes with different plans would wait for
        each other for ever.
        """
        weight, eta = chosen.weight, self.args.delight_eta
        assert weight is not None
        factor = torch.ones_like(weight)
        if eta is not None:
            soft = torch.sigmoid(chosen.values / eta)
            factor = factor * (soft if soft.ndim == 2 else soft.unsqueeze(1))
        decision = torch.stack([chosen.keep.to(weight.dtype), weight, factor])
        decision = decision.to(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast(decision, src=0)
        start = self.accelerator.process_index * num_rows
        return decision[:, start : start + num_rows]

    # Plan

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        slices = self._buffered_inputs
        if not self._gated or slices is None or slices is before:
            return inputs
        with self._window.clock.stage("select"):
            self._buffered_inputs = slices = self._planned(slices)
        return slices[self._step % self.args.steps_per_generation]

    def _planned(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Move rows between the micro-steps of each optimizer step, and say what each one runs."""
        steps = min(self.args.gradient_accumulation_steps, len(slices))
        size = slices[0]["kondo_keep"].shape[0]
        block = steps * size
        batch = joined(slices)
        mine = torch.tensor(widths_of(batch["kondo_keep"]), device=self.accelerator.device)
        widths = self.accelerator.gather(mine).view(-1, mine.numel()).tolist()
        if self._deals:
            by_row = self.use_vllm and self.vllm_importance_sampling_mode.startswith("sequence")
            per_row = ("importance_sampling_ratio",) if by_row else ()
            batch = exchange(batch, widths, block=block, ranks=Ranks(), per_row=per_row)
        active = [
            self._active_steps([own[start : start + block] for own in widths], size, steps)
            for start in range(0, mine.numel(), block)
        ]
        result = planned(batch, active, steps=steps, size=size)
        for part, before in zip(result, slices, strict=True):
            part["kondo_seen"] = before["prompt_mask"].sum() + before["completion_mask"].sum()
        return result

    def _active_steps(self, widths: list[list[int]], size: int, steps: int) -> int:
        """Return how many micro-steps of an optimizer step run; the same on every process.

        `widths`: of the optimizer step's rows, per process.
        """
        kept = [sum(width > 0 for width in own) for own in widths]
        most = math.ceil(sum(kept) / len(kept)) if self._deals else max(kept)
        if self.accelerator.distributed_type.value in _MAY_IDLE:
            return steps_needed(most, size)
        return steps if most else 0

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
        width = self._part.width
        index = torch.tensor(self._part.rows, device=input_ids.device)
        stop = input_ids.shape[1] - logits_to_keep + width
        compact = (values[index, :stop] for values in (input_ids, attention_mask))
        log_probs, entropies, aux_loss = forward(model, *compact, width, *args, **kwargs)

        def spread(values: Tensor) -> Tensor:  # [kept rows, width] -> [b, T], 0 where not kept
            wide = nn.functional.pad(values, (0, logits_to_keep - width))
            whole = torch.where(keep, wide.new_zeros(keep.shape).index_copy(0, index, wide), 0.0)
            if whole.requires_grad:
                # Every term of the loss, KL included, reaches the model through these alone.
                whole.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: gradient * weight.to(gradient.dtype)
                )
            return whole

        return spread(log_probs), None if entropies is None else spread(entropies), aux_loss

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
        self._window = _Window(StageClock(self.accelerator.device))
        if not window.trained:
            self.empty_steps += 1
            self._left_out_step.enter_context(_left_out_step(self.optimizer))
        # TRL logs means since the last log; of a total only the latest makes sense.
        self._metrics["train"]["kondo/empty_steps"] = [self.empty_steps]
        counts = self.accelerator.reduce(window.counts, reduction="sum").tolist()
        for name, count in zip(_COUNTED, counts, strict=True):
            self._log(name, count)
        spent = window.clock.seconds()
        for stage in ("screen", "select", "forward", "backward"):
            self._log(f"seconds_{stage}", spent[stage])

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._gated and self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial=trial), folder, _STATE_FILE)
            torch.save(self._kondo_state(), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._gated:
            return
        path = os.path.join(checkpoint, _STATE_FILE)
        if not os.path.exists(path):
            _logger.warning(
                "%s holds no %s (TRL's own trainer writes none): the gate starts with an empty "
                "window and its counters at 0.",
                checkpoint,
                _STATE_FILE,
            )
            return
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.empty_steps = state["empty_steps"]
        self._draws.set_state(state["draws"])
        has_state = bool(self._kondo_state()["gate"])
        if bool(state["gate"]) != has_state:
            _logger.warning(
                "%s was written by another kind of gate: what that one remembered is left behind, "
                "and %r starts anew.",
                path,
                self.gate,
            )
        elif has_state:
            self.gate.load_state_dict(state["gate"])

    def _kondo_state(self) -> dict[str, Any]:
        gate = self.gate.state_dict() if hasattr(self.gate, "state_dict") else {}
        return {"empty_steps": self.empty_steps, "draws": self._draws.get_state(), "gate": gate}


def _may_deal(trainer: Any) -> bool:
    """Return whether rows may change processes.

    Not where a denominator counts all tokens of a process, and not where positions are absolute:
    TRL counts them from the left padding, and processes pad differently.
    """
    rotary = getattr(trainer.model.config.get_text_config(), "rope_parameters", None) is not None
    return rotary and trainer.loss_type != "bnpo" and trainer.args.entropy_coef == 0.0


@contextlib.contextmanager
def _left_out_step(optimizer: Any) -> Iterator[None]:
    """Make the next `optimizer.step()` do nothing and count as skipped, as an overflow would.

    The Trainer then leaves the learning-rate schedule alone too. The end of the context takes both
    back, whether the step came or an error ended the run before it.
    """
    step = optimizer.step  # a learning-rate schedule has wrapped it

    def skip(closure: Any = None) -> None:
        optimizer.step = step
        optimizer._is_overflow = True

    optimizer.step = skip
    try:
        yield
    finally:
        if optimizer.step is skip:
            optimizer.step = step
        optimizer._is_overflow = False
