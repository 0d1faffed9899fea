"""Run populations to their end: log, evaluate, show progress, stop and resume.

Populations of different shapes can run side by side. On a GPU each has a stream of its own: a small
population leaves most of the device idle, and several fill it.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kondo.run_files import load_state, save_state
from kondo_lab.training.cuda_graphs import new_stream
from kondo_lab.training.member import Member
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.population import Population, row_shape
from kondo_lab.training.programs import Program
from kondo_lab.training.record import Run

Probe = Callable[[Any], dict[str, Tensor]]
"""Measures something of a population at an evaluated step: metric -> [P]."""
Enough = Callable[[Sequence[dict[str, Any]]], bool]
"""Whether a population has been trained enough, by what was measured so far: per logged step its
"step" and its "values", metric -> [P]."""


class Trainable(Protocol):
    """What the loop needs from a population."""

    num_steps: int
    """Made so far."""

    @property
    def shown(self) -> str:
        """Metric of `read` that progress shows."""

    @property
    def overlaps(self) -> bool:
        """Whether it gets a stream of its own on a GPU."""

    @property
    def members(self) -> Sequence[Any]:
        """P of them, each with its series, seed and setting."""

    @property
    def num_rows(self) -> int:
        """Samples of a step and member."""

    def begin_step(self) -> None:
        """Queue what needs no answer from the device."""

    def end_step(self) -> None:
        """Do the rest of the step."""

    def read(self) -> dict[str, list[float]]:
        """Return metric -> [P], of the steps since the last call."""

    def read_backward(self) -> list[int]:
        """Return the rows each member has paid a backward pass for."""

    def evaluate(self) -> dict[str, Tensor]:
        """Return held-out metric -> [P]."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


LOOK_EVERY = 20
"""Steps between two checks whether the user asked to stop."""
CHECKPOINT_SECONDS = 300.0
"""Between two checkpoints of a long run: what a crash can cost."""


def side_by_side(
    program: Program, members: Sequence[Member], device: torch.device
) -> list[Population]:
    """Return one population per number of rows that the members train on.

    On a GPU they overlap; one population of all would run its groups one after the other.
    """
    by_shape: dict[tuple[int, bool], list[Member]] = {}
    for member in members:
        shape = row_shape(member.arm, program)
        by_shape.setdefault(shape, []).append(member)
    return [Population(program, some, device=device) for some in by_shape.values()]


def train(
    populations: Trainable | Sequence[Trainable],
    context: Context,
    *,
    part: str,
    num_steps: int,
    log_steps: Sequence[int],
    evaluate_steps: Sequence[int] = (),
    probe: Probe | None = None,
    enough: Enough | None = None,
) -> list[Run]:
    """Train to `num_steps` and return the runs, a row for every logged step.

    Resumes from context.checkpoint if it is there; writes it every few minutes, and when the user
    stops, to raise Stopped then.

    Args:
        populations: one, or several that share `num_steps`.
        context: progress, stop and checkpoint.
        part: written into the runs.
        num_steps: updates of each member.
        log_steps: after which steps to log; `num_steps` is always among them.
        evaluate_steps: after which steps to log, and evaluate as well; 0 measures the start.
        probe: further metrics for the evaluated steps.
        enough: asked of each population after an evaluated step; once it says so of all of them,
            the run ends there.
    """
    several = list(populations) if isinstance(populations, Sequence) else [populations]
    log_at, evaluate_at = {*log_steps, *evaluate_steps, num_steps}, set(evaluate_steps)
    histories = _resume(several, context)
    if several[0].num_steps == 0 and 0 in evaluate_at:
        histories = [[_measure(population, True, probe)] for population in several]
    cuda = context.device.type == "cuda"
    if cuda:
        # A graph that is freed takes the cuBLAS workspace of its stream along: those of earlier
        # parts must be gone before new ones are recorded, not whenever Python finds the time.
        gc.collect()
    streams = [new_stream(context.device) if each.overlaps and cuda else None for each in several]
    done, saved_at = several[0].num_steps, time.monotonic()
    while done < num_steps:
        for population, stream in zip(several, streams, strict=True):
            with _on(stream):
                population.begin_step()
        for population, stream in zip(several, streams, strict=True):
            with _on(stream):
                population.end_step()
        done += 1
        if done in log_at:
            evaluated = done in evaluate_at
            for population, stream, history in zip(several, streams, histories, strict=True):
                with _on(stream):
                    history.append(_measure(population, evaluated, probe))
            if enough is not None and evaluated and all(map(enough, histories)):
                break
        if done % LOOK_EVERY == 0 or done in log_at:
            context.progress(done / num_steps, _note(several[0].shown, histories))
            stopped = context.stopped()
            if done < num_steps and (stopped or time.monotonic() - saved_at > CHECKPOINT_SECONDS):
                _checkpoint(context, several, histories)
                saved_at = time.monotonic()
                if stopped:
                    raise Stopped(part)
    return [
        one
        for each, history in zip(several, histories, strict=True)
        for one in runs(part, each.members, each.num_rows, history, task=_task_of(each))
    ]


