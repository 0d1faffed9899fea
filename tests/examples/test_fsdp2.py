"""The loop on FSDP2: two real ranks train as one does, and resume where they stopped."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.scripts import numbers, run
from tolerances import assert_close

SCRIPT = "fsdp2_torchrun.py"


def gradients(checkpoint, file):
    """Return Adam's means of gradients of a checkpoint, whole, by parameter.

    Not the weights: some gradients are 0 up to rounding (a bias of keys moves no attention), and
    Adam makes whole steps of the rounding.
    """
    dcp_to_torch_save(checkpoint, file)
    state = torch.load(file, weights_only=False)["optimizer"]["state"]
    return {name: moments["exp_avg"] for name, moments in state.items()}


# Slow, and some launches abort at their exit, after all output: threads of gloo outlive the group,
# with or without a gate.
@pytest.mark.slow
def test_two_ranks_train_as_one_does_and_resume(tmp_path):
    """Four steps on one rank; and two steps on two ranks, then two more by a resumed run."""
    run(SCRIPT, "--steps", 4, "--checkpoint", tmp_path / "one", ranks=1)
    first = run(SCRIPT, "--steps", 2, "--checkpoint", tmp_path / "two", ranks=2)
    second = run(SCRIPT, "--steps", 4, "--checkpoint", tmp_path / "two", ranks=2)
    assert numbers(first, "step") == [1, 2]
    assert numbers(second, "step") == [4]  # 1 would be printed if the run began anew
    assert numbers(second, "differentiated") == [13]
    one, two = (gradients(tmp_path / name, tmp_path / f"{name}.pt") for name in ("one", "two"))
    assert list(one) == list(two)
    for name, whole in one.items():
        assert_close(two[name], whole)
    assert max(float(whole.abs().max()) for whole in one.values()) > 1e-4
    # Each rank wrote its own shard.
    entries = dcp.FileSystemReader(tmp_path / "two").read_metadata().state_dict_metadata
    assert len(entries["model.tokens.weight"].chunks) == 2


@pytest.mark.slow
def test_it_learns():
    rewards = numbers(run(SCRIPT, ranks=2), "reward")
    assert rewards[-1] > 0.6 > 0.1 > rewards[0]
