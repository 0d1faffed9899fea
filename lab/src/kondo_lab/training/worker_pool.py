"""Spread seeds over processes, one computing thread each.

    parent                              worker i (spawned)
    wait for messages      <- pipe -    job(seeds of i, send, stopped):
      progress: on_update                 send(progress) after every round
      result:   keep it                   return result
    stopped(): sets event  - event ->     stopped() turns true, the job returns what it has

The parent waits for a message from any worker; a worker waits for nothing. Seeds, not methods, are
spread: the methods that are compared stay in one process and take turns there.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event as SharedEvent
from typing import Any, Protocol, TypeVar

import torch

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

SECONDS_BETWEEN_LOOKS = 0.2
"""How long a request to stop may wait."""


class Job(Protocol[ResultT_co]):
    """Work on some seeds. Sends progress now and then; returns early once stopped() is true."""

    def __call__(
        self, seeds: Sequence[int], *, send: Callable[[Any], None], stopped: Callable[[], bool]
    ) -> ResultT_co:
        """Return the result of these seeds."""


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(*, small: bool) -> int:
    """Return the threads of torch for a study on the CPU, where OMP_NUM_THREADS says nothing.

    A small study has operations of a few microseconds, which a second thread hardly makes faster.
    Where other processes use the cores too, two threads wait for each other. Seconds of small
    studies on two busy cores with 1 and with 2 threads: reversal-kondo 50 and 261, mnist-kondo 37
    and 31, later 26 and 287, speculative 8 and 39, frontier 12 and 14. At full size the matrices
    are large enough for all cores.
    """
    return 1 if small else usable_cores()


def spread(
    job: Job[ResultT],
    seeds: Sequence[int],
    *,
    num_workers: int,
    stopped: Callable[[], bool],
    on_update: Callable[[int, Any], None],
) -> list[ResultT]:
    """Run `job` on all seeds in `num_workers` processes, or right here if it is one.

    Seeds are dealt out in turn; each worker gives one result. The job must be picklable where there
    are several. `on_update` gets the worker's number and what it sent. Once stopped() is true, the
    jobs are told to stop.

    Raises:
        RuntimeError: a worker failed; its traceback is in the message.
        ModuleNotFoundError: a worker lacks a package.
    """
    shares = [list(seeds[worker::num_workers]) for worker in range(num_workers)]
    if num_workers == 1:
        with one_thread():
            return [job(shares[0], send=lambda sent: on_update(0, sent), stopped=stopped)]
    context = multiprocessing.get_context("spawn")  # a forked torch can hang in its thread pool
    stop = context.Event()
    pipes: list[Connection] = []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        # Daemons end with this process, whatever ends it.
        context.Process(target=_work, args=(job, share, theirs, stop), daemon=True).start()
        theirs.close()  # so that a dead worker reads as the end of its pipe
        pipes.append(ours)

    def tell() -> None:
        if stopped():
            stop.set()

    return _collect(pipes, on_update, tell)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside.

    Models this small gain little from a second thread, and two threads that wait for each other
    on a busy machine were measured up to 20 times slower than one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _collect(
    pipes: Sequence[Connection],
    on_update: Callable[[int, Any], None],
    tell: Callable[[], None],
) -> list[Any]:
    """Receive until every worker has sent its result; call `tell` between messages."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        tell()
        waiting = [pipe for i, pipe in enumerate(pipes) if i not in results]
        for ready in wait(waiting, timeout=SECONDS_BETWEEN_LOOKS):
            assert isinstance(ready, Connection)
            worker = pipes.index(ready)
            try:
                kind, content = ready.recv()
            except EOFError:
                raise RuntimeError(f"worker {worker} ended without a result.") from None
            if kind == "missing":
                raise ModuleNotFoundError(f"No module named {content!r}", name=content)
            if kind == "failure":
                raise RuntimeError(f"worker {worker} failed:\n{content}")
            if kind == "result":
                results[worker] = content
            else:
                on_update(worker, content)
    return [results[worker] for worker in range(len(pipes))]


def _work(job: Job[Any], seeds: Sequence[int], pipe: Connection, stop: SharedEvent) -> None:
    """Run the job in a worker process and send what comes of it."""
    # Ctrl-C reaches every process of a terminal; here the parent's event says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        result = job(seeds, send=lambda sent: pipe.send(("progress", sent)), stopped=stop.is_set)
        pipe.send(("result", result))
    except BrokenPipeError:
        pass  # the parent has ended: there is no one to send to
    except Exception as error:
        missing = _missing_module(error)
        failure = ("failure", traceback.format_exc())
        pipe.send(failure if missing is None else ("missing", missing))


def _missing_module(error: BaseException | None) -> str | None:
    """Return the package whose absence caused an error; None if it was another error."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return None if error is None else error.name


@contextmanager
def stop_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into `stop`; a second one ends the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(signum: int, frame: Any) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()
