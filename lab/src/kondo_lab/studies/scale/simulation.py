"""The simulated system: actors, driver, learner and network, as `kondo.actors` has them.

    driver --order (version)--> actor: weights over the network if its machine lacks them, rollout
      ^  '--step (messages)--> learner: messages over the network, train, next version
      '------ receipts and reports: handled once a turn, however many there are

What moves it is the same as in the real driver: an actor has at most `queue` rollouts ordered and
not trained on; the learner has at most `ahead` steps; a step takes the first `per_step` rollouts
that arrived; an order names the newest version there is. Seconds come from `Costs`, log-normal.
"""

import dataclasses
import math
import random
from collections import deque
from functools import partial
from typing import NamedTuple

from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.events import Call, Clock, Shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What lies between the learner's machine and those of the actors; full duplex."""

    name: str
    bandwidth: float
    """Of the learner's machine, each way, bytes per second; actors together are never slower."""
    latency: float
    """One way, seconds."""


HERE = Network(name="one machine", bandwidth=math.inf, latency=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """Who there is, and how they are connected."""

    actors: int
    sent: float
    """Rows of each message."""
    kept: float
    """Rows of each message that are trained on."""
    network: Network = HERE
    cores: float = math.inf
    """Shared by actors, driver, learner and Ray; infinite where each has one of its own."""
    learner_speed: float = 1.0
    """Of the learner's work, Ray's apart, against the core the costs were measured on."""
    queue: int = 2
    per_step: int = 1
    ahead: int = 2
    checkpoint_every: int = 20
    prefetch: bool = False
    """Whether messages travel as soon as they are made; else the learner fetches them, one after
    another, when it has the step at hand."""
    threads: int = 2
    """Steps the learner has at hand: one at work, others whose messages are fetched meanwhile."""
    actors_per_machine: int = 1
    """Those of one machine share the weights it has fetched."""

    def __post_init__(self) -> None:
        for name in ("actors", "queue", "per_step", "ahead", "threads", "actors_per_machine"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.per_step > self.actors * self.queue:
            raise ValueError(
                f"per_step must be at most actors * queue ({self.actors * self.queue}), got "
                f"{self.per_step}: a step would wait for rollouts that no actor may make."
            )
        if not 0 <= self.kept <= self.sent:
            raise ValueError(
                f"kept must lie between 0 and sent ({self.sent}), got {self.kept}; only what is "
                f"sent is trained on."
            )

    @property
    def orders(self) -> int:
        """Rollouts ordered and not trained on, always."""
        return self.actors * self.queue


class Outcome(NamedTuple):
    """What was seen after the warm-up. Shares are of that time."""

    seconds: float
    rollouts: int
    """Trained on."""
    steps: int
    idle: float
    """Share in which the learner was between two steps."""
    actors_busy: float
    """Share of the actors' time in which they worked or waited for weights."""
    driver_busy: float
    inward: float
    """Bytes per second to the learner."""
    outward: float
    """Bytes per second of weights to the actors."""
    waiting: float
    """Messages that were ready and not yet in a step at work, mean over steps."""
    response: float
    """Seconds from an order to the end of its step, mean over rollouts."""
    staleness: list[int]
    """Of each rollout: the learner's version less the one it acted with."""

    @property
    def pace(self) -> float:
        """Rollouts per second."""
        return self.rollouts / self.seconds


class _Order(NamedTuple):
    seat: int
    version: int
    issued: float


@dataclasses.dataclass
class _Call:
    """A step the learner has at hand."""

    orders: list[_Order]
    fetched: bool = False


def simulate(costs: Costs, system: System, *, rollouts: int, warm_up: int, seed: int) -> Outcome:
    """Run until `warm_up` and then at least `rollouts` rollouts were trained on.

    The same arguments give the same outcome.
    """
    if rollouts < 1 or warm_up < 0:
        raise ValueError(
            f"rollouts must be >= 1 and warm_up >= 0, got {rollouts} and {warm_up}; nothing can be "
            f"said of no rollouts."
        )
    run = _Run(costs, system, seed)
    run.clock.after(0.0, run.start)
    before = run.until(warm_up)
    seen = len(run.staleness)
    after = run.until(before["rollouts"] + rollouts)
    total = {name: after[name] - before[name] for name in after}
    seconds = total["seconds"]
    return Outcome(
        seconds=seconds,
        rollouts=int(total["rollouts"]),
        steps=int(total["steps"]),
        idle=total["idle"] / seconds,
        actors_busy=total["acting"] / seconds / system.actors,
        driver_busy=total["driving"] / seconds,
        inward=total["inward"] / seconds,
        outward=total["outward"] / seconds,
        waiting=total["waiting"] / total["steps"],
        response=total["response"] / total["rollouts"],
        staleness=run.staleness[seen:],
    )


class _Run:
    """The state of one simulation."""

    def __init__(self, costs: Costs, system: System, seed: int):
        self.clock = Clock()
        # Sums since the start; an outcome is made of the differences of two.
        sums = ("idle", "acting", "driving", "inward", "outward", "waiting", "response")
        self._totals = dict.fromkeys(("rollouts", "steps", *sums), 0.0)
        self.staleness: list[int] = []
        self._costs, self._system = costs, system
        self._random = random.Random(seed)
        self._cores = Shared(self.clock, system.cores)
        self._links = {way: Shared(self.clock, 1) for way in ("inward", "outward")}
        self._version = self._published = 0
        # Actors: orders not begun. Machines: version -> who waits for it, None once it is there.
        self._ordered: list[deque[_Order]] = [deque() for _ in range(system.actors)]
        self._acting = [False] * system.actors
        self._acts_with = [-1] * system.actors
        machines = math.ceil(system.actors / system.actors_per_machine)
        self._stores: list[dict[int, list[Call] | None]] = [{} for _ in range(machines)]
        # Driver: what has arrived since its last turn, and what it knows.
        self._receipts: list[_Order] = []
        self._reports: list[list[_Order]] = []
        self._in_turn = False
        self._executing = 0
        self._ready: deque[_Order] = deque()
        self._planned = 0
        # Learner.
        self._submitted: deque[list[_Order]] = deque()
        self._calls: list[_Call] = []
        self._at_work = False
        self._free_since = 0.0

    def start(self) -> None:
        """Give every actor its first orders."""
        for seat in range(self._system.actors):
            for _ in range(self._system.queue):
                self._order(seat)

    def until(self, rollouts: float) -> dict[str, float]:
        """Run until that many rollouts were trained on, and return the sums since the start."""
        self.clock.run(until=lambda: self._totals["rollouts"] >= rollouts)
        return {**self._totals, "seconds": self.clock.now}

    def _travel(self, way: str, size: float, wait: float, then: Call) -> None:
        """Send that many bytes after `wait` seconds."""
        self._totals[way] += size
        seconds = size / self._system.network.bandwidth
        self.clock.after(wait, lambda: self._links[way].serve(seconds, then))

    # Driver.

    def _order(self, seat: int) -> None:
        self._executing += 1
        self._ordered[seat].append(_Order(seat, self._published, self.clock.now))
        if not self._acting[seat]:
            self._next_rollout(seat)

    def _take_turn(self) -> None:
        """Handle all that has arrived, unless a turn is under way; then it is the next one's."""
        if self._in_turn or not (self._receipts or self._reports):
            return
        self._in_turn = True
        receipts, self._receipts = self._receipts, []
        reports, self._reports = self._reports, []
        costs, arrived = self._costs, len(receipts) + len(reports)
        references = self._executing + self._planned
        work = costs.wait + costs.wait_reference * references + costs.handle * arrived
        self._totals["driving"] += work
        self._cores.serve(work, lambda: self._end_turn(receipts, reports))

    def _end_turn(self, receipts: list[_Order], reports: list[list[_Order]]) -> None:
        self._executing -= len(receipts)
        self._ready.extend(receipts)
        self._planned -= len(reports)
        self._published += len(reports)
        while len(self._ready) >= self._system.per_step and self._planned < self._system.ahead:
            taken = [self._ready.popleft() for _ in range(self._system.per_step)]
            self._planned += 1
            self.clock.after(self._costs.learner_hop, partial(self._submit, taken))
        for trained in reports:
            for order in trained:
                self._order(order.seat)
        self._in_turn = False
        self._take_turn()

    # Actors.

    def _next_rollout(self, seat: int) -> None:
        self._acting[seat] = bool(self._ordered[seat])
        if not self._acting[seat]:
            return
        order, begun = self._ordered[seat].popleft(), self.clock.now
        new = order.version != self._acts_with[seat]
        self._acts_with[seat] = order.version

        def act() -> None:
            costs, system = self._costs, self._system
            work = costs.actor_seconds(system.sent, new_weights=new)
            self._cores.serve(work * self._noise(costs.actor_spread), done)

        def done() -> None:
            self._totals["acting"] += self.clock.now - begun
            if math.isfinite(self._system.cores):
                self._cores.serve(self._costs.system, lambda: None)
            self._deliver(order)
            self._next_rollout(seat)

        # An order, then weights if they are new; both are on the learner's machine.
        first = partial(self._fetch_weights, order, act) if new else act
        self.clock.after(self._system.network.latency, first)

    def _fetch_weights(self, order: _Order, then: Call) -> None:
        store = self._stores[order.seat // self._system.actors_per_machine]
        if order.version in store:
            waiting = store[order.version]
            if waiting is None:
                then()
            else:
                waiting.append(then)
            return
        waiting = store[order.version] = [then]

        def arrived() -> None:
            store[order.version] = None
            for call in waiting:
                call()

        latency = 2 * self._system.network.latency
        self._travel("outward", self._costs.weights_bytes, latency, arrived)

    def _deliver(self, order: _Order) -> None:
        """Tell the driver; where messages travel ahead, once this one has."""

        def tell() -> None:
            self._receipts.append(order)
            self._take_turn()

        hop = self._costs.actor_hop + self._system.network.latency
        if self._system.prefetch:
            self._travel("inward", self._costs.message_bytes(self._system.sent), hop, tell)
        else:
            self.clock.after(hop, tell)

    # Learner.

    def _submit(self, orders: list[_Order]) -> None:
        self._submitted.append(orders)
        self._begin_calls()

    def _begin_calls(self) -> None:
        """Fetch the messages of as many steps as the learner has threads."""
        while self._submitted and len(self._calls) < self._system.threads:
            call = _Call(self._submitted.popleft())
            self._calls.append(call)
            self._fetch_messages(call)

    def _fetch_messages(self, call: _Call) -> None:
        def fetched() -> None:
            call.fetched = True
            self._next_step()

        if self._system.prefetch:
            fetched()
            return
        count = len(call.orders)
        size = count * self._costs.message_bytes(self._system.sent)
        # One after another: ask, then receive.
        self._travel("inward", size, 2 * self._system.network.latency * count, fetched)

    def _next_step(self) -> None:
        """Take the oldest step, once its messages are there."""
        if self._at_work or not self._calls or not self._calls[0].fetched:
            return
        self._at_work = True
        self._totals["idle"] += self.clock.now - self._free_since
        behind = [call.orders for call in self._calls[1:]] + list(self._submitted)
        self._totals["waiting"] += len(self._ready) + sum(len(orders) for orders in behind)
        costs, system, orders = self._costs, self._system, self._calls[0].orders
        work = costs.step_seconds(len(orders), system.sent, system.kept) + costs.publish
        work *= self._noise(costs.learner_spread) / system.learner_speed
        save = costs.checkpoint * ((self._version + 1) % system.checkpoint_every == 0)
        trained = partial(self._trained, orders)
        self._cores.serve(work, lambda: self.clock.after(save, trained))

    def _trained(self, orders: list[_Order]) -> None:
        self.staleness += [self._version - order.version for order in orders]
        self._version += 1
        self._totals["steps"] += 1
        self._totals["rollouts"] += len(orders)
        self._totals["response"] += sum(self.clock.now - order.issued for order in orders)
        self._free_since = self.clock.now
        self._cores.serve(self._costs.learner_gap, lambda: self._report(orders))

    def _report(self, orders: list[_Order]) -> None:
        self._at_work = False
        self._calls.pop(0)
        self._reports.append(orders)
        self._take_turn()
        self._begin_calls()
        self._next_step()

    def _noise(self, spread: float) -> float:
        """Return a factor with median 1."""
        return math.exp(spread * self._random.gauss(0.0, 1.0)) if spread else 1.0
