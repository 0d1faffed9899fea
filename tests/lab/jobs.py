"""Jobs for the workers' tests, in a module of their own: a spawned process must import them."""

import os
import signal
import time

import torch


def until_stopped(seeds, *, send, stopped):
    """Tell the seeds, then wait to be stopped; ends by itself, so that a broken stop is seen."""
    send(list(seeds))
    patience = time.monotonic() + 60
    while not stopped() and time.monotonic() < patience:
        time.sleep(0.01)
    return {"seeds": list(seeds), "stopped": stopped(), "threads": torch.get_num_threads()}


def interrupts_itself(seeds, *, send, stopped):
    """Press Ctrl-C in the process that runs it."""
    before = stopped()
    os.kill(os.getpid(), signal.SIGINT)
    return before, stopped()


def fails_on_seed_two(seeds, *, send, stopped):
    """Fail where seed 2 is."""
    if 2 in seeds:
        raise ZeroDivisionError("seed two")
    return list(seeds)


def lacks_a_package(seeds, *, send, stopped):
    """Fail as a study does whose extra is not installed."""
    try:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")
    except ImportError as error:
        raise ImportError("control tasks need Gymnasium") from error


def dies(seeds, *, send, stopped):
    """End the process without a word."""
    os._exit(3)
