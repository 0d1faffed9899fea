"""The two kinds of processes. Ray makes actors of these classes; see `driver`.

Each computes on one thread: the processes are what is spread over the cores.
"""

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from kondo.actors.learner import Learner, Publication, StepOrder, StepReport, Undelivered
from kondo.actors.ledger import COUNTERS
from kondo.actors.messages import Order, pack
from kondo.actors.setup import Settings, Setup, process_seed
from kondo.actors.source_price import SourceGate
from kondo.run_files import FolderInUseError, locked

# Of all messages of a step. One that was announced lies in the object store; on another machine it
# has to be fetched. Less than `Settings.step_timeout`: a learner that waits does not hang.
_FETCH_SECONDS = 60.0

LEARNER_LOCK = ".learner.lock"
"""Name of the file that the learner holds while it lives."""
LEARNER_THREADS = 2
"""Calls a learner has at once: one that runs, one that fetches its messages."""


class Standing(NamedTuple):
    """Where a learner stands; by default, at the start of a new run."""

    pid: int = 0
    step: int = 0
    issued: int = 0
    incarnations: int = 0
    unsettled: tuple[int, ...] = ()


class Summary(NamedTuple):
    """What a finished run leaves behind."""

    step: int
    counts: dict[str, int]
    """Samples by outcome."""
    balanced: bool
    quarantined: dict[str, int]
    """Samples by reason."""
    quarantined_by_actor: dict[int, int]
    lost: dict[str, int]
    """Samples by reason."""
    duplicates: int
    staleness: dict[int, int]
    """Accepted samples by staleness."""
    wire_bytes: int
    full_bytes: int
    busy_seconds: float
    """The learner's, since it was last started."""
    idle_seconds: float
    """It waited between the end of a step and the start of the next, since then."""
    held_out_error: float | None


class RolloutProcess:
    """Acts with the newest weights it is given."""

    def __init__(self, setup: Setup, settings: Settings, incarnation: int):
        torch.set_num_threads(1)
        seed = process_seed(settings.seed, incarnation)
        torch.manual_seed(seed)  # of a policy that draws from torch's own generator
        self._gate = SourceGate(settings)
        self._task, self._policy = setup.make_task(seed), setup.make_policy(seed)
        self._version = -1

    def ready(self) -> int:
        """Return the process id, once everything is built."""
        return os.getpid()

    def rollout(self, order: Order, weights: list[Any]) -> tuple[float, Any]:
        """Make the rollout. `weights` holds the reference of a Publication, fetched if new.

        Returns:
            The receipt, how many seconds it took, for the driver; the message, for the learner.
        """
        start = time.perf_counter()
        if order.version != self._version:
            publication: Publication = ray.get(weights[0])
            # Ray delivers read-only arrays; load_state_dict copies from what it is given.
            state = {k: torch.tensor(v) for k, v in publication.weights.items()}
            self._policy.load_state_dict(state)
            self._version = order.version
        message = pack(self._task.rollout(self._policy), order, self._gate, self._task.unit)
        return time.perf_counter() - start, message


class LearnerProcess:
    """Fetches messages for a `Learner`, takes one step at a time, and keeps its clock.

    Ray runs calls on `LEARNER_THREADS` threads. A step fetches its messages before its turn, and
    returns its report and weights while the next one runs, so that Ray's work between two calls
    costs the learner no time. Steps run in the order of their numbers, whatever the threads do.
    """

    def __init__(self, setup: Setup, settings: Settings, folder: str, resume: bool):
        self._setup, self._settings, self._folder = setup, settings, Path(folder)
        self._resume, self._held = resume, ExitStack()
        self._turn = threading.Condition()
        self._busy = self._idle = self._last = 0.0

    def ready(self) -> Standing:
        """Build everything, and return where the learner stands.

        Not in the constructor: of an error there, Ray passes on the text alone. First of all it
        waits for a learner that still holds the folder: that of a driver that was killed lives for
        seconds after it, and may write a checkpoint over those of the run that resumes.
        """
        torch.set_num_threads(1)
        torch.manual_seed(process_seed(self._settings.seed, 0))
        # Half of the time, so that the error comes in time.
        end = time.monotonic() + self._settings.start_timeout / 2
        while True:
            try:
                self._held.enter_context(locked(self._folder / LEARNER_LOCK, self._folder))
                break
            except FolderInUseError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._learner = Learner(self._setup, self._settings, self._folder, resume=self._resume)
        learner, ledger = self._learner, self._learner.ledger
        places = (learner.step_number, ledger.issued, learner.incarnations)
        return Standing(os.getpid(), *places, tuple(ledger.unsettled()))

    def publication(self) -> Publication:
        """Return the current weights and price."""
        return self._learner.publication()

    def step(
        self, order: StepOrder, messages: list[Any], publish: bool
    ) -> tuple[StepReport, Publication | None]:
        """Make one update. `messages` are references; Ray hands out their contents here alone."""
        contents, learner = _fetch(messages), self._learner
        with self._turn:
            self._turn.wait_for(lambda: learner.step_number >= order.number - 1)
            start = time.perf_counter()
            idle = start - self._last if self._last else 0.0
            report = learner.step(order, contents)
            publication = learner.publication() if publish else None
            self._last = time.perf_counter()
            self._busy += self._last - start
            self._idle += idle
            self._turn.notify_all()
            return report._replace(seconds=self._last - start, idle_seconds=idle), publication

    def finish(self, order: StepOrder) -> Summary:
        """Write the last checkpoint, once all steps are done, and return the accounts."""
        learner, ledger = self._learner, self._learner.ledger
        with self._turn:
            self._turn.wait_for(lambda: learner.step_number >= order.number)
            learner.finish(order)
        return Summary(
            step=learner.step_number,
            counts=ledger.counts(),
            balanced=ledger.balanced,
            duplicates=ledger.duplicates,
            **{name: dict(getattr(ledger, name)) for name in COUNTERS},
            staleness=dict(learner.staleness),
            wire_bytes=learner.wire_bytes,
            full_bytes=learner.full_bytes,
            busy_seconds=self._busy,
            idle_seconds=self._idle,
            held_out_error=learner.held_out_error(),
        )


def _fetch(references: list[Any]) -> list[Any]:
    end = time.monotonic() + _FETCH_SECONDS
    contents: list[Any] = []
    for reference in references:
        try:
            contents.append(ray.get(reference, timeout=max(0.0, end - time.monotonic())))
        except ray.exceptions.RayError as error:
            contents.append(Undelivered(str(error)))
    return contents
