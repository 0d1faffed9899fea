"""Commands of several processes, run again where torch aborts after all work is done."""

from collections.abc import Callable
from typing import TypeVar

_Done = TypeVar("_Done")

# Seen with torch 2.13 on a busy machine, of processes in DDP over gloo that had printed all they
# have to. The cause is not known; steps of 0.2 end like that too.
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
