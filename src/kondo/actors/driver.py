"""The run: a driver that only moves references, a learner, and a pool of rollout processes.

    pool --messages--> object store --> learner
      ^                                    |
      '------ weights by version ----------'        the driver passes references, never contents

One loop. It waits at most `_TICK` seconds for the first of a receipt, a step or a started process.
Then it gives orders (unless a worker's queue is full), hands ready rollouts to the learner (at most
`_AHEAD` steps ahead), and replaces processes that died or hang. A learner that died is started from
its checkpoint and repeats the steps since then in the same order: their messages are held until a
checkpoint covers them.
"""

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray

from kondo.actors import checkpoint, log
from kondo.actors.cluster import connected
from kondo.actors.learner import StepOrder, StepReport
from kondo.actors.learner_handle import LEARNER, LearnerHandle
from kondo.actors.messages import Order
from kondo.actors.processes import Standing, Summary
from kondo.actors.setup import Settings, Setup
from kondo.actors.source_price import SourceGate
from kondo.actors.worker_pool import Event, WorkerPool
from kondo.run_files import LOCK, WriteError, locked

_TICK = 0.1
# Seconds. The loop waits for a tick; an observer may take longer.
_LONGEST_LOOP = 1.0
# One step at work and one waiting: the learner never waits for the driver.
_AHEAD = 2
# Of a step's report, as they are in the log; JSON writes tuples as lists.
_LOGGED = (
    *("step", "error", "loss", "produced", "trained", "skipped", "quarantined", "staleness"),
    *("wire_bytes", "full_bytes", "counts"),
)


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
    """Process ids of the rollout processes; 0 for one that is starting."""
    spares: int
    """Ready processes that can replace one that dies."""
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
    observe: Observer = lambda status: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Summary:
    """Train `setup` with many actors and return the accounts.

    Args:
        setup: the task and the policy.
        settings: how.
        address: of a Ray cluster, or "auto"; None starts one for this run, on loopback only. Ray
            that runs in this process already is used as it is.
        folder: for checkpoints, the log and quarantined messages; a temporary one if None. The
            learner runs beside this process, so a local folder does.
        resume: go on from the folder's checkpoint.
        observe: called after every step.
        stopped: asked now and then; once true, the run ends after the steps under way. A learner
            that fails meanwhile is started once more for them.

    Raises:
        ValueError: the folder holds a checkpoint and resume is False, or the other way round; or
            the checkpoint or the log is damaged.
        RuntimeError: a process fails again and again.
        FolderInUseError: another run uses the folder.
        WriteError: a file of the folder cannot be written.
    """
    settings = settings or Settings()
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kondo-actors-")))
        home = folder.absolute()
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError.of(home, error) from error
        # First of all: a second run would mix its lines and checkpoints with those of the first.
        stack.enter_context(locked(home / LOCK, home))
        if resume != (home / checkpoint.FILE).exists():
            found, do = ("no", "leave out") if resume else ("a", "give")
            raise ValueError(
                f"folder {home} holds {found} checkpoint; {do} resume, or name another folder."
            )
        if resume:
            # Here as well as in the learner: an error of a Ray process is told with its traceback.
            checkpoint.load(home)
        stack.enter_context(connected(address))
        write = stack.enter_context(log.opened(home))
        return _Driver(setup, settings, home, resume, write, observe, stopped).run()


