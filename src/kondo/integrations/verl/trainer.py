"""verl's synchronous trainer, whose actor trains on the rows that a gate keeps.

    _step_once (verl)      generate, score, balance, old log-probs, advantages
    _update_actor          read what the gate needs -> select -> plan -> verl's own, on the rows of
                           the plan. The returned batch is the whole one. The first time,
                           `kondo.check` tries the actor's forward after the reading.

One gate decides in the controller, for all ranks. N rows of the batch, T tokens of a response.
"""

import math
import os
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

import kondo
from kondo.integrations import gate_state
from kondo.integrations.verl.first_batch import rows_to_try
from kondo.integrations.verl.gate_inputs import GateRows, gate_advantages
from kondo.integrations.verl.options import SECTION, TRAINER_SEAMS, VERL, kl_in_loss, read_options
from kondo.integrations.verl.update_plan import Plan, make_plan, mini_batches
from kondo.integrations.verl.worker import PLAN, KondoActorRolloutRefWorker
from kondo.stage_clock import StageClock

VERL.check(VERL.installed)
VERL.check_seams(PPOTrainerSync, TRAINER_SEAMS)


# verl is not typed: to mypy, it is Any, and so is what it returns.
# mypy: warn-return-any=False
class KondoTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's trainer "sync" with a gate before the update of the actor.

    Chosen by `trainer.v1.trainer_mode=kondo`; the gate by `+trainer.v1.kondo.gate=unbiased:0.1`.
    The gradient of an optimizer step equals that of verl's loss on the full mini-batch, its
    denominators included, with everything skipped left out of the numerators, and the gate's
    weights in them.

    Attributes:
        gate: decides; None trains everything, as verl does.
        empty_updates: updates that kept nothing. Neither the optimizer nor the learning-rate
            schedule moved in them.

    Raises:
        ValueError: options that cannot be right together with a gate, naming them.
    """

    _to_check = False

    def __init__(self, config: Any):
        options = read_options(config)
        self._to_check = options.check
        self.gate = options.gate
        self.empty_updates = 0
        self._draws = torch.Generator().manual_seed(options.seed)
        mode = config.trainer.v1.trainer_mode
        config.trainer.v1.trainer_mode = "sync"  # verl decides by its own modes' names
        try:
            super().__init__(config)
        finally:
            config.trainer.v1.trainer_mode = mode

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.gate is not None and self.processor is not None:
            raise ValueError(
                f"actor_rollout_ref.model.path must be a model of text with {SECTION}.gate, got "
                f"one with a processor of images or other media: its inputs have not been tested "
                f"with rows left out. {SECTION}.gate=dense leaves verl's update as it is."
            )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.gate is None:
            return
        for role in self.role_worker_mapping:
            if "actor" in str(role):
                self.role_worker_mapping[role] = ray.remote(KondoActorRolloutRefWorker)

    # The update

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.gate is None:
            return super()._update_actor(batch, metrics)
        settings = self.config.actor_rollout_ref
        actor, estimator = settings.actor, self.config.algorithm.adv_estimator
        sizes = [tag["seq_len"] for tag in batch.tags]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1  # its data-parallel size
        clock = StageClock(torch.device("cpu"), ("read", "select", "update"))
        with clock.stage("read"):
            rows, counted = self._read(batch)
        if self._to_check:
            self._check(batch, rows_to_try(rows.mask, sizes, ranks), metrics)
        with clock.stage("select"):
            kl_coef, kl_type = kl_in_loss(self.config)
            advantages = gate_advantages(
                rows,
                batch.keys,
                unbiased=isinstance(self.gate, kondo.UnbiasedGate),
                estimator=str(getattr(estimator, "value", estimator)),  # text, or of an enum
                kl_coef=kl_coef,
                kl_type=kl_type,
            )
            chosen = kondo.select(
                rows.log_probs,
                advantages,
                gate=self.gate,
                unit="sequence",
                mask=rows.mask,
                generator=self._draws,
            )
            epochs = mini_batches(
                len(sizes),
                size=actor.ppo_mini_batch_size * settings.rollout.n,
                ranks=ranks,
                epochs=actor.ppo_epochs,
                seed=actor.data_loader_seed if actor.shuffle else None,
            )
            plan = make_plan(
                chosen.keep,
                chosen.weight,
                sizes,
                counted,
                epochs,
                ranks=ranks,
                micro_batch=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            )
        with clock.stage("update"):
            if plan.steps:
                kept = batch.select_keys([batch.keys[row] for row in plan.rows])
                kept.extra_info[PLAN] = {"steps": plan.steps}
                super()._update_actor(kept, metrics)
            else:
                self.empty_updates += 1
        self._log(metrics, rows, chosen, plan, sizes)
        metrics.update({f"kondo/seconds_{name}": spent for name, spent in clock.seconds().items()})
        return batch

    def _check(self, batch: Any, some: list[int], metrics: dict[str, Any]) -> None:
        """Run `kondo.check` on some rows of the first batch in which any token counts."""
        if not some:
            return
        few = batch.select_keys([batch.keys[row] for row in some])
        few.fields = ["input_ids", "response_mask"]
        few.extra_info = {"temperature": self.config.actor_rollout_ref.rollout.temperature}
        found = self.actor_rollout_wg.check_policy(few)["found"]
        if found["findings"]:
            error = kondo.CheckError(found["findings"])
            error.add_note(f"+{SECTION}.check=False trains without this check.")
            raise error
        self._to_check = False
        metrics["kondo/seconds_check"] = found["seconds"]

    def _read(self, batch: Any) -> tuple[GateRows, list[int]]:
        """Return what the gate looks at, and the tokens of each row that verl's mean counts."""
        assert self.gate is not None
        # verl leaves out what the batch does not have: rewards with a KL penalty, and importance
        # weights of a corrected rollout.
        fields = ["response_mask", "loss_mask", "advantages", "rm_scores", "token_level_rewards"]
        if kondo.signals.needs_log_probs(self.gate.signal):
            fields.append("old_log_probs")  # the rollout's own in bypass mode
        if isinstance(self.gate, kondo.UnbiasedGate):
            fields += ["rollout_is_weights", "ref_log_prob"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        counted = [int(row.sum()) for row in data["loss_mask"].unbind()]
        padded = {
            name: data[name].to_padded_tensor(0) if data[name].is_nested else data[name]
            for name in fields
            if name in data
        }
        padding = torch.tensor([bool(tag.get("is_padding", False)) for tag in batch.tags])
        mask = padded["response_mask"].bool() & ~padding.unsqueeze(1)
        rewards = padded.get("token_level_rewards", padded["rm_scores"])
        rows = GateRows(
            mask=mask,
            log_probs=padded.get("old_log_probs", torch.zeros(mask.shape)).float(),
            advantages=padded["advantages"].float(),
            rewards=rewards.float().sum(1),
            importance=padded.get("rollout_is_weights"),
            ref_log_probs=padded.get("ref_log_prob"),
        )
        return rows, counted

    def _log(
        self,
        metrics: dict[str, Any],
        rows: GateRows,
        chosen: kondo.Selection,
        plan: Plan,
        sizes: list[int],
    ) -> None:
        assert self.gate is not None
        counts, epochs = chosen.counts, self.config.actor_rollout_ref.actor.ppo_epochs
        if not kondo.signals.needs_log_probs(self.gate.signal):
            counts = counts._replace(surprisal=math.nan)
        rows_trained, tokens_trained = plan.trained(sizes)
        numbers = chosen.diagnostics()
        numbers |= {
            "entropy": counts.entropy,
            "rows_seen": len(sizes) * epochs,
            "rows_kept": counts.rows_kept,
            "rows_trained": rows_trained,
            "tokens_seen": sum(sizes) * epochs,
            "tokens_trained": tokens_trained,
            "fillers": plan.fillers,
            "steps": len(plan.steps),
            "empty_steps": plan.empty_steps,
            "empty_updates": self.empty_updates,
        }
        # A price is infinite where nothing was kept or there is none; a share of nothing is NaN.
        metrics.update({f"kondo/{k}": v for k, v in numbers.items() if math.isfinite(v)})
        kondo.monitor(self.gate, counts, reward=float(rows.rewards[chosen.mask].mean()))

    # Checkpoints

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        if self.gate is not None:
            folder = self.config.trainer.default_local_dir
            step = os.path.join(folder, f"global_step_{self.global_steps}")
            gate_state.save(step, self.gate, self._draws, empty_updates=self.empty_updates)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.gate is None or not self.global_steps:
            return
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            folder = os.path.abspath(trainer.resume_from_path)
        else:
            folder = str(find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir)))
        found = gate_state.load(folder, self.gate, self._draws)
        self.empty_updates = found.get("empty_updates", self.empty_updates)
