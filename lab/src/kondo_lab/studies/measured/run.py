"""Time one loop step of every method, round by round, and record ratios inside each round.

    sample | zero_grad, learn | Adam        one turn; at each | the clock waits for the device

A dense learner is plain PyTorch, as somebody without a gate writes it: our engine's bookkeeping is
a cost that only the gate pays. Gated learners go through `kondo.backward`.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import kondo
from kondo import losses
from kondo_lab.studies.measured.settings import RATE, Settings, Shape
from kondo_lab.studies.measured.workloads import Workload, build
from kondo_lab.tasks.rollout import Rollout
from kondo_lab.training.losses import Loss
from kondo_lab.training.part import Context, Part, Stopped
from kondo_lab.training.record import Log, Run

PG, DG = "PG", "DG"
FREE, EXACT = f"DG-K {100 * RATE:g}% free screen", f"DG-K {100 * RATE:g}% exact screen"
STAGES = "stages"
"""The turn that times the dense forward and backward one by one. A wait between the two would be a
cost that only PG pays, so PG's own turns have none."""

# Metrics.
LEARNER, LOOP = "learner speed-up", "loop speed-up"
COUNTED = "learner speed-up, cost model"
COST_RATIO = "backward / forward seconds"
LEFT_OUT = "left out, gigaflops of a dense step"

# A step shorter than this is run several times a turn: one sample of it would be mostly noise.
MIN_TURN_SECONDS = 0.05
MAX_SAMPLES_PER_TURN = 3
WARM_UP_TURNS = 2

Learner = Callable[[Rollout], kondo.Report | None]


def parts(settings: Settings) -> list[Part]:
    """Return one part per workload."""
    return [
        Part(
            name=shape.name,
            run=partial(_measure, settings, place),
            work=1 + 0.01 * shape.gigaflops,  # a launch-bound step and one of 100 gigaflops
        )
        for place, shape in enumerate(settings.shapes)
    ]


def learners(work: Workload, rate: float) -> dict[str, Learner]:
    """Return every method's way from a rollout to gradients in `.grad`."""

    def dense(loss: Loss, rollout: Rollout) -> None:
        dense_loss(work, rollout, loss).backward()  # type: ignore[no-untyped-call]

    def gated(free: bool, gate: kondo.Gate, rollout: Rollout) -> kondo.Report:
        return kondo.backward(
            work.policy.log_prob,
            rollout.rows,
            rollout.advantages,
            gate=gate,
            screen=rollout.log_probs if free else None,
            unit=work.unit,
        )

    return {
        PG: partial(dense, losses.pg),
        DG: partial(dense, losses.dg),
        FREE: partial(gated, True, kondo.Gate(rate=rate)),
        EXACT: partial(gated, False, kondo.Gate(rate=rate)),
    }


def dense_loss(work: Workload, rollout: Rollout, loss: Loss) -> torch.Tensor:
    """Return the mean loss of every row, with a graph."""
    return loss(work.policy.log_prob(rollout.rows), rollout.advantages).mean()


def cost_model(series: str, ratio: float, kept: float) -> float:
    """Return the learner speed-up over PG that counting passes predicts, (1 + c) / cost.

    In forwards: a dense row costs 1 + c, a screened one 1 unless its log-probs are known already,
    and the share `kept` of rows 1 + c each.

    Example:
        >>> from kondo_lab.studies.measured.run import EXACT, FREE, cost_model
        >>> cost_model(FREE, 3.0, 0.25), cost_model(EXACT, 3.0, 0.25)
        (4.0, 2.0)
    """
    dense = 1 + ratio
    return dense / {PG: dense, DG: dense, FREE: kept * dense, EXACT: 1 + kept * dense}[series]


class _Turn(NamedTuple):
    seconds: dict[str, float]
    """By stage."""
    kept: int
    """Rows differentiated."""


