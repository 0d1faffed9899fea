"""One process of `worker_runs`: builds verl's worker, and makes the updates asked for."""

import json
import os
import sys
from pathlib import Path

import torch
import verl  # noqa: F401  it imports the CPU platform and the plugin
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from integrations.verl.tiny import make_rows, save_model
from integrations.verl.worker_runs import ROWS
from kondo.integrations.verl.first_batch import rows_to_try
from kondo.integrations.verl.update_plan import make_plan, mini_batches
from kondo.integrations.verl.worker import PLAN, KondoTrainingWorker


def build(cls, path, options):
    """Return a worker of verl's class or of ours."""
    model = HFModelConfig(
        path=path,
        use_remove_padding=options["packed"],
        enable_gradient_checkpointing=options["checkpointing"],
        override_config={"attn_implementation": "sdpa"},
        lora_rank=options["lora"],
        lora_alpha=8,
        target_modules="all-linear",
    )
    engine = FSDPEngineConfig(
        strategy=options["strategy"],
        mixed_precision={
            "param_dtype": options["dtype"],
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
        use_torch_compile=False,
        use_dynamic_bsz=options["max_tokens"] is not None,
        max_token_len_per_gpu=options["max_tokens"],
        infer_max_token_len_per_gpu=10_000,
        micro_batch_size_per_gpu=options["micro"],
        infer_micro_batch_size_per_gpu=1,
    )
    optimizer = FSDPOptimizerConfig(
        lr=options["lr"],
        optimizer=options["optimizer"],
        weight_decay=0.0 if options["optimizer"] == "SGD" else 0.1,
        clip_grad=1e9,
        total_training_steps=10,
        lr_scheduler_type=options["schedule"],
        min_lr_ratio=0.1,
    )
    worker = cls(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
        )
    )
    worker.reset()
    further = dict(options["actor"])
    if "policy_loss" in further:
        further["policy_loss"] = PolicyLossConfig(**further["policy_loss"])
    actor = FSDPActorConfig(
        strategy=options["strategy"],
        rollout_n=1,
        ppo_mini_batch_size=options["mini"],
        ppo_micro_batch_size_per_gpu=options["micro"],
        **further,
    )

    def loss(model_output, data, dp_group=None):
        return ppo_loss(config=actor, model_output=model_output, data=data, dp_group=dp_group)

    worker.set_loss_fn(loss)
    return worker


def broken(module, change):
    """Let the last hidden states, [n, S, D], go through a function."""
    (norm,) = (part for name, part in module.named_modules() if name.endswith("model.norm"))
    norm.register_forward_hook(lambda part, args, output: change(output))


def _fails(states):
    raise FloatingPointError("this rank fails")


FAULTS = {
    "rows": lambda x: x + x.mean(0, keepdim=True),
    "ahead": lambda x: x + x.mean(1, keepdim=True),
    "random": lambda x: torch.nn.functional.dropout(x, 0.3),
    "raises": _fails,
}


def state(engine):
    """Return what a check must leave alone: this rank's parts of tensors, and all else as text."""
    parameters = {
        name: (values.to_local() if hasattr(values, "to_local") else values).detach().clone()
        for name, values in engine.module.named_parameters()
    }
    optimizer = engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()
    grads = [p.grad is None for p in engine.module.parameters()]
    flags = [p.requires_grad for p in engine.module.parameters()]
    return parameters | {"draws": torch.get_rng_state()}, repr((optimizer, grads, flags))


def check(worker, options, log_probs):
    """Try the worker as the trainer does; return what it said, whether all ranks ran alike, and
    whether it left everything as it was."""
    engine, ranks = worker.engine, worker.engine.get_data_parallel_size()
    data, calls = rows_of(options, log_probs), []
    sizes = data["input_ids"].offsets().diff().tolist()
    mask = data["response_mask"].to_padded_tensor(0).bool()
    chosen = rows_to_try(mask, sizes, ranks)
    part = len(chosen) // ranks
    own = chosen[engine.get_data_parallel_rank() * part :][:part]
    data = tu.index_select_tensor_dict(data, own)
    tu.assign_non_tensor(data, temperature=1.0)
    hook = engine.module.register_forward_pre_hook(lambda module, args: calls.append(1))
    before, before_text = state(engine)
    found = tu.get(worker.check_policy(data), "found")
    after, after_text = state(engine)
    hook.remove()
    same = before_text == after_text and all(before[n].equal(after[n]) for n in before)
    every = [None] * ranks
    torch.distributed.all_gather_object(every, (len(calls), same, found["findings"]))
    return found | {"ranks": every}


