"""The order in which the driver takes a learner's reports; without processes."""

import ray

from distributed.ray.toys import Task, make_message, toy
from kondo.distributed.ray.learner import Learner, StepOrder
from kondo.distributed.ray.messages import Order
from kondo.distributed.ray.setup import Settings
from kondo.distributed.ray.steps import Steps

SETTINGS = Settings(rate=0.25)


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


def test_reports_are_taken_in_the_order_of_their_steps(monkeypatch, tmp_path):
    learner = Learner(toy(), SETTINGS, tmp_path)
    handle = Handle(learner)

    def start(self, *, resume):
        self._handle, self._ready = handle, None

    monkeypatch.setattr(Steps, "_start", start)
    monkeypatch.setattr(ray, "get", lambda reference: handle.store[reference])
    steps = Steps(toy(), SETTINGS, tmp_path, resume=False)
    for number in (1, 2):
        order = Order(number - 1, 0, 1, 0, learner.price)
        message = make_message(learner, Task(number), SETTINGS, order)
        steps.plan(StepOrder(number, (order,), (), number, 1), [message], publish=True)
    steps.finish(StepOrder(2, (), (), 2, 1))
    steps.submit()
    later = list(handle.store)[1]
    assert steps.arrived(later) is None  # it is there, but its turn is not
    assert steps.waiting == 2
    for number in (1, 2):
        (reference,) = steps.expect()
        order, report = steps.arrived(reference)
        assert (order.number, report.step, steps.published.version) == (number,) * 3
    assert steps.waiting == 0
    assert steps.expect() == [steps._finish]  # not before the last report
