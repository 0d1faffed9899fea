"""The rollout processes: orders out, receipts in; the dead and the hanging are replaced.

    order(seat) -> process -> receipt (to us) + message (for the learner)
    no receipt for rollout_timeout, or the process died -> its orders are lost; a spare process, one
    that is up or else one that is starting, or else a new one, takes the seat

The driver asks `expect` what to wait for and gives back what arrived. Nothing here blocks.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray

from kondo.actors.messages import Order
from kondo.actors.prices import Price
from kondo.actors.processes import RolloutProcess
from kondo.actors.setup import Settings, Setup


class Event(NamedTuple):
    """Something that went wrong, or right again."""

    kind: str
    """E.g. "actor died", "actor hung", "actor raised", "actor back", "learner died"."""
    who: int
    """Seat of the actor; -1 for the learner."""
    detail: str
    seconds: float
    """From the failure to the first delivery after it, for "back"; else 0."""


class Delivery(NamedTuple):
    """A rollout that is ready for the learner."""

    order: Order
    message: Any
    """Reference."""


@dataclasses.dataclass(eq=False)
class Seat:
    """A place in the crew and the process that has it."""

    index: int
    """-1 for a spare."""
    incarnation: int
    handle: Any
    ready: Any
    """Reference; None once the process is up."""
    since: float
    """When it was started or last delivered."""
    pid: int = 0
    executing: dict[int, tuple[Order, Any, Any]] = dataclasses.field(default_factory=dict)
    """Order number -> order, receipt and message."""
    open: int = 0
    """Orders given and not yet trained on."""
    failures: int = 0
    """In a row, without a delivery."""
    failed_at: float | None = None


class Crew:
    """All rollout processes of a run.

    Args:
        setup: the task and the policy.
        settings: how many, and how patient we are.
        issued: number of the first order.
        incarnations: processes there have been before.
    """

    def __init__(self, setup: Setup, settings: Settings, *, issued: int, incarnations: int):
        self._settings = settings
        # One copy in the object store for all processes, also for those that replace others.
        self._setup = ray.put(setup)
        self.issued, self.incarnations = issued, incarnations
        self.events: list[Event] = []
        """What happened; the driver takes them."""
        self.lost: list[tuple[int, str]] = []
        """Orders that will not be delivered, and why; the driver takes them."""
        self.seats = [self._start(index) for index in range(settings.actors)]
        self._spares: list[Seat] = []
        self._spare_failures = 0

    def _start(self, index: int) -> Seat:
        self.incarnations += 1
        remote: Any = ray.remote(RolloutProcess).options(
            num_cpus=self._settings.actor_cpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        handle = remote.remote(self._setup, self._settings, self.incarnations)
        return Seat(index, self.incarnations, handle, handle.ready.remote(), time.monotonic())

    def give_orders(self, version: int, price: Price, weights: Any) -> None:
        """Order rollouts from every process that may have more; a full queue makes it wait."""
        for seat in self.seats:
            while seat.ready is None and seat.open < self._settings.queue:
                order = Order(self.issued, seat.index, seat.incarnation, version, price)
                if not seat.executing:
                    seat.since = time.monotonic()
                call = seat.handle.rollout.options(num_returns=2)
                receipt, message = call.remote(order, [weights])
                seat.executing[order.number] = (order, receipt, message)
                seat.open += 1
                self.issued += 1

    def expect(self) -> Iterator[tuple[Any, Seat]]:
        """Yield the references to wait for, with the seat each belongs to."""
        for seat in [*self.seats, *self._spares]:
            if seat.ready is not None:
                yield seat.ready, seat
            for _, receipt, _ in seat.executing.values():
                yield receipt, seat

    def arrived(self, seat: Seat, reference: Any) -> Delivery | None:
        """Take what arrived at a seat; return a rollout if it is one."""
        if seat not in self.seats and seat not in self._spares:
            return None  # replaced meanwhile: its orders are lost, whatever it still delivers
        try:
            content = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._replace(seat, "actor died", str(error).partition("\n")[0])
            return None
        except ray.exceptions.RayTaskError as error:
            self._replace(seat, "actor raised", f"{error.cause!r}")
            return None
        if reference == seat.ready:
            seat.ready, seat.pid, seat.since = None, content, time.monotonic()
            return None
        order, _, message = seat.executing.pop(content.number)
        seat.since, seat.failures = time.monotonic(), 0
        if seat.failed_at is not None:
            away = seat.since - seat.failed_at
            self.events.append(Event("actor back", seat.index, f"after {away:.1f} s", away))
            seat.failed_at = None
        return Delivery(order, message)

    def settled(self, order: Order) -> None:
        """Say that the learner is done with an order: its process may have another."""
        seat = self.seats[order.actor]
        if seat.incarnation == order.incarnation:
            seat.open -= 1

    def check_hanging(self) -> None:
        """Replace processes that have not delivered, or started, for too long."""
        now = time.monotonic()
        for seat in [*self.seats, *self._spares]:
            patience = (
                self._settings.rollout_timeout
                if seat.ready is None
                else self._settings.start_timeout
            )
            waiting = seat.ready is not None or seat.executing
            if waiting and now - seat.since > patience:
                self._replace(seat, "actor hung", f"no answer for {patience:g} s")

    @property
    def ready_spares(self) -> int:
        """Spare processes that are up."""
        return sum(spare.ready is None for spare in self._spares)

    def keep_spares(self) -> None:
        """Start a spare process if one is missing and no other process is starting.

        One at a time: to start is mostly to import, and two that start side by side on a busy
        machine are both late.
        """
        starting = any(seat.ready is not None for seat in [*self.seats, *self._spares])
        if not starting and len(self._spares) < self._settings.spares:
            self._spares.append(self._start(-1))

    def _replace(self, seat: Seat, kind: str, detail: str) -> None:
        if seat in self._spares:
            self._drop_spare(seat, kind, detail)
            return
        self.events.append(Event(kind, seat.index, detail, 0.0))
        self.lost += [(number, kind) for number in seat.executing]
        ray.kill(seat.handle)
        if seat.failures + 1 > self._settings.max_failures:
            raise RuntimeError(
                f"actor {seat.index} failed {seat.failures + 1} times in a row without one "
                f"rollout; the last time: {kind}: {detail}"
            )
        new = self._take_spare(seat.index) or self._start(seat.index)
        new.failures = seat.failures + 1
        new.failed_at = time.monotonic() if seat.failed_at is None else seat.failed_at
        self.seats[seat.index] = new

    def _take_spare(self, index: int) -> Seat | None:
        """Give the seat to a spare: one that is up, else the one that has been starting longest."""
        if not self._spares:
            return None
        spare = min(self._spares, key=lambda spare: (spare.ready is not None, spare.since))
        self._spares.remove(spare)
        spare.index, self._spare_failures = index, 0
        return spare

    def _drop_spare(self, spare: Seat, kind: str, detail: str) -> None:
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
        for seat in [*self.seats, *self._spares]:
            ray.kill(seat.handle)
