"""The run: a driver that only moves references, a learner, and a crew of rollout processes.

    crew --messages--> object store --> learner
      ^                                    |
      '------ weights by version ----------'        the driver passes references, never contents

One loop. It waits for whatever comes first (a receipt, a step, a process that is up) for at most
`_TICK` seconds, and then: gives orders (unless a seat's queue is full), hands ready rollouts to the
learner (at most `_AHEAD` steps before it), and replaces who died or hangs. A learner that died is
started from its checkpoint and is given again, in the same order, the steps since: their messages
are held until a checkpoint covers them.
"""

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ray

from kondo.actors import checkpoint, log
from kondo.actors.cluster import connected
from kondo.actors.crew import Crew, Delivery, Event
from kondo.actors.learner import StepOrder, StepReport
from kondo.actors.messages import Order
from kondo.actors.processes import Standing, Summary
from kondo.actors.setup import Settings, Setup
from kondo.actors.steps import Steps

_TICK = 0.1
# One step at work and one waiting: the learner never waits for the driver.
_AHEAD = 2


class Status(NamedTuple):
    """What an observer sees after every step."""

    report: StepReport
    orders: tuple[Order, ...]
    """Whose rollouts the step was made of, the versions they acted with among them."""
    setup: str
    num_steps: int
    seconds: float
    """Since the first order."""
    pids: tuple[int, ...]
    """Of the rollout processes; 0 for one that is starting."""
    spares: int
    """Processes ready to take the seat of one that dies."""
    learner_pid: int
    open: tuple[int, ...]
    """Per actor: rollouts ordered and not yet trained on."""
    events: tuple[Event, ...]
    """Since the last step."""


Observer = Callable[[Status], None]


def run(
    setup: Setup,
    settings: Settings | None = None,
    *,
    address: str | None = None,
    folder: Path | None = None,
    resume: bool = False,
    observe: Observer | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Summary:
    """Train `setup` with many actors and return the accounts.

    Args:
        setup: the task and the policy.
        settings: how.
        address: of a Ray cluster; None starts one on this machine, on loopback only. Ray that
            runs in this process already is used as it is.
        folder: for checkpoints, the log and quarantined messages; a temporary one if None. The
            learner runs beside this process, so a local folder does.
        resume: go on from the folder's checkpoint.
        observe: called after every step.
        stopped: asked now and then; once true, the run ends after the steps under way.

    Raises:
        ValueError: the folder holds a checkpoint and resume is False, or the other way round.
        RuntimeError: a process fails again and again.
    """
    settings = settings or Settings()
    with _home(folder) as home:
        if resume != (home / checkpoint.FILE).exists():
            found, do = ("no", "leave out") if resume else ("a", "give")
            raise ValueError(
                f"folder {home} holds {found} checkpoint; {do} resume, or name another folder."
            )
        with connected(address), log.opened(home) as write:
            driver = _Driver(setup, settings, home, resume, write, observe, stopped)
            return driver.run()


@contextmanager
def _home(folder: Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kondo-actors-")))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()


class _Driver:
    """The state of one run."""

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        home: Path,
        resume: bool,
        write: log.Write,
        observe: Observer | None,
        stopped: Callable[[], bool],
    ):
        self._name, self._settings = setup.name, settings
        self._write, self._observe, self._stopped = write, observe, stopped
        self._deliveries: deque[Delivery] = deque()
        self._ending = False
        self._steps = Steps(setup, settings, home, resume=resume)
        # A new run has nothing to go on from: its actors start while its learner does.
        standing = self._steps.begin() if resume else Standing()
        self._planned = standing.step
        past = log.last_issued(home)
        self._crew = Crew(
            setup,
            settings,
            issued=max(standing.issued, past.orders),
            incarnations=max(standing.incarnations, past.incarnations),
        )
        # What an earlier run ordered and its checkpoint did not settle has ended with that run.
        unsettled = [*standing.unsettled, *range(standing.issued, past.orders)]
        self._crew.lost = [(number, "run ended") for number in unsettled]
        if not resume:
            self._steps.begin()
        self._events: list[Event] = []
        self._started = time.monotonic()
        if resume:
            self._write({"event": "resumed", "step": standing.step})

    def run(self) -> Summary:
        try:
            while True:
                self._plan()
                self._steps.submit()
                if not self._ending:
                    self._crew.give_orders(*self._steps.published)
                    self._crew.keep_spares()
                summary = self._wait()
                self._take_events()
                if summary is not None:
                    self._write(log.summary_line(summary))
                    return summary
                self._crew.check_hanging()
                self._steps.check_hanging()
        finally:
            self._crew.stop()
            self._steps.stop()

    def _plan(self) -> None:
        """Make steps of ready rollouts; after the last one, ask for the accounts."""
        size = self._settings.rollouts_per_step
        done = self._planned >= self._settings.steps or self._stopped()
        if done and not self._ending:
            self._ending = True
            self._steps.finish(self._step_order(()))
        while (
            not self._ending
            and self._planned < self._settings.steps
            and len(self._deliveries) >= size
            and self._steps.waiting < _AHEAD
        ):
            taken = [self._deliveries.popleft() for _ in range(size)]
            self._planned += 1
            self._steps.plan(
                self._step_order(tuple(delivery.order for delivery in taken)),
                [delivery.message for delivery in taken],
                publish=self._planned % self._settings.publish_every == 0,
            )

    def _step_order(self, orders: tuple[Order, ...]) -> StepOrder:
        lost, self._crew.lost = tuple(self._crew.lost), []
        return StepOrder(self._planned, orders, lost, self._crew.issued, self._crew.incarnations)

    def _wait(self) -> Summary | None:
        """Wait for the first thing to arrive, and take all that have."""
        seats = dict(self._crew.expect())
        references = [*self._steps.expect(), *seats]
        ready, _ = ray.wait(references, num_returns=1, timeout=_TICK)
        if ready:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ready:
            if reference in seats:
                delivery = self._crew.arrived(seats[reference], reference)
                if delivery is not None:
                    self._deliveries.append(delivery)
                continue
            found = self._steps.arrived(reference)
            if isinstance(found, Summary):
                return found
            if found is not None:
                self._stepped(*found)
        return None

    def _stepped(self, order: StepOrder, report: StepReport) -> None:
        for settled in order.orders:
            self._crew.settled(settled)
        self._take_events()
        events, self._events = tuple(self._events), []
        status = Status(
            report=report,
            orders=order.orders,
            setup=self._name,
            num_steps=self._settings.steps,
            seconds=time.monotonic() - self._started,
            pids=tuple(0 if seat.ready is not None else seat.pid for seat in self._crew.seats),
            spares=self._crew.ready_spares,
            learner_pid=self._steps.pid,
            open=tuple(seat.open for seat in self._crew.seats),
            events=events,
        )
        issued = log.Issued(self._crew.issued, self._crew.incarnations)
        self._write(log.step_line(order, report, issued, status.seconds))
        if self._observe is not None:
            self._observe(status)

    def _take_events(self) -> None:
        events = [*self._crew.events, *self._steps.events]
        self._crew.events, self._steps.events = [], []
        for event in events:
            self._write({"event": event.kind, "who": event.who, "detail": event.detail})
        self._events += events
