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
    """A failure, a recovery, or what is to be known once."""

    kind: str  # e.g. "actor died", "actor hung", "actor raised", "actor back", "learner died"
    who: int  # index of the actor; -1 for the learner
    detail: str
    seconds: float  # from the failure to the first delivery after it, for "back"; else 0


@dataclasses.dataclass(eq=False)
class Worker:
    """One rollout process."""

    index: int  # place in the pool; -1 for a spare
    incarnation: int  # number of the process; no other process of the run has it
    handle: Any
    ready: Any  # reference; None once the process is up
    since: float  # when it was started or last delivered
    pid: int = 0
    # Reference of the receipt -> order and reference of the message.
    executing: dict[Any, tuple[Order, Any]] = dataclasses.field(default_factory=dict)
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
        # No CPUs are reserved: they start whatever the machine has.
        remote: Any = ray.remote(RolloutProcess).options(
            num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD"
        )
        handle = remote.remote(self._setup, self._settings, self.incarnations)
        return Worker(index, self.incarnations, handle, handle.ready.remote(), time.monotonic())

    @property
    def _everybody(self) -> list[Worker]:
        return [*self.workers, *self._spares]

    def give_orders(self, version: int, price: Price, weights: Any) -> None:
        """Order rollouts from every process that may have more; a full queue makes it wait."""
        for worker in self.workers:
            while worker.ready is None and worker.open < self._settings.queue:
                order = Order(self.issued, worker.index, worker.incarnation, version, price)
                if not worker.executing:
                    worker.since = time.monotonic()
                call = worker.handle.rollout.options(num_returns=2)
                receipt, message = call.remote(order, [weights])
                worker.executing[receipt] = (order, message)
                worker.open += 1
                self.issued += 1

    def expect(self) -> Iterator[tuple[Any, Worker]]:
        """Yield the references to wait for, with the worker each belongs to."""
        for worker in self._everybody:
            if worker.ready is not None:
                yield worker.ready, worker
            for receipt in worker.executing:
                yield receipt, worker

    def arrived(self, worker: Worker, reference: Any) -> tuple[Order, Any] | None:
        """Take what arrived from a worker; of a rollout, return order and message's reference."""
        if worker not in self._everybody:
            return None  # replaced meanwhile: its orders are lost, whatever it still delivers
        try:
            content = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._replace(worker, "actor died", str(error).partition("\n")[0])
            return None
        except ray.exceptions.RayTaskError as error:
            self._replace(worker, "actor raised", f"{error.cause!r}")
            return None
        worker.since = time.monotonic()
        if reference == worker.ready:
            worker.ready, worker.pid = None, content
            return None
        delivered = worker.executing.pop(reference)
        worker.failures = 0
        if worker.failed_at is not None:
            away = worker.since - worker.failed_at
            self.events.append(Event("actor back", worker.index, f"after {away:.1f} s", away))
            worker.failed_at = None
        return delivered

    def settled(self, order: Order) -> None:
        """Say that the learner is done with an order: its process may have another."""
        worker = self.workers[order.actor]
        if worker.incarnation == order.incarnation:
            worker.open -= 1

    def check_hanging(self, now: float, paused: float = 0.0) -> None:
        """Replace processes that had not delivered, or started, for too long at time `now`.

        The seconds in which the driver was paused do not count.
        """
        for worker in self._everybody:
            worker.since += paused
            starting = worker.ready is not None
            patience = getattr(self._settings, "start_timeout" if starting else "rollout_timeout")
            if (starting or worker.executing) and now - worker.since > patience:
                self._replace(worker, "actor hung", f"no answer for {patience:g} s")

    @property
    def ready_spares(self) -> int:
        """Spare processes that are up."""
        return sum(spare.ready is None for spare in self._spares)

    def keep_spares(self) -> None:
        """Start a spare process if one is missing and no other process is starting.

        One at a time: starting is mostly importing, and two at once slow each other down.
        """
        starting = any(worker.ready is not None for worker in self._everybody)
        if not starting and len(self._spares) < self._settings.spares:
            self._spares.append(self._start(-1))

    def _replace(self, worker: Worker, kind: str, detail: str) -> None:
        """End a process that failed; a spare, if it is none itself, takes its place."""
        ray.kill(worker.handle)
        place = worker.index
        if place < 0:
            self._spares.remove(worker)
            self._spare_failures = failures = self._spare_failures + 1
            story = f"spare processes failed to start {failures} times in a row"
        else:
            self.events.append(Event(kind, place, detail, 0.0))
            self.lost += [(order.number, kind) for order, _ in worker.executing.values()]
            failures = worker.failures + 1
            story = f"actor {place} failed {failures} times in a row without one rollout"
        if failures > self._settings.max_failures:
            raise RuntimeError(f"{story}; the last time: {kind}: {detail}")
        if place < 0:
            return
        if self._spares:  # one that is up, else the one that started first
            new = min(self._spares, key=lambda spare: (spare.ready is not None, spare.since))
            self._spares.remove(new)
            new.index, self._spare_failures = place, 0
        else:
            new = self._start(place)
        new.failures = failures
        new.failed_at = time.monotonic() if worker.failed_at is None else worker.failed_at
        self.workers[place] = new

    def stop(self) -> None:
        """End all processes."""
        for worker in self._everybody:
            ray.kill(worker.handle)
