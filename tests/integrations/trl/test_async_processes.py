"""The asynchronous trainer on two real processes, whatever the gate keeps."""

from pathlib import Path

import pytest
import torch

from integrations.trl.async_processes import SCENARIOS
from integrations.trl.async_tiny import samples
from integrations.trl.processes import results_of
from integrations.trl.tiny import policy
from oracles.async_grpo import loss
from tolerances import assert_close

SCRIPT = Path(__file__).with_name("async_processes.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each process saw in each scenario; a hang is a failure."""
    folder = tmp_path_factory.mktemp("two")
    return results_of(SCRIPT, SCENARIOS, folder, timeout=200)


@pytest.mark.parametrize("name", SCENARIOS)
def test_processes_make_the_same_calls_and_agree(runs, name):
    first, second = runs[name]
    assert first["distributed_type"] == "MULTI_CPU"
    tried = 16 if name == "checked" else 0  # where the gate decides
    assert first["calls"] - tried == second["calls"] == 6  # every micro-batch, on every process
    assert first["empty_steps"] == second["empty_steps"]
    assert second["micros"] == []  # the main process decides
    for key, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][key])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_gradient_is_that_of_all_samples_together(runs, name):
    first, second = runs[name]
    given = [
        {k: getattr(s, k) for k in ("input_ids", "completion_mask", "old_log_probs", "advantage")}
        for s in samples(96)
    ]
    model, empty = policy(), 0
    for number, (before, grads) in enumerate(first["steps"]):
        micros = [
            [(given[row], weight) for row, weight in micro]
            for micro in first["micros"][2 * number : 2 * number + 2]
        ]
        assert [len(micro) for micro in micros] == [8, 8]
        model.load_state_dict(before, strict=False)
        names, values = zip(*model.named_parameters(), strict=True)
        expected = torch.autograd.grad(loss(model, micros), values)
        for parameter, gradient in zip(names, expected, strict=True):
            assert_close(grads[parameter], gradient)
            assert_close(second["steps"][number][1][parameter], gradient)
        if not any(weight for micro in micros for _, weight in micro):
            empty += 1
            after = [*(step[0] for step in first["steps"]), first["parameters"]][number + 1]
            assert all(torch.equal(before[parameter], after[parameter]) for parameter in names)
    assert empty == first["empty_steps"] == {"unbiased": 0, "none_at_all": 3}.get(name, empty)


def test_the_check_of_the_first_batch_changes_nothing(runs):
    for checked, plain in zip(runs["checked"], runs["unbiased"], strict=True):
        for key, value in checked["parameters"].items():
            assert torch.equal(value, plain["parameters"][key])
