"""On a GPU steps are replayed from CUDA graphs; what they compute must not change."""

import pytest
import torch

from kondo_lab.training import cuda_graphs
from kondo_lab.training.arms import Arm
from kondo_lab.training.cuda_graphs import Captured
from lab.training import toys
from tolerances import assert_close

PROGRAMS = {"bandit": toys.bandit_program, "sequences": toys.sequence_program}
ARMS = {"bandit": toys.ARMS | toys.BANDIT_ARMS, "sequences": toys.ARMS}
STEPS = 10


def is_captured(program):
    return program._graph is not None


def test_a_captured_function_works_once_per_call(device):
    total = torch.zeros((), dtype=torch.int64, device=device)
    program = Captured(lambda: total.add_(1), device)
    for calls in range(1, 8):
        program()
        assert int(total) == calls
        captured = device.type == "cuda" and calls > cuda_graphs.EAGER_CALLS
        assert is_captured(program) is captured


def test_a_captured_function_reads_what_was_written_in_between(device):
    source = torch.zeros(3, device=device)
    target = torch.zeros(3, device=device)
    program = Captured(lambda: target.copy_(2 * source), device)
    for value in range(8):
        source.fill_(value)
        program()
        assert target.tolist() == [2.0 * value] * 3


@pytest.mark.parametrize("kind", PROGRAMS)
def test_steps_on_a_device_are_those_on_the_cpu(kind, device):
    members = [toys.member(arm, series=name) for name, arm in ARMS[kind].items()]
    here = toys.population(PROGRAMS[kind](), members)
    there = toys.population(PROGRAMS[kind](device), members, device=device)
    # Devices round logarithms differently, and with them the initial normals.
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)
        value.copy_(here.parameters[name])
    for _ in range(STEPS):
        here.step()
        there.step()
        assert there.read_backward() == here.read_backward()
    errors = [torch.tensor(population.read()["online error"]) for population in (there, here)]
    assert_close(*errors)
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)
    on_gpu = device.type == "cuda"
    assert is_captured(there._begin) is on_gpu
    for group in there.groups:
        assert any(is_captured(program) for program in group._programs.values()) is on_gpu


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_step_of_known_sizes_is_one_program(kind, device):
    members = [toys.member(toys.ARMS[name], series=name) for name in ("PG", "DG", "PPO", "top")]
    here = toys.population(PROGRAMS[kind](), members)
    there = toys.population(PROGRAMS[kind](device), members, device=device)
    for name, value in there.parameters.items():
        value.copy_(here.parameters[name])
    for _ in range(STEPS):
        here.step()
        there.step()
    assert is_captured(there._begin) is (device.type == "cuda")
    assert not any(group._programs for group in there.groups)
    assert there.read_backward() == here.read_backward()
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)


def test_new_sizes_after_the_recording_train_on_the_newest_rows(device):
    # A price that falls late: sizes never seen before run eagerly beside a replayed rollout.
    members = [toys.member(Arm(gate=toys.MovingPrice()), seed=seed) for seed in range(3)]
    here = toys.population(toys.bandit_program(), members)
    there = toys.population(toys.bandit_program(device), members, device=device)
    for name, value in there.parameters.items():
        value.copy_(here.parameters[name])
    for step in range(12):
        for population in (here, there):
            (group,) = population.groups
            group.rules[0].gate.price.fill_(0.0 if step < 6 else -0.5 * (step - 5))
            population.step()
        assert there.read_backward() == here.read_backward()
    assert len(there.groups[0]._programs) > 1
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)
