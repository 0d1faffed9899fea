"""Commands of several processes, run again where torch aborts after all work is done."""

from collections.abc import Callable
from typing import TypeVar

_Done = TypeVar("_Done")

# torch 2.13: threads of gloo and DDP now and then outlive the interpreter of a process that is
# already at its end, on a busy machine. It happens in plain DDP programs too.
_ABORT = "terminate called without an active exception"


def run_to_the_end(run: Callable[[], tuple[_Done, str]], tries: int = 3) -> _Done:
    """Return what a command returned, of the first run in which no process aborted at its exit.

    Args:
        run: returns what it has, and what the command printed as errors.
        tries: most runs.
    """
    for _ in range(tries - 1):
        done, errors = run()
        if _ABORT not in errors:
            return done
    return run()[0]
