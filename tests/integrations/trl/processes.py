"""Two processes of a script: started by a test, and forked by the script itself."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys

import torch


def results_of(script, scenarios, folder, *, timeout):
    """Run `python SCRIPT FOLDER`; return scenario -> what each process left.

    A hang is a failure.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=os.environ | shared,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
        for name in scenarios
    }


def fork_two(run, folder, *, timeout):
    """Run `run(rank, folder)` in two processes, and exit; with an error unless both ended well.

    What takes longest is importing: done once by the script, before there are threads.
    """
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=run, args=(rank, folder)) for rank in range(2)]
    for worker in workers:
        worker.start()
    multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=timeout)
    # One has ended: the other needs no more than a moment, or waits for it in vain.
    for worker in workers:
        worker.join(timeout=20)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    sys.exit(0 if codes == [0, 0] else f"exit codes {codes}")
