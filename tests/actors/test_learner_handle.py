"""The order in which the driver takes a learner's reports; without processes."""

import time

import pytest
import ray

from actors.toys import Task, make_message, toy
from kondo.actors import checkpoint
from kondo.actors.learner import Learner, StepOrder
from kondo.actors.learner_handle import LearnerHandle
from kondo.actors.messages import Order
from kondo.actors.processes import LEARNER_THREADS
from kondo.actors.setup import Settings
from kondo.run_files import DamagedFileError, WriteError

SETTINGS = Settings(gate="delight:0.25")


class Handle:
    """Stands for the learner's process: works at once, and keeps what it returns by reference."""

    def __init__(self, learner):
        self._learner, self.store, self.step, self.finish = learner, {}, self, self

    def options(self, num_returns):
        return self

    def remote(self, order, *arguments):
        references = (object(), object())
        if not arguments:
            return references[0]  # of finish
        self.store[references[0]] = self._learner.step(order, arguments[0])
        return references


def planned(monkeypatch, tmp_path, number, settings=SETTINGS):
    """Return so many planned steps and the end, and the handle that stands for the process."""
    learner = Learner(toy(), settings, tmp_path)
    handle = Handle(learner)

    def start(self, *, resume):
        self._handle, self._ready, self._first, self._since = handle, None, True, time.monotonic()

    monkeypatch.setattr(LearnerHandle, "_start", start)
    monkeypatch.setattr(ray, "get", lambda reference: handle.store[reference])
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    steps = LearnerHandle(toy(), settings, tmp_path, resume=False)
    for step in range(1, number + 1):
        order = Order(step - 1, 0, 1, 0, learner.price)
        message = make_message(learner, Task(step), order)
        steps.plan(StepOrder(step, (order,), (), step, 1), [message], publish=True)
    steps.finish(StepOrder(number, (), (), number, 1))
    return steps, handle


def test_reports_are_taken_in_the_order_of_their_steps(monkeypatch, tmp_path):
    steps, handle = planned(monkeypatch, tmp_path, 2)
    steps.submit()
    later = list(handle.store)[1]
    assert steps.arrived(later) is None  # it is there, but its turn is not
    assert steps.waiting == 2
    for number in (1, 2):
        (reference,) = steps.expect()
        order, report = steps.arrived(reference)
        assert (order.number, report.step, steps.published.version) == (number,) * 3
        steps.submit()
    assert steps.waiting == 0
    assert steps.expect() == [steps._finish]  # not before the last report


def test_a_learner_has_no_more_calls_than_threads(monkeypatch, tmp_path):
    # A step waits on its thread for the steps before it, which Ray may start after it.
    steps, handle = planned(monkeypatch, tmp_path, 5)
    for number in range(1, 6):
        steps.submit()
        given = len(handle.store) - (number - 1) + (steps._finish is not None)
        assert 0 < given <= LEARNER_THREADS
        (reference,) = steps.expect()
        steps.arrived(reference)
    steps.submit()
    assert len(handle.store) == 5
    assert steps.expect() == [steps._finish]


def test_steps_that_are_replayed_are_given_out_a_few_at_a_time_too(monkeypatch, tmp_path):
    steps, handle = planned(monkeypatch, tmp_path, 5)
    for _ in range(4):
        steps.submit()
        steps.arrived(steps.expect()[0])
    monkeypatch.setattr(handle, "store", {})
    (tmp_path / "again").mkdir()
    handle._learner = Learner(toy(), SETTINGS, tmp_path / "again")
    steps._replace("learner died", "for a test")
    for _ in range(5):
        steps.submit()
        assert len(handle.store) <= 5
        steps.arrived(steps.expect()[0])
    assert len(handle.store) == 5
    assert steps.waiting == 0


