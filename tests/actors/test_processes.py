"""The learner's process without Ray: calls on several threads, steps in one order."""

import threading

import pytest
import ray
import torch

from actors.toys import Task, make_message, toy
from kondo.actors import checkpoint, processes
from kondo.actors.learner import StepOrder, Undelivered
from kondo.actors.messages import Order
from kondo.actors.processes import LearnerProcess
from kondo.actors.setup import Settings
from kondo.run_files import FolderInUseError, locked

SETTINGS = Settings(gate="delight:0.25")


@pytest.fixture
def process(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_fetch", lambda messages: messages)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return started(tmp_path)


def started(folder):
    process = LearnerProcess(toy(), SETTINGS, str(folder), False)
    assert process.ready().step == 0
    return process


def call(process, number):
    """Return the arguments of step `number`: a rollout with the first weights."""
    order = Order(number - 1, 0, 1, 0, process._learner.price)
    message = make_message(process._learner, Task(number), order)
    return StepOrder(number, (order,), (), number, 1), [message], True


def on_thread(work, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(work(*arguments)), daemon=True)
    thread.start()
    return thread, found


def test_a_step_that_comes_early_waits_for_its_turn(process):
    first, second = call(process, 1), call(process, 2)
    late = on_thread(process.step, *second)
    end = on_thread(process.finish, StepOrder(2, (), (), 2, 1))
    late[0].join(0.2)
    assert late[0].is_alive()
    assert process._learner.step_number == 0
    report, publication = process.step(*first)
    assert (report.step, publication.version) == (1, 1)
    for thread, _ in (late, end):
        thread.join(30)
    assert (late[1][0][0].step, late[1][0][1].version) == (2, 2)
    assert end[1][0].step == 2
    assert end[1][0].balanced


def test_threads_change_nothing_of_what_is_learned(process, tmp_path):
    calls = [call(process, number) for number in range(1, 7)]
    folder = tmp_path / "one"
    folder.mkdir()
    alone = started(folder)
    for one in calls:
        alone.step(*one)
    running = [on_thread(process.step, *one) for one in reversed(calls)]
    for thread, _ in running:
        thread.join(30)
    assert [found[0][0].step for _, found in running] == [6, 5, 4, 3, 2, 1]
    pair = [each._learner.policy.weight for each in (process, alone)]
    assert torch.equal(*pair)
    assert process._learner.ledger.counts() == alone._learner.ledger.counts()


def test_a_step_that_was_taken_is_refused_and_does_not_hang(process):
    first = call(process, 1)
    process.step(*first)
    with pytest.raises(ValueError, match="number must be 2, got 1"):
        process.step(*first)


def test_all_messages_of_a_step_are_waited_for_together(monkeypatch):
    """Else a step of many lost messages would be taken for a learner that hangs."""
    clock = [0.0]

    def get(reference, timeout):
        if reference == "there":
            return "content"
        clock[0] += timeout
        raise ray.exceptions.GetTimeoutError("not there")

    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray, "get", get)
    found = processes._fetch(["there", *["away"] * 5, "there"])
    assert (found[0], found[-1]) == ("content", "content")
    assert [type(one) for one in found[1:-1]] == [Undelivered] * 5
    assert clock[0] == processes._FETCH_SECONDS < SETTINGS.step_timeout


def test_a_learner_waits_until_the_one_before_has_let_go_of_the_folder(tmp_path, monkeypatch):
    """The learner of a killed driver lives for seconds, and may write a checkpoint in them."""
    path = tmp_path / processes.LEARNER_LOCK
    with locked(path, tmp_path):
        thread, found = on_thread(started, tmp_path)
        thread.join(0.5)
        assert thread.is_alive()
        assert not (tmp_path / checkpoint.FILE).exists()
    thread.join(30)
    assert found[0]._learner.step_number == 0
    second = LearnerProcess(
        toy(), Settings(gate="delight:0.25", start_timeout=0.5), str(tmp_path), True
    )
    with pytest.raises(FolderInUseError, match="is in use by another run, process"):
        second.ready()


def test_idle_time_is_that_between_two_steps(process):
    reports = [process.step(*call(process, number))[0] for number in (1, 2, 3)]
    assert reports[0].idle_seconds == 0
    summary = process.finish(StepOrder(3, (), (), 3, 1))
    assert summary.idle_seconds == sum(report.idle_seconds for report in reports) > 0
    assert summary.busy_seconds == sum(report.seconds for report in reports) > 0
