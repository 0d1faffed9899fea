"""Updates of verl's real actor worker on the CPU, in 1 or 2 processes: FSDP2 over gloo.

A run is a dict of options; each starts from the same weights. `run_all` starts the processes and
returns, per run, the gradient of every optimizer step, the final weights and what verl reported.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
ROWS = 8
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "integrations.verl.on_cpu",
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DEFAULTS = {
    "worker": "kondo",  # or "verl"
    "keep": None,  # rows; None: no plan, all of them
    "weights": None,  # of kept rows
    "advantages": None,  # factor of each row's advantage
    "mask_rows": None,  # rows of which verl's loss sees tokens; None: all
    "mini": ROWS,
    "micro": 2,
    "epochs": 1,
    "shuffle": False,
    "max_tokens": None,  # dynamic batches of this many tokens
    "optimizer": "SGD",
    "lr": 0.02,
    "schedule": "cosine",
    "actor": {},  # further options of verl's actor
    "updates": 1,
    "keeps": None,  # `keep` of each update
    "factors": None,  # `advantages` of each update
    "lora": 0,  # rank of adapters
    "strategy": "fsdp2",
    "packed": False,  # verl's use_remove_padding
    "dtype": "fp32",  # that the engine computes in
    "checkpointing": False,  # of activations
    "check": False,  # whether `kondo.check` runs before the first update
    "fault": None,  # of `worker_process.FAULTS`, planted on the last rank
}


def environment():
    """Return the variables of a process in which verl runs on the CPU."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    return os.environ | ENVIRONMENT | {"PYTHONPATH": paths}


def run_all(runs, folder, *, processes=1, timeout=240):
    """Run all of `runs` (name -> options) in fresh processes; return name -> result."""
    folder = Path(folder)
    (folder / "runs.json").write_text(json.dumps({n: DEFAULTS | o for n, o in runs.items()}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WG_BACKEND": "ray",
        }
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115
        started.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "worker_process.py"), str(folder)],
                env=environment() | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        codes = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join((folder / f"rank{r}.log").read_text()[-3000:] for r in range(processes))
    assert codes == [0] * processes, logs
    return torch.load(folder / "results.pt", weights_only=False)
