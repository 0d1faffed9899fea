"""The training loop. Every update goes through `kondo.backward`; methods differ in nothing else.

    task.rollout(policy) -> kondo.backward(gate, loss) -> Adam        one `TrainingRun.step`
    run A, run B, run C, run B, run C, run A, ...                     `interleave`

The sampler's log-probs are those of the current weights, so they are the screen: it is exact here
and costs no forward. Dense methods get the same tensor and so are charged no screening forward
either; choosing units is not charged to them at all (see `StepRecord.gate`).
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

import kondo
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.tasks.rollout import Task
from kondo_lab.training.arms import Arm

# Errors are means over this share of a run's steps.
WINDOW_SHARE = 0.05


class StepRecord(NamedTuple):
    """What one step did and cost; times in seconds."""

    error: float
    """1 - mean reward of the samples drawn in this step."""
    samples: int
    backward_passes: int
    """Samples a backward pass was paid for."""
    sampling: float
    """To draw inputs, sample, reward and baseline."""
    gate: float
    """To choose and gather units: screen + select + compact. 0 for dense methods."""
    forward: float
    """Forwards with a graph."""
    backward: float
    optimiser: float


class TrainingRun:
    """One policy, trained in place on one task by one arm with Adam; `seed` names the run."""

    def __init__(
        self,
        task: Task,
        policy: MLP | Decoder,
        *,
        arm: Arm,
        seed: int,
        num_steps: int,
        learning_rate: float,
    ):
        self.arm, self.seed, self.num_steps = arm, seed, num_steps
        self.records: list[StepRecord] = []
        self._task, self._policy = task, policy
        self._gate = copy.deepcopy(arm.gate)  # a gate may remember past batches
        self._optimiser = torch.optim.Adam(policy.parameters(), lr=learning_rate)

    def step(self) -> None:
        """Sample, update, and record."""
        start = time.perf_counter()
        rollout = self._task.rollout(self._policy)
        sampled = time.perf_counter()
        self._optimiser.zero_grad()
        report = kondo.backward(
            self._policy.log_prob,
            rollout.rows,
            rollout.advantages,
            gate=self._gate,
            loss=self.arm.loss,
            screen=rollout.log_probs,
            unit=self._task.unit,
        )
        updated = time.perf_counter()
        if not report.empty:
            self._optimiser.step()
        stepped = time.perf_counter()
        spent = report.seconds
        # A dense loop chooses nothing. The engine's bookkeeping would be a cost that only our
        # baseline pays, and would flatter the gate.
        chosen = (
            0.0
            if self.arm.trains_all_rows
            else spent["screen"] + spent["select"] + spent["compact"]
        )
        self.records.append(
            StepRecord(
                error=1 - float(rollout.rewards.mean()),
                samples=report.rows_seen,
                backward_passes=report.rows_trained,
                sampling=sampled - start,
                gate=chosen,
                forward=spent["forward"],
                backward=spent["backward"],
                optimiser=stepped - updated,
            )
        )

    def held_out_error(self) -> float | None:
        """Return the current policy's error on the task's held-out inputs, if it has any."""
        return self._task.held_out_error(self._policy)


def interleave(
    runs: Sequence[TrainingRun], *, rounds: int, stopped: Callable[[], bool]
) -> Iterator[int]:
    """Advance all runs side by side, one share of their steps per round; yield rounds done.

    Methods are compared by their seconds. Whatever else the machine does must hit all of them
    alike, so no run goes before another, and the order rotates. Ends early, between two steps,
    once stopped() is true.
    """
    for done in range(1, rounds + 1):
        for place in range(len(runs)):
            run = runs[(place + done) % len(runs)]
            while len(run.records) < run.num_steps * done // rounds:
                if stopped():
                    return
                run.step()
        yield done


def warm_up(make_runs: Iterable[Callable[[], TrainingRun]], *, num_steps: int = 2) -> None:
    """Pay for lazy initialisation outside the measured runs, on runs that are thrown away."""
    for make_run in make_runs:
        run = make_run()
        for _ in range(num_steps):
            run.step()


def window(num_steps: int) -> int:
    """Return how many steps an error is averaged over."""
    return max(1, round(WINDOW_SHARE * num_steps))


def mean_error(records: Sequence[StepRecord], width: int) -> float:
    """Return the mean error of the last `width` records."""
    return statistics.fmean(record.error for record in records[-width:])
