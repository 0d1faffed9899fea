"""The loops on Accelerate and Lightning Fabric, on two real processes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import random_steps
from tolerances import assert_close
from torch_exit import run_to_the_end

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"accelerate": "accelerate_ddp", "fabric": "fabric_ddp"}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
KEPT = 6

frameworks = pytest.mark.parametrize(
    "framework",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
            ),
        )
        for name, package in PACKAGES.items()
    ],
)


def launch(framework, script, *arguments):
    """Run a script on two processes; return what it printed."""
    command = [sys.executable, script, *map(str, arguments)]
    if framework == "accelerate":  # a port of its own, so that runs do not meet
        torchrun = "torch.distributed.run --standalone --nproc_per_node 2"
        command[1:1] = ["-m", *torchrun.split()]

    def run():
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return done, done.stderr

    done = run_to_the_end(run)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_hand(example, steps):
    """Train on all rows in one process, without kondo: the loss of every row, masked."""
    model = example.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    empty = 0
    for number in range(steps):
        contexts, right, noise = example.own_rows(number, 0, 1)
        log_probs = model(contexts).log_softmax(-1)
        actions = (log_probs.detach() + noise).argmax(-1)
        rewards = (actions == right).float()
        advantages = rewards - rewards.mean()
        if not advantages.any():
            empty += 1
            continue
        log_probs = log_probs.gather(1, actions[:, None]).squeeze(1)
        keep = torch.zeros(len(rewards), dtype=torch.bool)
        keep[(-log_probs.detach() * advantages).topk(KEPT).indices] = True
        optimizer.zero_grad()
        torch.where(keep, -advantages * log_probs, 0.0).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), empty


@frameworks
def test_two_processes_train_as_one_does(framework, tmp_path):
    script = EXAMPLES / f"{SCRIPTS[framework]}.py"
    two = ["--processes", 2] if framework == "fabric" else []
    printed = launch(framework, script, "--steps", 120, "--save", tmp_path, *two)
    first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    expected, empty = by_hand(random_steps.load(SCRIPTS[framework]), 120)
    assert empty > 0
    assert_close(first, expected)
    rewards = [float(found) for found in re.findall(r"^step.*?reward ([\d.]+)", printed, re.M)]
    assert rewards[-1] > 0.9 > 0.2 > rewards[0]
    assert f"; {empty} steps were empty; weights equal on all 2 processes: True" in printed


@pytest.mark.slow
@frameworks
def test_a_hundred_hard_selections_neither_hang_nor_differ(framework, tmp_path):
    launch(framework, random_steps.__file__, framework, tmp_path, 100)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["counts"] == second["counts"] == first["alone"]
    assert 10 < sum(empty for _, empty, _ in first["counts"]) < 90
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["expected"], second["expected"])
    assert_close(first["weights"], first["expected"], torch.float32)
