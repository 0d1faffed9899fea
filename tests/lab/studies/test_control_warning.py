"""The warning for gates by delight, on the tasks that it was set on (CartPole) and judged on."""

import warnings
from dataclasses import replace

import pytest

import kondo
from kondo_lab.studies.control.settings import ACROBOT, CARTPOLE, PENDULUM
from kondo_lab.studies.control.training import Run


def named(task, gate, iterations):
    """Train; return the iteration in which the gate was named, and the message."""
    training = replace(task.training, iterations=iterations)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for progress in Run(training, lambda generator: gate, seed=0).train():
            said = [str(each.message) for each in caught]
            found = [text for text in said if "which keeps the highest delight" in text]
            if found:
                return progress.iteration, found[0]
    return None, ""


def test_the_gate_that_fails_on_cartpole_is_named_before_iteration_40():
    iteration, said = named(CARTPOLE, kondo.Gate(rate=0.1), 39)
    assert iteration is not None
    assert "entropy stayed at 0.67 nats, where it began" in said


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.03])
@pytest.mark.parametrize(
    ("task", "why"), [(ACROBOT, "entropy stayed"), (PENDULUM, "entropy rose")], ids=["acro", "pend"]
)
def test_gates_that_fail_are_named(task, why, rate):
    assert named(task, kondo.Gate(rate=rate), 60)[1].startswith(why)


@pytest.mark.slow
@pytest.mark.parametrize("task", [CARTPOLE, ACROBOT, PENDULUM], ids=lambda task: task.name)
def test_a_gate_that_learns_is_not_named(task):
    assert named(task, kondo.Gate(price=0.0), 40) == (None, "")
