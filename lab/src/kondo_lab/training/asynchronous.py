"""Reinforcement with actors and learner at work at the same time: staleness as it comes.

    actors    thread, stream A:   newest weights -> answers and rewards -> queue of Q batches
    learner   caller, stream L:   oldest batch of the queue -> update -> publish weights

Nobody waits for the other but where the queue is full or empty. The lag of a batch, the learner's
updates since the weights that it was drawn with were published, is counted, not chosen. On a GPU
each side waits for its own work before it hands anything on, so that the order is that of the
device and not that in which Python queued it.

Results depend on the clock and cannot be repeated bit for bit.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from kondo_lab.models.networks import Parameters
from kondo_lab.training.cuda_graphs import EAGER_CALLS, Captured, new_stream
from kondo_lab.training.member import Member
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Rolled

LAG = "lag"
"""Metric of every logged step: updates between drawing a batch and training on it, mean of the
steps since the previous one."""
TURNS = EAGER_CALLS + 1
"""First steps, in which actors and learner take turns: their graphs are recorded there, and nothing
else may use the device meanwhile."""
_PATIENCE = 0.1
"""Seconds between two looks whether the other side has failed or asked to stop."""


class _Batch(NamedTuple):
    """What actors hand over."""

    rolled: Rolled
    version: int
    """Updates of the weights that it was drawn with."""


class AsynchronousPopulation(Population):
    """P members whose actors draw the next batches while the learner learns.

    Arguments are those of `Population`; the members have one queue, of at least one batch.

    A state that is loaded goes on with an empty queue: what was in it is lost, and the actors go
    on with the prompts after it.
    """

    def __init__(self, *inputs: Any, **options: Any):
        super().__init__(*inputs, **options)
        self._size = self.members[0].frictions.queue
        self._stream = new_stream(self.device) if self.device.type == "cuda" else None
        self._sampling = _copies(self.parameters)
        self._published = _copies(self.parameters)
        self._version = 0
        self._exchange = threading.Lock()
        self._act_step = torch.zeros_like(self.step_number)
        self._drawn: Rolled = {}
        self._draw_batch = Captured(self._do_act, self.device)
        self._train_batch = Captured(self._do_learn, self.device)
        self._lags: list[int] = []
        self._turns_left = TURNS
        self._workers: _Actors | None = None

    @property
    def overlaps(self) -> bool:
        """Whether it gets a stream of its own: the learner's graph is recorded on it."""
        return True

    def _check_queues(self, members: Sequence[Member]) -> None:
        sizes = {member.frictions.queue for member in members}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                f"members must have one queue of at least 1 batch, got {sorted(sizes)}; queues of "
                f"different sizes go into populations of their own."
            )

    def begin_step(self) -> None:
        """Take the oldest batch and make one update of every member with it."""
        if self._workers is None:
            self._prepare()
        batch = self.draw() if self._workers is None else self._workers.take()
        self._load(batch)
        self._train_batch()
        self._wait()
        self._publish()
        self._lags.append(self._version - 1 - batch.version)

    def _prepare(self) -> None:
        """Count the turns that are left; let the actors go after the last one."""
        if self._turns_left == TURNS:
            for _ in range(TURNS):
                self.evaluate()  # its graph is recorded now, as those of the steps to come
        if self._turns_left == 0:
            self._workers = _Actors(self, self._size)
        else:
            self._turns_left -= 1

    def draw(self) -> _Batch:
        """Draw a batch with the newest weights, and wait for it."""
        with self._on_stream():
            with self._exchange:
                version = self._version
                for name, value in self._sampling.items():
                    value.copy_(self._published[name])
                # Before the learner may publish again.
                self._wait()
            self._draw_batch()
            found = _Batch({name: value.clone() for name, value in self._drawn.items()}, version)
            self._wait()
        return found

    def _do_act(self) -> None:
        self._act_step.add_(1)
        self._drawn = self.experience(self._sampling, self._act_step)

    def _do_learn(self) -> None:
        self.step_number.add_(1)
        for group in self.groups:
            group.decide(self.program, self.rolled, self.step_number)
        self.learn()

    def _load(self, batch: _Batch) -> None:
        """Put a batch where the learner's graph reads it."""
        if not self.rolled:
            self.rolled = {name: value.clone() for name, value in batch.rolled.items()}
        for name, own in self.rolled.items():
            own.copy_(batch.rolled[name])

    def _publish(self) -> None:
        with self._exchange:
            for name, value in self._published.items():
                value.copy_(self.parameters[name])
            self._wait()
            self._version += 1

    def _wait(self) -> None:
        """Wait for what this side has queued on the device."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def read(self) -> dict[str, list[float]]:
        """Return metric -> one number per member: means since the last call, and totals."""
        lags, self._lags = self._lags, []
        mean = sum(lags) / len(lags)
        return super().read() | {LAG: [mean] * len(self.members)}

    def close(self) -> None:
        """Stop the actors; what waits in the queue is lost."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, but the queue."""
        own = {
            "act_step": self._act_step.clone(),
            "version": self._version,
            "lags": list(self._lags),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the queue is empty."""
        self.close()
        super().load_state_dict(state)
        self._train_batch = Captured(self._do_learn, self.device)
        self._turns_left = TURNS
        self._act_step.copy_(state["act_step"])
        self._version, self._lags = state["version"], list(state["lags"])
        for name, value in self._published.items():
            value.copy_(self.parameters[name])


class _Actors:
    """A thread that draws batches as long as there is room for them."""

    def __init__(self, population: AsynchronousPopulation, size: int):
        self._population = population
        self._batches: queue.Queue[_Batch] = queue.Queue(maxsize=size)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="actors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._put(self._population.draw())
        except BaseException as error:
            self._error = error

    def _put(self, batch: _Batch) -> None:
        while not self._stopped.is_set():
            try:
                return self._batches.put(batch, timeout=_PATIENCE)
            except queue.Full:
                continue

    def take(self) -> _Batch:
        """Return the oldest batch.

        Raises:
            RuntimeError: the actors have failed; the cause says why.
        """
        while True:
            try:
                return self._batches.get(timeout=_PATIENCE)
            except queue.Empty:
                if self._error is not None:
                    raise RuntimeError(
                        f"the actors have failed: {type(self._error).__name__}: {self._error}"
                    ) from self._error

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()


def _copies(parameters: Parameters) -> Parameters:
    return {name: value.detach().clone() for name, value in parameters.items()}


@contextmanager
def running(population: Population) -> Iterator[Population]:
    """Give a population, and stop its actors at the end if they are at work."""
    try:
        yield population
    finally:
        if isinstance(population, AsynchronousPopulation):
            population.close()
