"""The rollout processes: orders out, receipts in. Processes that died or hang are replaced.

    order -> worker -> receipt (to the driver) + message (for the learner)
    no receipt for rollout_timeout, or the process died -> its orders are lost, and it is replaced
    by a ready spare process, else by a starting one, else by a new one

The driver asks `expect` what to wait for and gives back what arrived. Nothing here blocks.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray

from kondo.actors.messages import Order
from kondo.actors.processes import RolloutProcess
from kondo.actors.setup import Settings, Setup
from kondo.actors.source_price import Price


class Event(NamedTuple):
    """A failure, or a recovery."""

    kind: str  # e.g. "actor died", "actor hung", "actor raised", "actor back", "learner died"
    who: int  # index of the actor; -1 for the learner
    detail: str
    seconds: float  # from the failure to the first delivery after it, for "back"; else 0


class Delivery(NamedTuple):
    """A rollout that is ready for the learner."""

    order: Order
    message: Any  # reference


@dataclasses.dataclass(eq=False)
class Worker:
    """One rollout process."""

    index: int  # place in the pool; -1 for a spare
    incarnation: int  # number of the process; no other process of the run has it
    handle: Any
    ready: Any  # reference; None once the process is up
    since: float  # when it was started or last delivered
    pid: int = 0
    # Order number -> order, receipt and message.
    executing: dict[int, tuple[Order, Any, Any]] = dataclasses.field(default_factory=dict)
    open: int = 0  # orders given and not yet trained on
    failures: int = 0  # in a row, without a delivery
    failed_at: float | None = None


class WorkerPool:
    """All rollout processes of a run: its first order has the number `issued`.

    `incarnations` counts the processes that were started before.
    """

    def __init__(self, setup: Setup, settings: Settings, *, issued: int, incarnations: int):
        self._settings = settings
        # One copy in the object store for all processes, also for those that replace others.
        self._setup = ray.put(setup)
        self.issued, self.incarnations = issued, incarnations
        # What happened, and the orders that will not be delivered; the driver takes them.
        self.events: list[Event] = []
        self.lost: list[tuple[int, str]] = []
        self.workers = [self._start(index) for index in range(settings.actors)]
        self._spares: list[Worker] = []
        self._spare_failures = 0

    def _start(self, index: int) -> Worker:
        self.incarnations += 1
        remote: Any = ray.remote(RolloutProcess).options(
            num_cpus=self._settings.actor_cpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        handle = remote.remote(self._setup, self._settings, self.incarnations)
        return Worker(index, self.incarnations, handle, handle.ready.remote(), time.monotonic())

    def give_orders(self, version: int, price: Price, weights: Any) -> None:
        """Order rollouts from every process that may have more; a full queue makes it wait."""
        for worker in self.workers:
            while worker.ready is None and worker.open < self._settings.queue:
                order = Order(self.issued, worker.index, worker.incarnation, version, price)
                if not worker.executing:
                    worker.since = time.monotonic()
                call = worker.handle.rollout.options(num_returns=2)
                receipt, message = call.remote(order, [weights])
                worker.executing[order.number] = (order, receipt, message)
                worker.open += 1
                self.issued += 1

    def expect(self) -> Iterator[tuple[Any, Worker]]:
        """Yield the references to wait for, with the worker each belongs to."""
        for worker in [*self.workers, *self._spares]:
            if worker.ready is not None:
                yield worker.ready, worker
            for _, receipt, _ in worker.executing.values():
                yield receipt, worker

    def arrived(self, worker: Worker, reference: Any) -> Delivery | None:
        """Take what arrived from a worker; return it if it is a rollout."""
        if worker not in self.workers and worker not in self._spares:
            return None  # replaced meanwhile: its orders are lost, whatever it still delivers
        try:
            content = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._replace(worker, "actor died", str(error).partition("\n")[0])
            return None
        except ray.exceptions.RayTaskError as error:
            self._replace(worker, "actor raised", f"{error.cause!r}")
            return None
        if reference == worker.ready:
            worker.ready, worker.pid, worker.since = None, content, time.monotonic()
            return None
        order, _, message = worker.executing.pop(content.number)
        worker.since, worker.failures = time.monotonic(), 0
        if worker.failed_at is not None:
            away = worker.since - worker.failed_at
            self.events.append(Event("actor back", worker.index, f"after {away:.1f} s", away))
            worker.failed_at = None
        return Delivery(order, message)

    def settled(self, order: Order) -> None:
        """Say that the learner is done with an order: its process may have another."""
        worker = self.workers[order.actor]
        if worker.incarnation == order.incarnation:
            worker.open -= 1

    def check_hanging(self, now: float) -> None:
        """Replace processes that had not delivered, or started, for too long at time `now`."""
        for worker in [*self.workers, *self._spares]:
            starting = worker.ready is not None
            patience = getattr(self._settings, "start_timeout" if starting else "rollout_timeout")
            if (starting or worker.executing) and now - worker.since > patience:
                self._replace(worker, "actor hung", f"no answer for {patience:g} s")

    def postpone(self, seconds: float) -> None:
        """Give every process so much more time."""
        for worker in [*self.workers, *self._spares]:
            worker.since += seconds

    @property
    def ready_spares(self) -> int:
        """Spare processes that are up."""
        return sum(spare.ready is None for spare in self._spares)

    def keep_spares(self) -> None:
        """Start a spare process if one is missing and no other process is starting.

        One at a time: starting is mostly importing, and two at once slow each other down.
        """
        starting = any(worker.ready is not None for worker in [*self.workers, *self._spares])
        if not starting and len(self._spares) < self._settings.spares:
            self._spares.append(self._start(-1))

    def _replace(self, worker: Worker, kind: str, detail: str) -> None:
        if worker in self._spares:
            self._drop_spare(worker, kind, detail)
            return
        self.events.append(Event(kind, worker.index, detail, 0.0))
        self.lost += [(number, kind) for number in worker.executing]
        ray.kill(worker.handle)
        if worker.failures + 1 > self._settings.max_failures:
            raise RuntimeError(
                f"actor {worker.index} failed {worker.failures + 1} times in a row without one "
                f"rollout; the last time: {kind}: {detail}"
            )
        new = self._take_spare(worker.index) or self._start(worker.index)
        new.failures = worker.failures + 1
        new.failed_at = time.monotonic() if worker.failed_at is None else worker.failed_at
        self.workers[worker.index] = new

    def _take_spare(self, index: int) -> Worker | None:
        """Return a spare for this place: a ready one, else the one that started first."""
        if not self._spares:
            return None
        spare = min(self._spares, key=lambda spare: (spare.ready is not None, spare.since))
        self._spares.remove(spare)
        spare.index, self._spare_failures = index, 0
        return spare

    def _drop_spare(self, spare: Worker, kind: str, detail: str) -> None:
        ray.kill(spare.handle)
        self._spares.remove(spare)
        self._spare_failures += 1
        if self._spare_failures > self._settings.max_failures:
            raise RuntimeError(
                f"spare processes failed to start {self._spare_failures} times in a row; the last "
                f"time: {kind}: {detail}"
            )

    def stop(self) -> None:
        """End all processes."""
        for worker in [*self.workers, *self._spares]:
            ray.kill(worker.handle)
