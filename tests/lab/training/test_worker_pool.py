import multiprocessing
import os
import signal
import threading

import pytest
import torch

from kondo_lab.training import worker_pool
from lab import jobs


def ignore(worker, sent):
    pass


def spread(job, seeds, num_workers, on_update=ignore):
    """Spread as the runner does: the first Ctrl-C asks to stop."""
    stop = threading.Event()
    with worker_pool.stop_on_interrupt(stop):
        return worker_pool.spread(
            job, seeds, num_workers=num_workers, stopped=stop.is_set, on_update=on_update
        )


def test_one_worker_runs_here_and_ctrl_c_only_asks_it_to_stop():
    handler = signal.getsignal(signal.SIGINT)
    assert spread(jobs.interrupts_itself, [4, 5], num_workers=1) == [(False, True)]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_polite_kill_asks_to_stop_like_ctrl_c():
    handler = signal.getsignal(signal.SIGTERM)
    stop = threading.Event()
    with worker_pool.stop_on_interrupt(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
        assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_ctrl_c_interrupts_at_once():
    def twice(seeds, *, send, stopped):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        spread(twice, [1], num_workers=1)


def test_several_workers_share_the_seeds_and_stop_together():
    updates = []

    def on_update(worker, sent):
        updates.append((worker, sent))
        if len(updates) == 2:  # both are at work: Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)

    assert spread(jobs.until_stopped, [7, 8, 9], 2, on_update) == [
        {"seeds": [7, 9], "stopped": True, "threads": 1},
        {"seeds": [8], "stopped": True, "threads": 1},
    ]
    assert sorted(updates) == [(0, [7, 9]), (1, [8])]


def test_a_workers_failure_comes_with_its_traceback(monkeypatch):
    # The worker's side is run here, without a process: only its messages matter.
    monkeypatch.setattr(worker_pool.signal, "signal", lambda *ignored: None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker_pool._work(jobs.fails_on_seed_two, [1, 2], theirs, threading.Event())
    with pytest.raises(RuntimeError, match=r"worker 0 failed:(.|\n)*ZeroDivisionError: seed two"):
        worker_pool._collect([ours], ignore, lambda: None)


def test_a_dead_worker_is_noticed():
    with pytest.raises(RuntimeError, match=r"worker \d ended without a result"):
        spread(jobs.dies, [1, 2], num_workers=2)


def test_one_thread_is_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with worker_pool.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_package_that_a_worker_lacks_is_named():
    with pytest.raises(ModuleNotFoundError) as caught:
        spread(jobs.lacks_a_package, [1, 2], num_workers=2)
    assert caught.value.name == "gymnasium"


def test_a_small_study_computes_on_one_thread(monkeypatch):
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 7)
    assert worker_pool.default_threads(small=True) == 1
    assert worker_pool.default_threads(small=False) == 7