def test_a_learner_that_died_after_its_checkpoint_and_before_its_report_goes_on(
    monkeypatch, tmp_path
):
    settings = Settings(gate="delight:0.25", checkpoint_every=1)
    steps, handle = planned(monkeypatch, tmp_path, 3, settings)
    monkeypatch.setattr("kondo.actors.learner_handle.LEARNER_THREADS", 1)
    steps.submit()  # the step is done and saved, and nobody reads its report
    handle._learner = Learner(toy(), settings, tmp_path, resume=True)
    steps._replace("learner died", "for a test")
    for number in (1, 2, 3):
        steps.submit()
        order, report = steps.arrived(steps.expect()[0])
        assert (order.number, report.step, steps.published.version) == (number,) * 3


def test_a_learner_that_died_is_not_started_from_a_damaged_checkpoint(monkeypatch, tmp_path):
    steps, _ = planned(monkeypatch, tmp_path, 2)
    path = tmp_path / checkpoint.FILE
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DamagedFileError, match=r"set aside as checkpoint\.pt\.damaged"):
        steps._replace("learner died", "killed")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr("kondo.actors.learner_handle.time.monotonic", lambda: now[0])
    return now


def hung(steps):
    steps.check_hanging(time.monotonic())
    return [event.kind for event in steps.events] == ["learner hung"]


def test_a_step_has_a_deadline_and_the_first_of_a_process_a_longer_one(
    monkeypatch, tmp_path, clock
):
    steps, _ = planned(monkeypatch, tmp_path, 3)
    clock[0] += 10_000  # nobody has asked it for anything
    assert not hung(steps)
    steps.submit()
    clock[0] += SETTINGS.start_timeout + SETTINGS.step_timeout
    assert not hung(steps)
    steps.arrived(steps.expect()[0])
    steps.submit()
    clock[0] += SETTINGS.step_timeout
    assert not hung(steps)
    clock[0] += 1
    assert hung(steps)


def test_the_first_step_of_a_process_may_be_late_but_not_for_ever(monkeypatch, tmp_path, clock):
    steps, _ = planned(monkeypatch, tmp_path, 1)
    steps.submit()
    clock[0] += SETTINGS.start_timeout + SETTINGS.step_timeout + 1
    assert hung(steps)


def test_the_last_checkpoint_has_a_deadline_too(monkeypatch, tmp_path, clock):
    steps, _ = planned(monkeypatch, tmp_path, 1)
    steps.submit()
    steps.arrived(steps.expect()[0])
    steps.submit()
    clock[0] += SETTINGS.step_timeout + 1
    assert hung(steps)


def test_a_run_that_is_asked_to_stop_waits_for_one_restart_and_names_the_last_checkpoint(
    monkeypatch, tmp_path, clock
):
    steps, _ = planned(monkeypatch, tmp_path, 2, Settings(gate="delight:0.25", checkpoint_every=1))
    steps.submit()
    steps.arrived(steps.expect()[0])
    steps.allow_restarts(1)
    steps._replace("learner hung", "no step for 120 s")
    with pytest.raises(RuntimeError, match=r"failed 2 times.*its last checkpoint holds step 1"):
        steps._replace("learner hung", "no step for 120 s")


@pytest.mark.parametrize("cause", [ValueError("no such gate"), WriteError("cannot write"), None])
def test_what_stops_a_successor_from_starting_is_told(monkeypatch, tmp_path, cause):
    steps, _ = planned(monkeypatch, tmp_path, 1)
    steps._ready = object()

    def get(reference):
        error = cause or MemoryError("no room now")
        raise ray.exceptions.RayTaskError("ready", "a long traceback", error).as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    if cause is None:  # another time it may start
        assert steps.arrived(steps._ready) is None
        assert steps.events[0][:3] == ("learner raised", -1, "MemoryError('no room now')")
        return
    with pytest.raises(type(cause)) as caught:
        steps.arrived(steps._ready)
    assert caught.value is cause


def test_a_full_disk_of_the_learner_is_told_without_rays_traceback(monkeypatch, tmp_path):
    steps, _ = planned(monkeypatch, tmp_path, 1)
    steps.submit()
    full = WriteError("cannot write checkpoint.pt: No space left on device.")

    def get(reference):
        raise ray.exceptions.RayTaskError("step", "a long traceback", full).as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WriteError) as caught:
        steps.arrived(*steps.expect())
    assert caught.value is full
