"""Costs by the clock, from the real processes of `kondo.actors` on a real Ray.

    here      rollout, pack, validate, load, publication, save      the functions alone
    on Ray    actor.rollout, then learner.step, as the driver calls them, in ways that differ in one
              thing at a time: rows sent, rows kept, messages, new weights, published or not; and
              several at once, which shows what Ray takes between two calls

From the medians over rounds `fitted` solves for the costs of a row, a message and a step.
"""

import dataclasses
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from kondo.actors.learner import Learner, StepOrder
from kondo.actors.messages import Order, pack, validate
from kondo.actors.processes import LEARNER_THREADS, LearnerProcess, RolloutProcess
from kondo.actors.setup import Settings, Setup
from kondo.actors.source_price import EVERYTHING, Price, SourceGate, sketch
from kondo_lab.studies.scale import run
from kondo_lab.studies.scale.costs import Costs, left
from kondo_lab.studies.scale.real_runs import observe
from kondo_lab.studies.scale.settings import EVERY_ROW, NEVER, SOURCE

BURST = 6
"""Calls at once."""
MESSAGES = 4
"""Of a step with several."""
REFERENCES = (20, 2000)
"""Asked for at once when the driver's waiting is timed."""
P80_DEVIATIONS = 0.8416
"""Standard deviations between a normal's median and its 80th percentile."""

DRIVER, PROCESSOR = "driver, per rollout", "all processes, per rollout"

Samples = dict[str, list[float]]
"""What was timed -> seconds, or counts, one per round."""


class Way(NamedTuple):
    """One way to call the actor and the learner."""

    name: str
    at_source: bool
    dense: bool = False
    """Whether every row is worth training on."""
    messages: int = 1
    publish: bool = True
    burst: int = 1
    """Rollouts and then steps ordered at once."""


WAYS = (
    Way(SOURCE, at_source=True),
    Way("at source, several messages", at_source=True, messages=MESSAGES),
    Way("at source, not published", at_source=True, publish=False),
    Way("at source, several at once", at_source=True, burst=BURST),
    Way(EVERY_ROW, at_source=False),
    Way("send all, several at once", at_source=False, burst=BURST),
    Way("dense", at_source=False, dense=True),
)


class Bench:
    """One rollout process per mode and one learner, on Ray, called as the driver calls them.

    Actors of both modes are made from the learner's settings; its checkpoints go to `folder`.
    """

    def __init__(self, setup: Setup, settings: Settings, folder: Path):
        actor: Any = ray.remote(RolloutProcess).options(num_cpus=0)
        self._actors = {
            at_source: actor.remote(setup, dataclasses.replace(settings, at_source=at_source), 1)
            for at_source in (True, False)
        }
        learner: Any = ray.remote(LearnerProcess).options(
            num_cpus=0, max_concurrency=LEARNER_THREADS
        )
        self._learner = learner.remote(setup, settings, str(folder), False)
        ray.get([a.ready.remote() for a in self._actors.values()] + [self._learner.ready.remote()])
        self._weights = self._learner.publication.remote()
        first = ray.get(self._weights)
        self._version, self._price = first.version, first.price
        self.weights_bytes = sum(array.nbytes for array in first.weights.values())
        self._orders, self._step = 0, 0

    def take(self, way: Way) -> dict[str, float]:
        """Make rollouts and steps in this way once, and return what they took."""
        price = EVERYTHING if way.dense else self._price
        started = time.perf_counter()
        # With a burst every call has the same weights, as those of one turn of the driver have.
        count = way.burst * way.messages
        orders = [self._order(price) for _ in range(count)]
        call = self._actors[way.at_source].rollout.options(num_returns=2)
        made = [call.remote(order, [self._weights]) for order in orders]
        receipts = ray.get([receipt for receipt, _ in made])
        acted = time.perf_counter()
        found = self._learn(way, orders, [message for _, message in made])
        learned = time.perf_counter()
        inside, inside_learner = sum(receipts), found.pop("learner inside")
        # The first has new weights, unless nothing was published before.
        return found | {
            "actor, first": receipts[0],
            "actor, same weights": statistics.median(receipts[1:] or receipts),
            "actor calls": (acted - started) - inside,
            "learner calls": (learned - acted) - inside_learner,
        }

    def _order(self, price: Price) -> Order:
        self._orders += 1
        return Order(self._orders - 1, 0, 1, self._version, price)

    def _learn(self, way: Way, orders: list[Order], messages: list[Any]) -> dict[str, float]:
        calls: list[Any] = []
        step = self._learner.step.options(num_returns=2)
        for place in range(0, len(orders), way.messages):
            chosen = slice(place, place + way.messages)
            self._step += 1
            if len(calls) >= LEARNER_THREADS:  # as many calls at hand as the driver gives it
                ray.wait([calls[-LEARNER_THREADS][0]])
            order = StepOrder(self._step, tuple(orders[chosen]), (), self._orders, 1)
            calls.append(step.remote(order, messages[chosen], way.publish))
        reports = ray.get([report for report, _ in calls])
        if way.publish:
            # Prices stay as they were: every round keeps as much as every other.
            self._weights, self._version = calls[-1][1], self._step
        gaps = [report.idle_seconds for report in reports[1:]]
        return ({"learner gap": statistics.median(gaps)} if gaps else {}) | {
            "learner": statistics.median(report.seconds for report in reports),
            "learner inside": sum(report.seconds for report in reports),
            "kept": statistics.mean(report.trained for report in reports) / way.messages,
            "bytes": statistics.mean(report.wire_bytes for report in reports) / way.messages,
        }

    def stop(self) -> None:
        """End the processes."""
        for handle in (*self._actors.values(), self._learner):
            ray.kill(handle)


