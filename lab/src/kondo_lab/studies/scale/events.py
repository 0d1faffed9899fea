"""Simulated time: a clock that makes calls in order, and a resource that its jobs share.

    clock.after(seconds, call)          call once that much simulated time has passed
    shared.serve(work, then)            n jobs at once, each at rate min(1, capacity / n)

Cores under an operating system and a link under fair flows are both such a resource. Jobs all
progress at the same rate, so one number, the work done per job since the start, says when each
ends: when that number has grown by its work. Nothing is scanned, whatever the number of jobs.
"""

import heapq
import itertools
import math
from collections.abc import Callable

Call = Callable[[], None]


class Clock:
    """Makes calls in the order of their times; those of the same time in the order given.

    Example:
        >>> from kondo_lab.studies.scale.events import Clock
        >>> clock, heard = Clock(), []
        >>> clock.after(2.0, lambda: heard.append(clock.now))
        >>> clock.after(1.0, lambda: heard.append(clock.now))
        >>> clock.run(until=lambda: False)
        >>> heard
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._number = itertools.count()

    def after(self, seconds: float, call: Call) -> None:
        """Make the call that much later."""
        if not seconds >= 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}; time does not run backwards.")
        heapq.heappush(self._calls, (self.now + seconds, next(self._number), call))

    def run(self, *, until: Callable[[], bool]) -> None:
        """Make calls until there are none, or `until` is true."""
        while self._calls and not until():
            self.now, _, call = heapq.heappop(self._calls)
            call()


class Shared:
    """A resource whose n jobs each progress at rate min(1, capacity / n).

    Args:
        clock: whose time it takes.
        capacity: jobs it serves at full rate; infinite for a resource that is not shared.

    Example:
        >>> from kondo_lab.studies.scale.events import Clock, Shared
        >>> clock, ended = Clock(), []
        >>> core = Shared(clock, 1)
        >>> core.serve(1.0, lambda: ended.append(clock.now))
        >>> core.serve(2.0, lambda: ended.append(clock.now))
        >>> clock.run(until=lambda: False)
        >>> ended
        [2.0, 3.0]
    """

    def __init__(self, clock: Clock, capacity: float):
        if not capacity > 0:
            raise ValueError(f"capacity must be positive, got {capacity}.")
        self._clock, self._capacity = clock, capacity
        self._jobs: list[tuple[float, int, Call]] = []
        """By the work done per job at which each ends."""
        self._number = itertools.count()
        self._done = 0.0
        """Work done per job since the start."""
        self._since = 0.0
        self._wake_ups = 0

    def serve(self, work: float, then: Call) -> None:
        """Do the work, then make the call."""
        if not work >= 0:
            raise ValueError(f"work must be >= 0 seconds, got {work}.")
        if math.isinf(self._capacity):
            self._clock.after(work, then)
            return
        self._progress()
        heapq.heappush(self._jobs, (self._done + work, next(self._number), then))
        self._set_alarm()

    def _rate(self) -> float:
        return min(1.0, self._capacity / len(self._jobs))

    def _progress(self) -> None:
        if self._jobs:
            self._done += self._rate() * (self._clock.now - self._since)
        self._since = self._clock.now

    def _set_alarm(self) -> None:
        """Be called when the next job ends, unless the number of jobs changes before."""
        self._wake_ups += 1
        if self._jobs:
            alarm = self._wake_ups
            left = max(0.0, self._jobs[0][0] - self._done)  # rounding may have passed it
            self._clock.after(left / self._rate(), lambda: self._end_first(alarm))

    def _end_first(self, alarm: int) -> None:
        if alarm != self._wake_ups:
            return
        self._progress()
        self._done, _, then = heapq.heappop(self._jobs)
        self._set_alarm()
        then()