def full(tensor):
    """Return a copy of a sharded or whole tensor."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def trained(module):
    """Return the parameters that an optimizer moves, by name."""
    return [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]


def rows_of(options, log_probs):
    """Return the batch of all ranks, with old and reference log-probs near the policy's."""
    rows = make_rows(ROWS)
    for name, noise in (("old_log_probs", "noise"), ("ref_log_prob", "ref_noise")):
        values = [p + n for p, n in zip(log_probs, rows[noise].unbind(), strict=True)]
        rows[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        del rows[noise]
    for name, factors in (
        ("advantages", options["advantages"]),
        ("response_mask", options["mask_rows"]),
    ):
        if factors is not None:
            values = [v * f for v, f in zip(rows[name].unbind(), factors, strict=True)]
            rows[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return rows


def policy_log_probs(path):
    """Return log-probs of the responses by the model itself, computed without verl."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows, found = make_rows(ROWS), []
    for ids, response in zip(rows["input_ids"].unbind(), rows["responses"].unbind(), strict=True):
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
        every = logits[:-1].gather(1, ids[1:, None]).squeeze(1)
        found.append(every[-response.numel() :])
    return found


def plan_of(options, rows, ranks):
    """Return the plan that the trainer would make."""
    if options["keep"] is None:
        return None
    keep = torch.zeros(ROWS, dtype=torch.bool)
    keep[options["keep"]] = True
    weights = torch.ones(ROWS)
    if options["weights"] is not None:
        weights[options["keep"]] = torch.tensor(options["weights"])
    epochs = mini_batches(
        ROWS,
        size=options["mini"],
        ranks=ranks,
        epochs=options["epochs"],
        seed=42 if options["shuffle"] else None,
    )
    return make_plan(
        keep,
        weights,
        rows["input_ids"].offsets().diff().tolist(),
        [int(row.sum()) for row in rows["loss_mask"].unbind()],
        epochs,
        ranks=ranks,
        micro_batch=None if options["max_tokens"] else options["micro"],
    )


def update(worker, options, log_probs, number):
    """Make one update as the trainer would, and return verl's metrics; None if it is left out."""
    options = options | {
        one: options[several][number]
        for one, several in (("keep", "keeps"), ("advantages", "factors"))
        if options[several] is not None
    }
    rank, ranks = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    rows = rows_of(options, log_probs)
    plan = plan_of(options, rows, ranks)
    if plan is not None and not plan.steps:
        return None
    if plan is None:
        part = ROWS // ranks
        own = list(range(rank * part, (rank + 1) * part))
    else:
        own = plan.ranks[rank]
    data = tu.index_select_tensor_dict(rows, own)
    tu.assign_non_tensor(
        data,
        calculate_entropy=bool(options["actor"].get("entropy_coeff")),
        global_batch_size=options["mini"],
        mini_batch_size=options["mini"],
        epochs=options["epochs"],
        seed=42,
        dataloader_kwargs={"shuffle": options["shuffle"]},
        temperature=1.0,
    )
    if plan is not None:
        tu.assign_non_tensor_data(data, PLAN, {"steps": plan.steps})
    return tu.get(worker.train_mini_batch(data), "metrics")


def run(path, options, log_probs):
    """Return what one run did."""
    cls = {"kondo": KondoTrainingWorker, "verl": TrainingWorker}[options["worker"]]
    torch.manual_seed(0)  # of adapters
    worker = build(cls, path, options)
    gradients, engine = [], worker.engine
    last = engine.get_data_parallel_rank() == engine.get_data_parallel_size() - 1
    # Inside of a forward with collectives, ranks would wait for one that raises alone.
    if options["fault"] and (last or options["fault"] == "raises"):
        broken(engine.module, FAULTS[options["fault"]])
    checked = check(worker, options, log_probs) if options["check"] else None
    step = engine.optimizer_step

    def recorded():
        gradients.append({n: full(p.grad) for n, p in trained(engine.module)})
        return step()

    engine.optimizer_step = recorded
    metrics = [update(worker, options, log_probs, n) for n in range(options["updates"])]
    return {
        "checked": checked,
        "gradients": gradients,
        "weights": {n: full(p) for n, p in trained(engine.module)},
        "metrics": [None if m is None else {k: str(v) for k, v in m.items()} for m in metrics],
        "lr": engine.lr_scheduler.get_last_lr()[0],
        "steps": int(engine.lr_scheduler.last_epoch),
    }


def main():
    """Read the runs from the folder, make them, and have rank 0 write the results there."""
    folder = Path(sys.argv[1])
    runs = json.loads((folder / "runs.json").read_text())
    rank = int(os.environ["RANK"])
    path = str(folder / f"model{rank}")
    save_model(path)
    log_probs = policy_log_probs(path)
    results = {name: run(path, options, log_probs) for name, options in runs.items()}
    if rank == 0:
        torch.save(results, folder / "results.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