class _Driver:
    """The state of one run."""

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        home: Path,
        resume: bool,
        write: log.Write,
        observe: Observer,
        stopped: Callable[[], bool],
    ):
        self._name, self._settings = setup.name, settings
        self._write, self._observe, self._stopped = write, observe, stopped
        self._deliveries: deque[tuple[Order, Any]] = deque()
        self._events: list[Event] = []
        self._ending = self._asked = False  # asked to stop
        self._learner = LearnerHandle(setup, settings, home, resume=resume)
        # A new run has nothing to go on from: its actors start while its learner does.
        standing = self._learner.begin() if resume else Standing()
        self._planned = standing.step
        orders, incarnations = log.last_issued(home)
        self._pool = WorkerPool(
            setup,
            settings,
            issued=max(standing.issued, orders),
            incarnations=max(standing.incarnations, incarnations),
        )
        # What an earlier run ordered and its checkpoint did not settle has ended with that run.
        unsettled = [*standing.unsettled, *range(standing.issued, orders)]
        self._pool.lost = [(number, "run ended") for number in unsettled]
        if resume:
            # A driver that was killed has not written the lines of the last steps of its learner.
            unlogged = list(range(log.last_step(home) + 1, standing.step + 1))
            self._write({"event": "resumed", "step": standing.step, "unlogged": unlogged})
        else:
            self._learner.begin()
        if settings.at_source and not SourceGate(settings).one_price:
            detail = f"{settings.gate!r} chooses among all samples of a step; actors send all"
            self._pool.events.append(Event("gate at the learner", LEARNER, detail, 0.0))
        self._started = time.monotonic()

    def run(self) -> Summary:
        looked = self._started
        try:
            while True:
                self._plan()
                self._learner.submit()
                if not self._ending:
                    self._pool.give_orders(*self._learner.published)
                    self._pool.keep_spares()
                # Nobody hangs because the driver was paused (Ctrl-Z): it has not taken what
                # arrived, and messages that it owns could not be fetched.
                before, looked = looked, time.monotonic()
                paused = max(0.0, looked - before - _LONGEST_LOOP)
                summary = self._wait()
                self._take_events()
                if summary is not None:
                    self._write({"event": "finished", **summary._asdict()})
                    return summary
                self._pool.check_hanging(looked, paused)
                self._learner.check_hanging(looked, paused)
        finally:
            self._pool.stop()
            self._learner.stop()

    def _plan(self) -> None:
        """Make steps of ready rollouts; after the last one, ask for the accounts."""
        size, steps = self._settings.rollouts_per_step, self._settings.steps
        if not self._asked and self._stopped():
            self._asked = True
            self._learner.allow_restarts(1)  # for the last checkpoint; nobody waits for more
        if not self._ending and (self._asked or self._planned >= steps):
            self._ending = True
            self._learner.finish(self._step_order(()))
        while (
            not self._ending
            and self._planned < steps
            and len(self._deliveries) >= size
            and self._learner.waiting < _AHEAD
        ):
            taken = [self._deliveries.popleft() for _ in range(size)]
            self._planned += 1
            publish = self._planned % self._settings.publish_every == 0
            order = self._step_order(tuple(order for order, _ in taken))
            self._learner.plan(order, [message for _, message in taken], publish=publish)

    def _step_order(self, orders: tuple[Order, ...]) -> StepOrder:
        lost, self._pool.lost = tuple(self._pool.lost), []
        return StepOrder(self._planned, orders, lost, self._pool.issued, self._pool.incarnations)

    def _wait(self) -> Summary | None:
        """Wait for the first thing to arrive, and take all that have."""
        workers = dict(self._pool.expect())
        references = [*self._learner.expect(), *workers]
        ready, _ = ray.wait(references, num_returns=1, timeout=_TICK)
        if ready:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ready:
            if reference in workers:
                delivery = self._pool.arrived(workers[reference], reference)
                if delivery is not None:
                    self._deliveries.append(delivery)
                continue
            found = self._learner.arrived(reference)
            if isinstance(found, Summary):
                return found
            if found is not None:
                self._stepped(*found)
        return None

    def _stepped(self, order: StepOrder, report: StepReport) -> None:
        for settled in order.orders:
            self._pool.settled(settled)
        self._take_events()
        events, self._events = tuple(self._events), []
        status = Status(
            report=report,
            orders=order.orders,
            setup=self._name,
            num_steps=self._settings.steps,
            seconds=time.monotonic() - self._started,
            pids=tuple(w.pid if w.ready is None else 0 for w in self._pool.workers),
            spares=self._pool.ready_spares,
            learner_pid=self._learner.pid,
            open=tuple(worker.open for worker in self._pool.workers),
            events=events,
        )
        line = {
            **{name: getattr(report, name) for name in _LOGGED},
            "seconds": round(status.seconds, 3),
            "price": report.price.price,
            "orders": [one.number for one in order.orders],
            "lost": order.lost,
            "issued": self._pool.issued,
            "incarnations": self._pool.incarnations,
        }
        self._write(line)
        self._observe(status)

    def _take_events(self) -> None:
        events = [*self._pool.events, *self._learner.events]
        self._pool.events, self._learner.events = [], []
        for event in events:
            self._write({"event": event.kind, "who": event.who, "detail": event.detail})
        self._events += events