def _resume(several: Sequence[Trainable], context: Context) -> list[list[dict[str, Any]]]:
    """Load what a stopped run left, if anything, and return what it has measured."""
    found = context.resume(partial(_read, device=context.device))
    if found is None:
        return [[] for _ in several]
    states, histories = found
    for population, saved in zip(several, states, strict=True):
        population.load_state_dict(saved)
    return histories


def _read(
    checkpoint: Path, device: torch.device
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    state = load_state(checkpoint, device)
    return state["populations"], state["histories"]


def _checkpoint(
    context: Context, several: Sequence[Trainable], histories: list[list[dict[str, Any]]]
) -> None:
    if context.device.type == "cuda":
        # The file is written from another stream than the steps are queued on.
        torch.cuda.synchronize(context.device)
    states = [population.state_dict() for population in several]
    save_state(context.checkpoint, {"populations": states, "histories": histories})


def _measure(population: Trainable, evaluated: bool, probe: Probe | None) -> dict[str, Any]:
    values = population.read() if population.num_steps else {}
    if evaluated:
        found = population.evaluate()
        found |= probe(population) if probe is not None else {}
        values |= {name: value.tolist() for name, value in found.items()}
    backward = population.read_backward()
    return {"step": population.num_steps, "backward": backward, "values": values}


def runs(
    part: str,
    members: Sequence[Any],
    num_rows: int,
    history: Sequence[dict[str, Any]],
    *,
    task: str = "",
) -> Iterator[Run]:
    """Yield the runs of P members that see `num_rows` samples a step.

    `history` has, per logged step, its "step", "backward" [P], and "values" by metric, each [P].
    """
    for number, member in enumerate(members):
        curve = []
        for entry in history:
            row = {
                "step": entry["step"],
                "rollouts": entry["step"] * num_rows,
                "passes": entry["backward"][number],
            }
            curve.append(row | {name: own[number] for name, own in entry["values"].items()})
        yield Run(
            part=part,
            arm=member.series,
            seed=member.seed,
            x=member.setting,
            learning_rate=member.learning_rate,
            task=task,
            curve=curve,
        )


def _task_of(population: Trainable) -> str:
    """Return the title of the task that a population learns; empty where it has none."""
    task = getattr(getattr(population, "program", population), "task", None)
    return str(getattr(task, "title", ""))


def _note(metric: str, histories: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Say the mean of the last logged step."""
    last = [history[-1]["values"].get(metric, []) for history in histories if history]
    found = [value for values in last for value in values]
    return f"mean {metric} {100 * sum(found) / len(found):.1f}%" if found else ""


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of float32 products ("high": 10 bits of mantissa) and put it back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def log_and_regular(num_steps: int, *, log_points: int, regular_points: int) -> list[int]:
    """Return logged steps: dense at first, then regular, so that what is last is a mean."""
    regular = max(1, num_steps // regular_points)
    spaced = log_spaced(num_steps, log_points)
    return sorted({*spaced, *range(regular, num_steps, regular), num_steps})


def log_spaced(num_steps: int, points: int) -> list[int]:
    """Return about `points` steps from 1 to num_steps, evenly spaced in their logarithm."""
    exponents = (point / (points - 1) for point in range(points))
    return sorted({max(1, round(num_steps**exponent)) for exponent in exponents})
