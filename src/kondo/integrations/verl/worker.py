"""verl's actor workers, which run the steps of a plan instead of equal pieces of their data.

    update_actor (verl) -> train_mini_batch, per step of the plan: take rows -> train_batch (verl)
                                                        -> the loss: verl's own, weighed

    check_policy -> `kondo.check` of the engine's forward, once before the first update

Without a plan, a worker is verl's.
"""

import functools
import time
from itertools import chain
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import kondo
from kondo.integrations.verl.first_batch import check_engine, token_rows
from kondo.integrations.verl.options import ENGINE_SEAMS, VERL, WORKER_SEAMS
from kondo.integrations.verl.update_plan import Step, weigh_outputs

PLAN = "kondo_plan"
WEIGHT = "kondo_weight"
NUM_TOKENS = "kondo_num_tokens"

VERL.check_seams(TrainingWorker, WORKER_SEAMS)


def weighed_loss(loss_fn: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Return verl's loss of a micro-batch, with the mini-batch's full count of tokens in it.

    `global_batch_size`, by which means over sequences divide, is verl's: the full mini-batch. What
    the loss is without a plan, if there is none.
    """
    if tu.get(data, WEIGHT) is None:
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)
    weight, lengths = data[WEIGHT], data["input_ids"].offsets().diff()
    tu.assign_non_tensor(data, batch_num_tokens=tu.get(data, NUM_TOKENS))
    outputs = weigh_outputs(model_output, weight.to(lengths.device), lengths)
    return loss_fn(model_output=outputs, data=data, dp_group=dp_group)


# verl is not typed: to mypy, it is Any.
class KondoTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """verl's worker of one model, whose mini-batches may be those of a plan."""

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Set verl's loss; micro-batches of a plan weigh it."""
        super().set_loss_fn(functools.partial(weighed_loss, loss_fn))

    def train_mini_batch(self, data: Any) -> Any:
        """Run the steps of the plan that came with the data; verl's mini-batches without one."""
        plan = tu.pop(data, key=PLAN, default=None)
        if plan is None:
            return super().train_mini_batch(data)
        offload = tu.pop(data, key="disable_auto_offload", default=False)
        for key in ("mini_batch_size", "epochs", "seed", "dataloader_kwargs"):
            tu.pop(data, key=key)  # the plan knows
        with self.engine.train_mode(disable_auto_offload=offload):
            outputs = [
                self._train_step(data, step, last=number == len(plan["steps"]) - 1)
                for number, step in enumerate(plan["steps"])
            ]
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(
            tensor_dict={}, non_tensor_dict={"metrics": _joined_metrics(outputs)}
        ).cpu()

    def _train_step(self, data: Any, step: Step, *, last: bool) -> Any:
        """Run one optimizer step; the learning rate's schedule moves after the last one."""
        rank = self.engine.get_data_parallel_rank()
        rows = tu.index_select_tensor_dict(data, step.rows[rank])
        weight = torch.tensor(step.weights[rank])
        rows[WEIGHT] = weight
        # A filler has no gradient by its weight. Without an advantage it is not in the logged loss.
        advantages, offsets = rows["advantages"].values(), rows["advantages"].offsets()
        filler = (weight == 0).repeat_interleave(offsets.diff())
        rows["advantages"] = torch.nested.nested_tensor_from_jagged(
            torch.where(filler, 0.0, advantages), offsets=offsets
        )
        group = self.engine.get_data_parallel_group()
        sizes: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(
            sizes, rows["input_ids"].offsets().diff().tolist(), group
        )
        tu.assign_non_tensor(
            rows,
            global_token_num=NonTensorData(list(chain.from_iterable(sizes))),
            update_lr_scheduler=last,
            disable_auto_offload=True,
            **{NUM_TOKENS: step.num_tokens},
        )
        if step.micro_batch is not None:
            tu.assign_non_tensor(rows, micro_batch_size_per_gpu=step.micro_batch)
        output = self.train_batch(rows)
        self.profiler.step()
        return output

    def check_policy(self, data: Any) -> TensorDict:
        """Try the engine's forward with `kondo.check`; return findings of all ranks and seconds."""
        engine, config = self.engine, self.engine_config
        VERL.check_seams(type(engine), ENGINE_SEAMS)
        ids = data["input_ids"].to(get_device_id()).unbind()
        tokens = max(map(len, ids)) * (config.micro_batch_size_per_gpu or 1)
        if config.use_dynamic_bsz:
            tokens = config.max_token_len_per_gpu * engine.ulysses_sequence_parallel_size
        # Two rows at least, in the memory of a micro-batch: of a single row, halves of two.
        masks = data["response_mask"].to(get_device_id()).unbind()
        rows = token_rows(ids, masks, max(2, tokens // 2))
        settings = {
            "temperature": tu.get(data, "temperature"),
            "use_remove_padding": self.model_config.get("use_remove_padding", False),
            "use_fused_kernels": config.use_fused_kernels,
        }
        gradients = not isinstance(engine.module, FullyShardedDataParallel)
        mode = engine.train_mode(zero_grad_on_exit=False) if gradients else engine.eval_mode()
        error, start = None, time.perf_counter()
        with mode:
            try:
                check_engine(
                    engine,
                    rows,
                    settings,
                    most=max(2, tokens // rows.input_ids.shape[1]),
                    dtype=engine._autocast_dtype,
                    gradients=gradients,
                )
            except Exception as caught:  # an error of one rank is one of all, which meet below
                error = caught
        own = error.findings if isinstance(error, kondo.CheckError) else ()
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, own)
        kinds: dict[str, str] = {}
        for text in chain.from_iterable(every):  # ranks find the same with other numbers
            kinds.setdefault(text[:32], text)
        if error is not None and not kinds:
            raise error
        found = {"findings": list(kinds.values()), "seconds": time.perf_counter() - start}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"found": found})


class KondoActorRolloutRefWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker process, with an actor that runs plans."""

    actor_worker_cls = KondoTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))  # type: ignore[untyped-decorator]
    def check_policy(self, data: Any) -> TensorDict:
        """Try the actor; see `KondoTrainingWorker.check_policy`."""
        found: TensorDict = self.actor.check_policy(data)
        return found


def _joined_metrics(outputs: list[TensorDict]) -> dict[str, Any]:
    """Return the metrics of all steps, joined as verl joins those of its mini-batches."""
    joined: dict[str, Any] = {}
    for output in outputs:
        metrics = tu.get(output, "metrics")
        for key, value in metrics.items():
            if isinstance(value, list) and isinstance(value[0], Metric):
                metrics[key] = Metric.aggregate_dp(value)
            elif isinstance(value, list):
                metrics[key] = list(chain.from_iterable(value))
        append_to_dict(joined, metrics)
    return joined
