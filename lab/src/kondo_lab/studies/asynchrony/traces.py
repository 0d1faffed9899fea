"""A run on Ray and its twin in one process: the same learner, the same versions, other samples.

on_ray:  actors, queues, weights on their way   -> which version each step's rollouts acted with
replay:  a loop that acts with those versions   -> what asynchrony does, and nothing else of Ray
"""

import dataclasses
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kondo.actors import checkpoint
from kondo.actors.driver import Status, run
from kondo.actors.learner import Learner, Publication, StepOrder
from kondo.actors.messages import Order, pack
from kondo.actors.setup import Settings, Setup, Task, process_seed
from kondo.actors.source_price import SourceGate


class Turn(NamedTuple):
    """One rollout of a step."""

    number: int
    """Of its order. A process works in the order of these; rollouts may arrive in another."""
    incarnation: int
    """Process that made it."""
    version: int
    """Of the weights it acted with: the step that made them."""


class Step(NamedTuple):
    """What one update was made of and did."""

    turns: tuple[Turn, ...]
    error: float
    """1 - mean reward of the acting policy."""
    trained: int
    """Samples a backward pass was paid for."""

    def ages(self, number: int) -> list[int]:
        """Return how many versions old the weights were that acted for step `number`."""
        return [number - 1 - turn.version for turn in self.turns]


class Trace(NamedTuple):
    """A whole run."""

    steps: list[Step]
    policy: Any
    """As it ended."""


Stopping = Callable[[], bool]


def on_ray(setup: Setup, settings: Settings, stopped: Stopping) -> Trace:
    """Train with real actors; ends early once stopped() is true."""
    steps: list[Step] = []

    def observe(status: Status) -> None:
        turns = tuple(Turn(o.number, o.incarnation, o.version) for o in status.orders)
        steps.append(Step(turns, status.report.error, status.report.trained))

    with tempfile.TemporaryDirectory(prefix="kondo-asynchrony-") as home:
        run(setup, settings, folder=Path(home), observe=observe, stopped=stopped)
        state = checkpoint.load(Path(home))
    policy: Any = setup.make_policy(0)
    policy.load_state_dict(state["policy"])
    return Trace(steps, policy)


def replay(
    setup: Setup,
    settings: Settings,
    turns: Sequence[tuple[Turn, ...]],
    *,
    samples_of: int,
    stopped: Stopping = lambda: False,
) -> Trace:
    """Train as the run whose turns these are, in this process; ends early once stopped().

    The learner begins with the weights of run `settings.seed`.

    Args:
        setup: the task and the policy.
        settings: of the run on Ray.
        turns: of each step.
        samples_of: the run whose inputs and actions are drawn. Its own seed draws the same again;
            another one makes the replay a sample of its own.
    """
    with tempfile.TemporaryDirectory(prefix="kondo-asynchrony-") as home:
        # Nothing will be brought back from a checkpoint.
        lasting = dataclasses.replace(settings, checkpoint_every=len(turns) + 1)
        learner = Learner(setup, lasting, Path(home))
        actors = _Actors(setup, settings, turns, samples_of)
        published = [learner.publication()]
        steps: list[Step] = []
        for number, some in enumerate(turns, start=1):
            if stopped():
                break
            made = [actors.rollout(turn, published) for turn in some]
            orders = tuple(order for order, _ in made)
            order = StepOrder(number, orders, (), actors.issued, actors.incarnations)
            report = learner.step(order, [message for _, message in made])
            published.append(learner.publication())
            steps.append(Step(some, report.error, report.trained))
    return Trace(steps, learner.policy)


class _Actors:
    """All actors of a run in one process: one policy that takes the weights of each turn."""

    def __init__(
        self, setup: Setup, settings: Settings, turns: Sequence[tuple[Turn, ...]], samples_of: int
    ):
        self._gate = SourceGate(settings)
        self._policy = setup.make_policy(0)
        ordered = sorted(turn for some in turns for turn in some)
        self.issued = 1 + max(turn.number for turn in ordered)
        self.incarnations = max(turn.incarnation for turn in ordered)
        self._tasks: dict[int, Task] = {}
        self._todo: dict[int, deque[Turn]] = {}
        for turn in ordered:
            if turn.incarnation not in self._tasks:
                seed = process_seed(samples_of, turn.incarnation)
                self._tasks[turn.incarnation] = setup.make_task(seed)
            self._todo.setdefault(turn.incarnation, deque()).append(turn)
        self._made: dict[int, tuple[Order, Any]] = {}

    def rollout(self, turn: Turn, published: Sequence[Publication]) -> tuple[Order, Any]:
        """Return the order and the message of a turn; its process makes those before it first."""
        while turn.number not in self._made:
            first = self._todo[turn.incarnation].popleft()
            self._made[first.number] = self._make(first, published[first.version])
        return self._made.pop(turn.number)

    def _make(self, turn: Turn, publication: Publication) -> tuple[Order, Any]:
        order = Order(turn.number, 0, turn.incarnation, turn.version, publication.price)
        weights = {name: torch.from_numpy(value) for name, value in publication.weights.items()}
        self._policy.load_state_dict(weights)
        task = self._tasks[turn.incarnation]
        return order, pack(task.rollout(self._policy), order, self._gate, task.unit)
