"""Run by test_processes.py: python two_processes.py FOLDER, with MASTER_ADDR and MASTER_PORT set.

Two processes train every scenario; each leaves what happened in FOLDER/<scenario>.<rank>.pt.
"""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kondo.lm
from integrations.trl.processes import fork_two
from integrations.trl.recording import RAW, Recorder, number_rows
from integrations.trl.tiny import move_reference, policy, reward, trainer
from integrations.trl.versions import share_of

torch.set_num_threads(1)
COPIED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
    *RAW.values(),
)


class Setter:
    """Just enough of pytest's monkeypatch."""

    setattr = staticmethod(setattr)


def rows_of(*kept):
    """A gate that keeps these rows of all 16: each call the next entry, over and over."""
    calls = iter(range(100))

    def gate(values, mask, generator=None):
        chosen = torch.zeros(16, dtype=torch.bool)
        chosen[list(kept[next(calls) % len(kept)])] = True
        keep = chosen & mask if mask.ndim == 1 else chosen.unsqueeze(1) & mask
        return kondo.Choice.of(keep, mask)

    return gate


FAULT = "fault"

# Process 0 has rows 0 to 7, process 1 rows 8 to 15.
SCENARIOS = {
    "unbiased": ({"kondo_gate": "unbiased:0.3"}, None),
    "unbiased_kl": ({"kondo_gate": "noise:1.5", "beta": 0.3}, None),
    "unbiased_tokens": ({"kondo_gate": "unbiased:0.2", "kondo_unit": "token"}, None),
    "delight": ({"kondo_gate": "delight:0.3"}, None),
    "variance": ({"kondo_gate": "variance:0.3"}, None),
    "budget": ({"kondo_unit": "token"}, kondo.lm.BudgetGate(budget=0.3)),
    "token": (
        {"kondo_gate": "delight:0.1", "kondo_unit": "token", "loss_type": "grpo"},
        None,
    ),
    "only_one_process": ({"loss_type": "grpo"}, rows_of([0, 1, 2, 3, 4, 5, 6], [9])),
    "one_row_or_none": ({"loss_type": "dr_grpo"}, rows_of([15], [], [3])),
    "unequal": ({"loss_type": "bnpo"}, rows_of([0, *range(8, 16)])),
    "entropy": (
        {"entropy_coef": 0.1, "kondo_gate": "delight:0.3", "max_completion_length": 12},
        None,
    ),
    "two_steps_per_batch": ({"steps_per_generation": 4, "kondo_gate": "unbiased:0.1"}, None),
    "reused": ({"num_iterations": 2, "max_steps": 4}, rows_of([2, 8, 9, 10, 11], [0, 1])),
    "corrected": (
        {"num_iterations": 2, "max_steps": 4, "kondo_correction": "sequence"},
        rows_of([2, 8, 9, 10, 11], [0, 1]),
    ),
    "checked": ({"kondo_gate": "unbiased:0.3", "kondo_check": True}, None),
    "checked_single_tokens": (
        {
            "kondo_check": True,
            "max_completion_length": 1,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
        },
        rows_of([0, 3, 12]),
    ),
    "half_empty": (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        rows_of([0], [], [], [9, 10]),
    ),
}


def run(name, folder, outputs):
    options, gate = SCENARIOS[name]
    outputs.clear()
    model, calls = policy(), [0]
    if "beta" in options:  # TRL loads the reference from where the policy came from
        model.config._name_or_path = os.path.join(folder, "model")

    def count(module, args, kwargs):
        calls[0] += torch.is_grad_enabled() and not kwargs.get("use_cache")

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    settings = {"kondo_gate": "unbiased:0.3", "max_grad_norm": 0.0, "weight_decay": 0.1}
    settings |= {"kondo_check": False} | options
    gated = trainer(Path(folder) / f"out.{name}", model=model, reward_funcs=reward, **settings)
    if gate is not None:
        gated.gate = gate
    if gated.beta:
        move_reference(gated)
    recorder = Recorder(gated)
    gated.train()
    keep = ("row_id", "kondo_keep", "kondo_weight", "generation", "micro_tokens")
    steps = [
        {
            "before": step["before"],
            "grads": step["grads"],
            "slices": [{name: part[name] for name in keep} for part in step["slices"]],
        }
        for step in recorder.steps
    ]
    result = {
        "steps": steps,
        "raw": [{k: v for k, v in raw.items() if k in COPIED} for raw in outputs],
        "calls": calls[0],
        "empty_steps": gated.empty_steps,
        "parameters": {k: v.clone() for k, v in model.state_dict().items()},
        "logs": [log for log in gated.state.log_history if "loss" in log],
        "kind": gated.args.loss_type,
        "beta": gated.beta,
        "entropy_coef": gated.args.entropy_coef,
        "cap": None if gated.args.kondo_correction == "none" else gated.args.kondo_correction_cap,
        "share": share_of(gated.args),
        "distributed_type": gated.accelerator.distributed_type.value,
    }
    torch.save(result, Path(folder) / f"{name}.{os.environ['RANK']}.pt")


def run_with_a_fault(folder, rank):
    """The policy of process 1 mixes rows; what each process raises."""
    model = policy()
    if rank:
        model.model.norm.register_forward_hook(lambda module, args, output: output + output.mean(0))
    gated = trainer(Path(folder) / "out.fault", model=model, kondo_gate="unbiased:0.3")
    result = {"error": None}
    try:
        gated.train()
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error)}
    result["steps"] = gated.state.global_step
    torch.save(result, Path(folder) / f"{FAULT}.{rank}.pt")


def run_all(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    outputs = number_rows(Setter)
    gc.freeze()  # trainers collect garbage when they start
    for name in SCENARIOS:
        run(name, folder, outputs)
    run_with_a_fault(folder, rank)


if __name__ == "__main__":
    policy().save_pretrained(os.path.join(sys.argv[1], "model"))
    fork_two(run_all, sys.argv[1], timeout=200)
