"""Run by test_async_processes.py: python async_processes.py FOLDER; see two_processes.py.

Two processes train every scenario; each leaves what happened in FOLDER/<scenario>.<rank>.pt.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kondo
from integrations.trl.async_tiny import samples, trainer, use_cpu
from integrations.trl.processes import fork_two
from integrations.trl.recording import AsyncRecorder
from integrations.trl.tiny import policy
from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig, KondoAsyncGRPOTrainer

torch.set_num_threads(1)

# Gate, and micro-batches -> rows that are kept, each call the next entry, over and over.
SCENARIOS = {
    "unbiased": None,
    "none_at_all": [[]],
    "one_or_none": [[3], [], [], [], [0, 5], []],
    "all_of_one_group": [[0, 1, 2, 3], [7]],
    "checked": None,
}


class Setter:
    """Just enough of pytest's monkeypatch."""

    setattr = staticmethod(setattr)


def rows_of(kept):
    calls = iter(range(100))

    def gate(values, mask, generator=None):
        keep = torch.zeros_like(mask)
        keep[kept[next(calls) % len(kept)]] = True
        return kondo.Choice.of(keep & mask, mask)

    return gate


def run(name, folder, rank):
    options = {"kondo_gate": "unbiased:0.3", "max_steps": 3, "weight_decay": 0.1}
    options |= {"per_device_train_batch_size": 4, "kondo_check": name == "checked"}
    given = samples(96)
    trained = trainer(
        folder, KondoAsyncGRPOTrainer, KondoAsyncGRPOConfig, given, out=f"{name}.out", **options
    )
    if SCENARIOS[name] is not None:
        trained.gate = rows_of(SCENARIOS[name])
    recorder = AsyncRecorder(trained)
    trained.train()
    numbers = {sample.input_ids.tobytes(): number for number, sample in enumerate(given)}
    result = {
        "steps": recorder.steps,
        # Samples by their number, which the test makes anew.
        "micros": [
            [(numbers[sample["input_ids"].tobytes()], weight) for sample, weight in micro]
            for micro in recorder.micros
        ],
        "calls": recorder.calls,
        "empty_steps": trained.empty_steps,
        "parameters": trained.accelerator.unwrap_model(trained.model).state_dict(),
        "distributed_type": trained.accelerator.distributed_type.value,
    }
    torch.save(result, folder / f"{name}.{rank}.pt")


def run_all(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    use_cpu(Setter)
    for name in SCENARIOS:
        run(name, folder, rank)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    policy().save_pretrained(place / "model")
    fork_two(run_all, place, timeout=150)