def on_ray(
    setup: Setup, settings: Settings, rounds: int, said: Callable[[int], None]
) -> tuple[Samples, int]:
    """Return "way: what" -> values over rounds, and the bytes of the weights.

    `said` is told the number of each round that is done; it may raise.
    """
    samples: Samples = {}
    shuffle = random.Random(0).shuffle
    ways = list(WAYS)
    with tempfile.TemporaryDirectory(prefix="kondo-scale-") as folder:
        bench = Bench(setup, settings, Path(folder))
        try:
            for way in ways:
                bench.take(way)  # the first call of anything is slow
            for number in range(rounds):
                shuffle(ways)  # whatever else the machine does must hit all of them alike
                for way in ways:
                    for name, value in bench.take(way).items():
                        samples.setdefault(f"{way.name}: {name}", []).append(value)
                said(number)
            return samples, bench.weights_bytes
        finally:
            bench.stop()


def here(setup: Setup, settings: Settings, rounds: int) -> Samples:
    """Return the seconds of the functions alone, in this process."""
    samples: Samples = {}

    def timed(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = call(*args, **options)
        samples.setdefault(name, []).append(time.perf_counter() - start)
        return found

    with tempfile.TemporaryDirectory(prefix="kondo-scale-") as folder:
        learner = Learner(setup, settings, Path(folder))
        task, policy = setup.make_task(1), setup.make_policy(1)
        size, unit = settings.sketch_size, task.unit
        for number in range(-1, rounds):
            order = Order(number, 0, 1, 0, learner.price)
            made = timed("rollout", task.rollout, policy)
            for name, at_source in ((SOURCE, True), (EVERY_ROW, False)):
                gate = SourceGate(dataclasses.replace(settings, at_source=at_source))
                message = timed(f"gate, sketch and pack, {name}", pack, made, order, gate, unit)
                timed(f"check, {name}", validate, message, order, learner.schema, gate)
            values = learner.gate.values(made.log_probs, made.advantages, unit)
            timed("sketch", sketch, values, size)
            timed("publish", learner.publication)
            timed("checkpoint", learner.save)
            if number < 0:
                samples.clear()  # the first call of anything is slow
    return samples


def driving(
    setup: Setup, settings: Settings, *, seconds: float, warm_up: float, rounds: int
) -> Samples:
    """Return the processor seconds per rollout of real runs with one actor that drops rows.

    Of the driver's thread, and of all processes: what is in the second and in no other cost is
    Ray's own. Neither is a pace: they are the same whatever the actor waits for.
    """
    samples: Samples = {DRIVER: [], PROCESSOR: []}
    alone = dataclasses.replace(settings, actors=1, at_source=True, steps=NEVER)
    for _ in range(rounds):
        seen = observe(setup, alone, seconds=seconds, warm_up=warm_up, interrupted=lambda: False)
        assert seen is not None
        samples[DRIVER].append(seen.driver)
        samples[PROCESSOR].append(seen.metrics[run.PROCESSOR])
    return samples


def waiting(rounds: int) -> Samples:
    """Return the seconds of a turn of the driver that asks for few and for many references."""
    holder: Any = ray.remote(_Holder).options(num_cpus=0).remote()
    samples: Samples = {}
    try:
        pending = [holder.hold.remote() for _ in range(max(REFERENCES))]
        arrived = ray.put(0)
        for number in range(-1, rounds):
            for count in REFERENCES:
                asked = [arrived, *pending[: count - 1]]
                start = time.perf_counter()
                ray.wait(asked, num_returns=1, timeout=1.0)
                ray.wait(asked, num_returns=len(asked), timeout=0)
                spent = time.perf_counter() - start
                if number >= 0:
                    samples.setdefault(f"wait, {count} references", []).append(spent)
    finally:
        ray.kill(holder)
    return samples


class _Holder:
    """Never answers."""

    def hold(self) -> None:
        """Sleep until killed."""
        time.sleep(1e6)


def fitted(samples: Mapping[str, Sequence[float]], setup: Setup, weights_bytes: int) -> Costs:
    """Return the costs that explain the medians."""
    middle = {name: statistics.median(values) for name, values in samples.items()}
    sent = {SOURCE: middle[f"{SOURCE}: kept"], EVERY_ROW: float(setup.samples)}
    header, row_bytes = _line({sent[mode]: middle[f"{mode}: bytes"] for mode in sent})
    acting, load, pack_row = solve(*_actor_equations(middle, sent))
    step, publish, message, sent_row, kept_row = solve(*_learner_equations(middle, sent))
    gap, gap_byte, actor_call = solve(*_call_equations(middle))
    learner_gap = middle[f"{SOURCE}, several at once: learner gap"]
    wait, wait_reference = _line({n: middle[f"wait, {n} references"] for n in REFERENCES})
    packing = middle[f"gate, sketch and pack, {SOURCE}"]
    # Each rollout arrives, and is then reported: two turns of the driver, if it is not behind.
    driver = middle[DRIVER]
    costs = Costs(
        samples=setup.samples,
        rollout=left(acting, packing),
        load=load,
        pack=packing,
        pack_row=pack_row,
        actor_gap=gap,
        actor_gap_byte=gap_byte,
        actor_hop=left(actor_call, driver / 2),
        system=0.0,
        wait=wait,
        wait_reference=wait_reference,
        handle=left(driver / 2, wait),
        learner_step=step,
        publish=publish,
        message=message,
        sent_row=sent_row,
        kept_row=kept_row,
        learner_gap=learner_gap,
        learner_hop=left(middle[f"{SOURCE}: learner calls"], driver / 2, learner_gap),
        checkpoint=middle["checkpoint"],
        header_bytes=header,
        row_bytes=row_bytes,
        weights_bytes=weights_bytes,
        actor_spread=spread(samples[f"{SOURCE}: actor, same weights"]),
        learner_spread=spread(samples[f"{SOURCE}: learner"]),
    )
    named = (
        costs.actor_seconds(sent[SOURCE], new_weights=True),
        costs.step_seconds(1, sent[SOURCE], sent[SOURCE]) + costs.publish + learner_gap,
        driver,
    )
    return dataclasses.replace(costs, system=left(middle[PROCESSOR], *named))


Equations = tuple[list[list[float]], list[float]]
"""Rows of factors of the unknown costs, and the seconds each row sums up to."""


def _actor_equations(middle: Mapping[str, float], sent: Mapping[str, float]) -> Equations:
    """Unknown: a rollout with its packing, new weights, a row that is sent."""
    rows = [[1.0, 1.0, sent[SOURCE]], [1.0, 0.0, sent[SOURCE]], [1.0, 0.0, sent[EVERY_ROW]]]
    return rows, [
        middle[f"{SOURCE}: actor, first"],
        middle[f"{SOURCE}, several at once: actor, same weights"],
        middle[f"{EVERY_ROW}, several at once: actor, same weights"],
    ]


def _learner_equations(middle: Mapping[str, float], sent: Mapping[str, float]) -> Equations:
    """Unknown: a step, publishing, a message, a row that is sent, a row that is kept."""
    ways = [way for way in WAYS if way.burst == 1]
    rows = []
    for way in ways:
        kept, count = middle[f"{way.name}: kept"], way.messages
        each = kept if way.at_source else sent[EVERY_ROW]
        rows.append([1.0, float(way.publish), count, count * each, count * kept])
    return rows, [middle[f"{way.name}: learner"] for way in ways]


def _call_equations(middle: Mapping[str, float]) -> Equations:
    """Unknown: what Ray takes for each rollout, for each byte, and once for all of a burst."""
    ways = [way for way in WAYS if way.messages == 1 and way.publish and not way.dense]
    rows = [[way.burst, way.burst * middle[f"{way.name}: bytes"], 1.0] for way in ways]
    return rows, [middle[f"{way.name}: actor calls"] for way in ways]


def solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return costs x >= 0 with rows x = seconds, by least squares of the relative errors.

    A cost that comes out negative is too small to be told from none: it is 0, and the others are
    solved for again.

    Example:
        >>> from kondo_lab.studies.scale.measure import solve
        >>> [round(cost, 6) for cost in solve([[1, 10], [1, 20], [1, 40]], [3.0, 4.0, 6.0])]
        [2.0, 0.1]
        >>> solve([[1, 10], [1, 20]], [3.0, 2.0])[1]
        0.0
    """
    scale = 1 / np.asarray(seconds, dtype=np.float64)
    design = np.asarray(rows, dtype=np.float64) * scale[:, None]
    costs = np.zeros(design.shape[1])
    used = list(range(design.shape[1]))
    while used:
        found, *_ = np.linalg.lstsq(design[:, used], np.ones(len(scale)), rcond=None)
        if (found >= 0).all():
            costs[used] = found
            break
        used.pop(int(found.argmin()))
    return [float(cost) for cost in costs]


def _line(points: Mapping[float, float]) -> tuple[float, float]:
    """Return value at 0 and slope of the line through two points."""
    (x, y), (other_x, other_y) = points.items()
    slope = (other_y - y) / (other_x - x)
    return y - slope * x, slope


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm, from p20 and p80: outliers do not set it."""
    low, high = np.quantile(np.asarray(values), [0.2, 0.8])
    return float(math.log(high / low) / (2 * P80_DEVIATIONS))
