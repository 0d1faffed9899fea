"""Which process replaces one that died; without processes."""

import dataclasses
import time

import pytest
import ray

from actors.toys import toy
from kondo.actors.setup import Settings
from kondo.actors.worker_pool import Worker, WorkerPool


@pytest.fixture
def pool(monkeypatch):
    """Two workers with processes that never do anything, and one spare."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda handle: None)

    def start(self, index):
        self.incarnations += 1
        return Worker(index, self.incarnations, object(), object(), time.monotonic())

    monkeypatch.setattr(WorkerPool, "_start", start)
    settings = Settings(actors=2, spares=1, start_timeout=60.0, max_failures=2)
    return WorkerPool(toy(), settings, issued=0, incarnations=0)


def up(worker):
    worker.ready = None


def test_spares_wait_until_everybody_is_up(pool):
    pool.keep_spares()
    assert pool.incarnations == 2
    for worker in pool.workers:
        up(worker)
    pool.keep_spares()
    pool.keep_spares()
    assert pool.incarnations == 3
    assert pool.ready_spares == 0


def test_a_spare_that_is_up_replaces_at_once(pool):
    for worker in pool.workers:
        up(worker)
    pool.keep_spares()
    spare = next(worker for _, worker in pool.expect())
    up(spare)
    pool._replace(pool.workers[1], "actor died", "")
    assert pool.workers[1] is spare
    assert (spare.index, spare.incarnation, spare.failures) == (1, 3, 1)
    pool.keep_spares()
    assert pool.incarnations == 4  # the next spare


def test_a_spare_that_is_starting_is_nearer_than_a_new_process(pool):
    for worker in pool.workers:
        up(worker)
    pool.keep_spares()
    pool._replace(pool.workers[0], "actor died", "")
    assert pool.workers[0].incarnation == 3
    assert pool.workers[0].ready is not None
    pool.keep_spares()
    assert pool.incarnations == 3  # the next spare waits until this one is up
    up(pool.workers[0])
    pool.keep_spares()
    assert pool.incarnations == 4


def test_a_spare_that_is_up_goes_before_one_that_is_starting(pool):
    pool._settings = dataclasses.replace(pool._settings, spares=2)
    for worker in pool.workers:
        up(worker)
    for _ in range(3):  # one after the other
        pool.keep_spares()
    assert pool.incarnations == 3
    spare = next(worker for _, worker in pool.expect())
    up(spare)
    pool.keep_spares()
    assert (pool.incarnations, pool.ready_spares) == (4, 1)
    spare.since += 60  # started last, but up
    pool._replace(pool.workers[1], "actor died", "")
    pool._replace(pool.workers[0], "actor died", "")
    assert [worker.incarnation for worker in pool.workers] == [4, 3]


def test_two_that_die_at_once_are_both_replaced_by_spares(pool):
    pool._settings = dataclasses.replace(pool._settings, spares=2)
    for worker in pool.workers:
        up(worker)
    for _ in range(2):
        pool.keep_spares()
        for _, spare in list(pool.expect()):
            up(spare)
    assert pool.ready_spares == 2
    for worker in list(pool.workers):
        pool._replace(worker, "actor died", "")
    assert [(worker.incarnation, worker.ready) for worker in pool.workers] == [(3, None), (4, None)]


def test_what_does_not_start_in_time_is_replaced(pool):
    pool.workers[0].since -= 61
    pool.check_hanging(time.monotonic())
    assert [(event.kind, event.who) for event in pool.events] == [("actor hung", 0)]
    assert pool.workers[0].incarnation == 3
    assert pool.workers[1].incarnation == 2


def test_spares_that_never_start_end_the_run(pool):
    for worker in pool.workers:
        up(worker)

    def hang():
        for _ in range(3):
            pool.keep_spares()
            for _, spare in list(pool.expect()):
                spare.since -= 61
            pool.check_hanging(time.monotonic())

    with pytest.raises(RuntimeError, match="spare processes failed to start 3 times"):
        hang()
