"""A real run on Ray, watched until it says how fast it is."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kondo.actors import Settings, Setup, Status, run
from kondo_lab.studies.scale.costs import left
from kondo_lab.studies.scale.run import BYTES, IDLE, KEPT, OTHERS, PACE, PROCESSOR, STALENESS


class Observed(NamedTuple):
    """Of one run, after its warm-up."""

    metrics: dict[str, float]
    """As they are recorded: means over messages, shares and rates over the seconds watched."""
    driver: float
    """Seconds of the driver's thread, per rollout."""
    steps: int


def spent() -> np.ndarray:
    """Return processor seconds so far: of this thread, of this process's family, of everybody."""
    return np.array([time.thread_time(), family_seconds(), machine_seconds()])


class Watch:
    """Keeps the statuses of a run for `seconds`, from `warm_up` seconds after its last actor is up.

    `interrupted` is asked whether the user wants to stop.
    """

    def __init__(self, seconds: float, warm_up: float, interrupted: Callable[[], bool]):
        self._seconds, self._warm_up, self._interrupted = seconds, warm_up, interrupted
        self._all_up: float | None = None
        self.statuses: list[Status] = []
        self._began = self._ended = np.zeros(3)

    def __call__(self, status: Status) -> None:
        """Take the status after a step."""
        if self._all_up is None and all(pid > 0 for pid in status.pids):
            self._all_up = status.seconds
        if self._all_up is None or status.seconds < self._all_up + self._warm_up or self.done():
            return
        # Called in the driver's thread.
        self.statuses.append(status)
        if len(self.statuses) == 1:
            self._began = spent()
        if self.done():
            self._ended = spent()

    def done(self) -> bool:
        """Return whether enough was seen, or the user wants to stop."""
        seen = self.statuses
        enough = len(seen) > 1 and seen[-1].seconds - seen[0].seconds >= self._seconds
        return enough or self._interrupted()

    def observed(self) -> Observed:
        """Return what was seen."""
        seconds = self.statuses[-1].seconds - self.statuses[0].seconds
        # The first status only says when the watch began.
        reports = [status.report for status in self.statuses[1:]]
        messages = len(reports)
        thread, family, machine = (self._ended - self._began).tolist()
        idle = sum(report.idle_seconds for report in reports)
        busy = sum(report.seconds for report in reports)
        metrics = {
            PACE: messages / seconds,
            IDLE: idle / (idle + busy),
            STALENESS: statistics.mean(report.staleness for report in reports),
            BYTES: sum(report.wire_bytes for report in reports) / messages,
            KEPT: sum(report.trained for report in reports) / messages,
            PROCESSOR: family / messages,
            OTHERS: left(machine, family) / seconds,
        }
        return Observed(metrics, driver=thread / messages, steps=messages)


def observe(
    setup: Setup,
    settings: Settings,
    *,
    seconds: float,
    warm_up: float,
    interrupted: Callable[[], bool],
) -> Observed | None:
    """Run `setup` until it was watched for `seconds`; None if the user stopped it before.

    One rollout makes one step, nothing fails, and no spare process starts meanwhile.
    """
    watch = Watch(seconds, warm_up, interrupted)
    run(setup, settings, observe=watch, stopped=watch.done)
    return None if interrupted() else watch.observed()


def machine_seconds() -> float:
    """Return the processor seconds of all processes of this machine."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _idle, _waiting, hard, soft, stolen = fields
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def family_seconds() -> float:
    """Return the processor seconds of this process and of all it has started, still running."""
    parents, spent = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        # The name, in brackets, may hold spaces.
        fields = text.rpartition(")")[2].split()
        parents[int(folder.name)] = int(fields[1])
        spent[int(folder.name)] = int(fields[11]) + int(fields[12])
    own = os.getpid()
    total = 0
    for process, ticks in spent.items():
        ancestor = process
        while ancestor not in (own, 0):
            ancestor = parents.get(ancestor, 0)
        total += ticks * (ancestor == own)
    return total / os.sysconf("SC_CLK_TCK")
