"""The driver's handle of the learner's process: steps out, reports in, restarts.

    plan -> [call, call, ...] -> submit -> report -> kept until a checkpoint covers it
    the process died, or owes an answer for too long -> a new one from the checkpoint -> the kept
    calls again, in the same order

A call holds the references of its messages, so they stay in the object store for the replay. The
learner is a function of its calls: the replay restores its state, and no sample counts twice.
Nothing here blocks but `begin`.
"""

import contextlib
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kondo.actors import checkpoint
from kondo.actors.learner import Publication, StepOrder, StepReport
from kondo.actors.processes import LEARNER_THREADS, LearnerProcess, Standing, Summary
from kondo.actors.setup import Settings, Setup
from kondo.actors.worker_pool import Event
from kondo.run_files import FolderInUseError, WriteError

LEARNER = -1
"""The learner in an `Event`, where actors have their index."""


class _Call(NamedTuple):
    """One step of the learner."""

    order: StepOrder
    messages: list[Any]  # references
    publish: bool


class LearnerHandle:
    """The learner of one run. `home` is the folder of its checkpoints."""

    def __init__(self, setup: Setup, settings: Settings, home: Path, *, resume: bool):
        self._setup, self._settings, self._home = setup, settings, home
        self._calls: deque[_Call] = deque()  # that no checkpoint covers
        self._given = 0  # of these, to the present process
        # Given and not answered: with the references of report and publication.
        self._pending: deque[tuple[_Call, Any, Any]] = deque()
        self._done = 0  # newest step that any process has done: a replay is not reported again
        self._last: StepOrder | None = None
        self._finish: Any = None
        self._failed_at: float | None = None
        self.events: list[Event] = []
        self._failures = self.pid = 0
        self._max_failures = settings.max_failures
        self._durable = 0  # newest step that a checkpoint holds
        self._start(resume=resume)

    def _start(self, *, resume: bool) -> None:
        # Beside the driver: that is where the checkpoints are.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote(LearnerProcess)
        self._handle: Any = remote.options(
            num_cpus=0, max_restarts=0, max_concurrency=LEARNER_THREADS, scheduling_strategy=here
        ).remote(self._setup, self._settings, str(self._home), resume)
        self._ready = self._handle.ready.remote()
        self.pid, self._first = 0, True
        self._since = time.monotonic()  # since then it owes an answer, if it owes one

    def begin(self) -> Standing:
        """Wait for the first process and its weights; return where it stands."""
        try:
            standing: Standing = ray.get(self._ready, timeout=self._settings.start_timeout)
            weights = self._handle.publication.remote()
            first = ray.get(weights, timeout=self._settings.start_timeout)
        except ray.exceptions.RayError as error:  # what stops it now would stop it again
            _raise_cause(error)
            raise RuntimeError(f"the learner could not start: {error}") from error
        self._ready, self.pid = None, standing.pid
        self._durable = self._done = standing.step
        self.published = first._replace(weights=weights)
        return standing

    @property
    def waiting(self) -> int:
        """Steps planned and not done."""
        return sum(call.order.number > self._done for call in self._calls)

    def plan(self, order: StepOrder, messages: list[Any], *, publish: bool) -> None:
        """Add a step."""
        self._calls.append(_Call(order, messages, publish))

    def finish(self, order: StepOrder) -> None:
        """End the run after the steps that are planned."""
        self._last = order

    def allow_restarts(self, number: int) -> None:
        """Bound the restarts from now on; one more failure ends the run."""
        self._failures, self._max_failures = 0, number

    def submit(self) -> None:
        """Give the learner the calls it does not have yet, as many as it has threads.

        Ray may start calls in another order, and a step waits on its thread for the steps before
        it: with more calls than threads those might never get a thread.
        """
        if self._ready is not None:
            return
        if not self.expect():
            self._since = time.monotonic()
        while len(self._pending) < LEARNER_THREADS:
            if self._given == len(self._calls):
                if self._last is not None and self._finish is None:
                    self._finish = self._handle.finish.remote(self._last)
                return
            call = self._calls[self._given]
            self._given += 1
            # A step that is replayed was published when it was first done.
            publish = call.publish and call.order.number > self._done
            step = self._handle.step.options(num_returns=2)
            self._pending.append((call, *step.remote(call.order, call.messages, publish)))

    def expect(self) -> list[Any]:
        """Return the references to wait for; of the answers only the next.

        A learner on several threads may return a later one first, and versions must not go back.
        """
        answer = self._pending[0][1] if self._pending else self._finish
        return [one for one in (answer, self._ready) if one is not None]

    def arrived(self, reference: Any) -> tuple[StepOrder, StepReport] | Summary | None:
        """Take what arrived: a step that was not done before, or the end of the run."""
        if reference not in self.expect():
            return None  # of a process that was replaced meanwhile
        try:
            content = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._replace("learner died", str(error).partition("\n")[0])
            return None
        except ray.exceptions.RayTaskError as error:
            if reference == self._ready:
                _raise_cause(error)
                self._replace("learner raised", f"{error.cause!r}")
                return None
            if isinstance(error.cause, WriteError):
                raise error.cause from None
            raise
        if isinstance(content, Summary):
            return content
        if isinstance(content, Standing):
            self._ready, self.pid = None, content.pid
            self._forget(content.step)
            return None
        call, _, publication = self._pending.popleft()
        replayed, self._done = content.step <= self._done, max(content.step, self._done)
        self._since, self._first = time.monotonic(), False
        if not replayed:
            self._failures = 0
            if self._failed_at is not None:
                away = self._since - self._failed_at
                self.events.append(Event("learner back", LEARNER, f"after {away:.1f} s", away))
                self._failed_at = None
            if call.publish:
                self.published = Publication(content.step, content.price, publication)
        self._forget(content.durable)
        return None if replayed else (call.order, content)

    def _forget(self, durable: int) -> None:
        """Drop the calls a checkpoint covers, and with them their messages."""
        self._durable = durable
        while self._calls and self._calls[0].order.number <= min(durable, self._done):
            self._calls.popleft()
            self._given = max(0, self._given - 1)

    def check_hanging(self, now: float, paused: float = 0.0) -> None:
        """Replace a learner that owed an answer for too long at time `now`, but for the pause."""
        self._since += paused
        if not self.expect():
            return
        what, patience = "no step", self._settings.step_timeout
        if self._ready is not None:
            what, patience = "not up", self._settings.start_timeout
        elif self._first:
            patience += self._settings.start_timeout
        if now - self._since <= patience:
            return
        if self.pid:
            # It must not wake up and write over its successor's files: Ray asks a process to end,
            # and waits for seconds before it kills it. The learner runs on this machine.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._replace("learner hung", f"{what} for {patience:g} s")

    def _replace(self, kind: str, detail: str) -> None:
        self.events.append(Event(kind, LEARNER, detail, 0.0))
        ray.kill(self._handle)
        self._failures += 1
        if self._failures > self._max_failures:
            raise RuntimeError(
                f"the learner failed {self._failures} times in a row without one step; the last "
                f"time: {kind}: {detail}; its last checkpoint holds step {self._durable}"
            )
        # A damaged checkpoint would end every process that is started from it.
        checkpoint.load(self._home)
        self._failed_at = self._failed_at or time.monotonic()
        self._finish, self._given = None, 0
        self._pending.clear()
        self._start(resume=True)

    def stop(self) -> None:
        """End the process."""
        ray.kill(self._handle)


def _raise_cause(error: ray.exceptions.RayError) -> None:
    """Raise what stopped a learner from starting, if its message says it all; Ray's is long."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (ValueError, WriteError, FolderInUseError)):
        raise cause from None