def _measure(settings: Settings, place: int, context: Context) -> list[Run]:
    """Return the runs of one workload. Seeds are rounds; setting: the workload's place."""
    shape, device = settings.shapes[place], context.device
    log = Log(shape.name, task=shape.name, learning_rate=settings.learning_rate)
    if device.type == "cpu" and shape.gigaflops > settings.max_cpu_gigaflops:
        left_out = {LEFT_OUT: shape.gigaflops}
        log.add(PG, 0, left_out, x=place, rollouts=shape.rows, passes=shape.rows)
        return log.runs()
    work = build(shape, learning_rate=settings.learning_rate, device=device)
    turns: dict[str, Callable[[], _Turn]] = {
        name: partial(_loop_step, work, learner, device)
        for name, learner in learners(work, settings.rate).items()
    }
    turns[STAGES] = partial(_dense_stages, work, device)
    for turn in turns.values():
        for _ in range(WARM_UP_TURNS):
            turn()
    order = list(turns)
    shuffle = random.Random(0).shuffle
    for number in range(settings.rounds):
        if context.stopped():
            raise Stopped(shape.name)  # nothing to save: a part takes seconds to a minute
        shuffle(order)  # whatever else the machine does must hit all of them alike
        taken = {name: _take(turns[name]) for name in order}
        _log_round(log, shape, place, number, taken)
        done = (number + 1) / settings.rounds
        context.progress(done, f"dense step {1e3 * taken[PG].seconds['learner']:.3g} ms")
    return log.runs()


def _take(turn: Callable[[], _Turn]) -> _Turn:
    """Return the medians of a turn's samples."""
    start = time.perf_counter()
    samples = [turn()]
    while time.perf_counter() - start < MIN_TURN_SECONDS and len(samples) < MAX_SAMPLES_PER_TURN:
        samples.append(turn())
    return _Turn(
        {name: statistics.median(s.seconds[name] for s in samples) for name in samples[0].seconds},
        samples[-1].kept,
    )


def _loop_step(work: Workload, learner: Learner, device: torch.device) -> _Turn:
    """Sample, learn, and step Adam."""
    start = _now(device)
    rollout = work.rollout()
    sampled = _now(device)
    work.optimiser.zero_grad()
    report = learner(rollout)
    learned = _now(device)
    work.optimiser.step()
    stepped = _now(device)
    seconds = {
        "sampling": sampled - start,
        "learner": learned - sampled,
        "optimiser": stepped - learned,
        "loop": stepped - start,
    }
    if report is None:
        return _Turn(seconds, work.rows)
    spent = report.seconds
    gate = spent["select"] + spent["compact"]
    stages = {name: spent[name] for name in ("screen", "forward", "backward")} | {"gate": gate}
    return _Turn(seconds | stages, report.rows_trained)


def _dense_stages(work: Workload, device: torch.device) -> _Turn:
    """Take the dense learner's forward and backward apart."""
    rollout = work.rollout()
    work.optimiser.zero_grad()
    start = _now(device)
    loss = dense_loss(work, rollout, losses.pg)
    middle = _now(device)
    loss.backward()  # type: ignore[no-untyped-call]
    return _Turn({"forward": middle - start, "backward": _now(device) - middle}, work.rows)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _log_round(log: Log, shape: Shape, place: int, number: int, taken: dict[str, _Turn]) -> None:
    """Log one round's seconds, and its ratios to the PG of the same round."""
    stages, dense = taken[STAGES].seconds, taken[PG].seconds
    ratio = stages["backward"] / stages["forward"]
    for series in (PG, DG, FREE, EXACT):
        seconds, kept = taken[series]
        values = {f"seconds {stage}": spent for stage, spent in seconds.items()}
        values[LEARNER] = dense["learner"] / seconds["learner"]
        values[LOOP] = dense["loop"] / seconds["loop"]
        values[COUNTED] = cost_model(series, ratio, kept / shape.rows)
        if series == PG:
            values |= {f"seconds {stage}": spent for stage, spent in stages.items()}
            values[COST_RATIO] = ratio
        log.add(series, number, values, x=place, rollouts=shape.rows, passes=kept)
