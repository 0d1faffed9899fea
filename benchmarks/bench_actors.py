"""Actors on Ray: bytes on the wire, learner time, idleness, error, and recovery from kills.

    python benchmarks/bench_actors.py [--tasks digits] [--steps 200] [--actors 2] [--seeds 3]
                                      [--quick --out F]

    dense      everything is sent and trained on          the baseline of every ratio
    send-all   everything is sent, the learner gates
    at-source  actors send what is worth the price

`step_ms` is the learner's time per step: check, train, publish; rollouts are fetched while the step
before is at work. The first fifth of the steps is left out. Every contender trains the same setup
for the same number of samples, once per seed: times are pooled, errors have a standard error.

    kills      an actor dies; then two at once; then the learner
"""

import argparse
import dataclasses
import math
import os
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from harness import Row, environment, percentile, write_csv
from kondo.actors import Settings, Setup, Status, Summary, run
from kondo.actors.cluster import connected
from kondo_lab.training.actors import digits, reversal

DATA = Path(__file__).resolve().parent / "data"
RATE = 0.03
# At 1e-3 dense collapses within 80 steps at a staleness of 3, and then has nothing to train on.
LEARNING_RATE = 2e-4
DENSE, SEND_ALL, AT_SOURCE = "dense", "send-all", "at-source"
MODES: dict[str, dict[str, Any]] = {
    DENSE: {"gate": "price:-inf", "at_source": False},
    SEND_ALL: {"gate": f"delight:{RATE}", "at_source": False},
    AT_SOURCE: {"gate": f"delight:{RATE}", "at_source": True},
}
TARGET_BYTES, TARGET_IDLE, TARGET_ACTOR, TARGET_LEARNER = 1.5, 0.05, 5.0, 30.0
WARM_UP = 0.2
KILLS = "kills"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorRow(Row):
    """What actors add to the schema."""

    actors: int
    samples: int
    kept_share: float
    """Trained / accepted samples, after the warm-up."""
    wire_bytes: int
    """Sent in all messages, after the warm-up."""
    bytes_share: float
    """Of what the same messages would have been with all their rows."""
    bytes_per_rate: float
    """bytes_share / rate asked for; to be at most 1.5."""
    idle_share: float
    """Of the learner's time, waiting between two steps."""
    staleness: float
    """Mean over samples, in versions."""
    seeds: int
    error: float
    """1 - mean reward over the last fifth of the steps, mean over seeds."""
    error_se: float | None
    """Standard error over seeds; None for one."""
    held_out_error: float | None
    held_out_se: float | None
    actor_recovery_s: float | None
    """From the death of an actor to the first rollout of the process that replaced it; the longest
    after one kill, and after two at once."""
    learner_recovery_s: float | None
    """From the death of the learner to its first new step."""
    balanced: bool
    """Every produced sample is in exactly one place."""


class Record:
    """Keeps every status, and the learner's peak memory."""

    def __init__(self) -> None:
        self.statuses: list[Status] = []
        self.peak_mb = 0.0

    def __call__(self, status: Status) -> None:
        self.statuses.append(status)
        if status.report.step % 20 == 0 and psutil.pid_exists(status.learner_pid):
            size = psutil.Process(status.learner_pid).memory_info().rss
            self.peak_mb = max(self.peak_mb, float(size) / 2**20)

    def recovery(self, kind: str) -> float | None:
        """Return the longest recovery, None where nothing had to recover."""
        events = [event for status in self.statuses for event in status.events]
        return max((event.seconds for event in events if event.kind == kind), default=None)


class Killing(Record):
    """Kills an actor, then two at once, then the learner; is done when all are back."""

    def __init__(self, spares: int) -> None:
        super().__init__()
        self._spares = spares
        self._killed_actors = 0
        self._killed_learner = False

    def __call__(self, status: Status) -> None:
        super().__call__(status)
        events = [event for status in self.statuses for event in status.events]
        back = sum(event.kind == "actor back" for event in events)
        # Spares are there in all but the first seconds, and some seconds after a kill.
        if back == self._killed_actors < 3 and status.spares == self._spares:
            self._kill(status.pids[: 1 if self._killed_actors == 0 else 2])
        elif back == 3 and not self._killed_learner:
            self._killed_learner = True
            os.kill(status.learner_pid, signal.SIGKILL)

    def _kill(self, pids: Sequence[int]) -> None:
        self._killed_actors += len(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def done(self) -> bool:
        """Return whether the last of them has come back."""
        return self.recovery("learner back") is not None


class Run(NamedTuple):
    """One run of a contender."""

    record: Record
    summary: Summary

    @property
    def error(self) -> float:
        """1 - mean reward over the last fifth of the steps."""
        reports = [status.report for status in self.record.statuses]
        last = reports[-max(1, round(WARM_UP * len(reports))) :]
        return sum(report.error for report in last) / len(last)


def measure(
    name: str, setup: Setup, mode: str, settings: Settings, seeds: int, where: dict[str, Any]
) -> ActorRow:
    """Run one contender and return its line; ratios to dense are filled in later."""
    runs = []
    for seed in range(seeds):
        record = Record()
        summary = run(setup, dataclasses.replace(settings, seed=seed), observe=record)
        runs.append(Run(record, summary))
    return line(name, setup, mode, settings, runs, where)


def measure_kills(name: str, setup: Setup, settings: Settings, where: dict[str, Any]) -> ActorRow:
    """Run until actors and the learner were killed and are back."""
    record = Killing(settings.spares)
    endless = dataclasses.replace(settings, steps=10**9)
    summary = run(setup, endless, observe=record, stopped=record.done)
    return line(name, setup, KILLS, settings, [Run(record, summary)], where)


def over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, None for one value."""
    if len(values) == 1:
        return values[0], None
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def longest(runs: Sequence[Run], kind: str) -> float | None:
    """Return the longest recovery, None where nothing had to recover."""
    return max((s for one in runs if (s := one.record.recovery(kind)) is not None), default=None)


def line(
    name: str,
    setup: Setup,
    mode: str,
    settings: Settings,
    runs: Sequence[Run],
    where: dict[str, Any],
) -> ActorRow:
    """Turn the runs of a contender into a line of the CSV."""
    all_reports = [[status.report for status in one.record.statuses] for one in runs]
    steady = [report for some in all_reports for report in some[round(WARM_UP * len(some)) :]]
    times = [1e3 * report.seconds for report in steady]
    trained = sum(report.trained for report in steady)
    accepted = trained + sum(report.skipped for report in steady)
    sent = sum(report.wire_bytes for report in steady)
    full = sum(report.full_bytes for report in steady)
    idle = sum(report.idle_seconds for report in steady)
    busy = sum(report.seconds for report in steady)
    ages = sum((Counter(one.summary.staleness) for one in runs), Counter[int]())
    error, error_se = over_seeds([one.error for one in runs])
    held_out = [e for one in runs if (e := one.summary.held_out_error) is not None]
    held_out_error, held_out_se = over_seeds(held_out) if held_out else (None, None)
    rate = settings.gate.rate or 1.0
    return ActorRow(
        benchmark="actors",
        model=name,
        config=f"{setup.samples} samples per rollout, {len(all_reports[0])} steps, float32",
        contender=mode,
        rate=rate,
        unit="rollout",
        rows=setup.samples,
        tokens=setup.samples,
        rows_differentiated=round(trained / len(steady)),
        step_ms_p20=percentile(times, 0.2),
        step_ms_p50=percentile(times, 0.5),
        step_ms_p80=percentile(times, 0.8),
        speedup_p20=1.0,
        speedup_p50=1.0,
        speedup_p80=1.0,
        limit=None,
        share_of_limit=None,
        gate_overhead=None,
        stages="",
        peak_memory_mb=max(one.record.peak_mb for one in runs),
        repeats=len(steady),
        actors=settings.actors,
        samples=sum(one.summary.counts["produced"] for one in runs),
        kept_share=trained / accepted,
        wire_bytes=sent,
        bytes_share=sent / full,
        bytes_per_rate=sent / full / rate,
        idle_share=idle / (idle + busy),
        staleness=sum(age * count for age, count in ages.items()) / ages.total(),
        seeds=len(runs),
        error=error,
        error_se=error_se,
        held_out_error=held_out_error,
        held_out_se=held_out_se,
        actor_recovery_s=longest(runs, "actor back"),
        learner_recovery_s=longest(runs, "learner back"),
        balanced=all(one.summary.balanced for one in runs),
        **where,
    )


def against_dense(rows: list[ActorRow]) -> list[ActorRow]:
    """Fill in speed-ups: dense's median learner time of the same model over each own time."""
    dense = {(row.model, row.actors): row.step_ms_p50 for row in rows if row.contender == DENSE}
    found = []
    for row in rows:
        base = dense.get((row.model, row.actors), row.step_ms_p50)
        found.append(
            dataclasses.replace(
                row,
                speedup_p20=base / row.step_ms_p80,
                speedup_p50=base / row.step_ms_p50,
                speedup_p80=base / row.step_ms_p20,
            )
        )
    return found


def say(row: ActorRow) -> None:
    """Print a line as soon as it is there."""
    print(
        f"{row.model:9} {row.contender:9} actors {row.actors}  step {row.step_ms_p50:6.2f} ms  "
        f"kept {row.kept_share:6.2%}  bytes {row.bytes_share:7.2%} = {row.bytes_per_rate:.2f} x "
        f"rate  idle {row.idle_share:5.1%}  stale {row.staleness:.1f}  error {row.error:.3f}"
        f"{_spread(row.error_se)}  "
        f"back: actor {_seconds(row.actor_recovery_s)}, learner {_seconds(row.learner_recovery_s)}",
        flush=True,
    )


def verdicts(rows: list[ActorRow]) -> list[str]:
    """Compare with what was to be reached."""
    sources = [row.bytes_per_rate for row in rows if row.contender == AT_SOURCE]
    idle = min(row.idle_share for row in rows)
    kills = [row for row in rows if row.contender == KILLS]
    actor = max((row.actor_recovery_s or 0.0 for row in kills), default=0.0)
    learner = max((row.learner_recovery_s or 0.0 for row in kills), default=0.0)
    errors = [
        f"error of {row.model} with {row.actors} actors, {row.contender}: {row.error:.3f}"
        f"{_spread(row.error_se)} over {row.seeds} seeds"
        for row in rows
        if row.contender != KILLS
    ]
    return [
        f"bytes at the source: at most {max(sources):.2f} x rate (to reach: {TARGET_BYTES})",
        f"learner idle with enough actors: {idle:.1%} (to reach: {TARGET_IDLE:.0%})",
        f"back after a kill: actor {actor:.1f} s (to reach: {TARGET_ACTOR:g}), learner "
        f"{learner:.1f} s (to reach: {TARGET_LEARNER:g})",
        f"accounts exact in all runs: {all(row.balanced for row in rows)}",
        *errors,
    ]


def _spread(se: float | None) -> str:
    return "" if se is None else f" +- {se:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["digits", "reversal"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--actors", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=3, help="runs of every contender")
    parser.add_argument("--commit", help="where there is no repository")
    parser.add_argument("--quick", action="store_true", help="a trial whose numbers mean nothing")
    parser.add_argument("--out", type=Path, default=DATA / "actors_cpu.csv")
    options = parser.parse_args()
    if options.quick and options.out == DATA / "actors_cpu.csv":
        parser.error("--quick needs --out: its numbers must not replace measured ones.")
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Setup]] = {
        "digits": lambda: digits(batch=100) if options.quick else digits(),
        "reversal": lambda: reversal(num_prompts=10) if options.quick else reversal(),
    }
    where = environment(torch.device("cpu"), options.commit)
    rows: list[ActorRow] = []
    with connected():
        for task in options.tasks:
            for actors in options.actors:
                for mode, choice in MODES.items():
                    steps, seeds = (10, 1) if options.quick else (options.steps, options.seeds)
                    settings = Settings(
                        actors=actors, steps=steps, learning_rate=LEARNING_RATE, **choice
                    )
                    rows.append(measure(task, makers[task](), mode, settings, seeds, where))
                    say(rows[-1])
            settings = Settings(actors=options.actors[0])
            rows.append(measure_kills(task, makers[task](), settings, where))
            say(rows[-1])
    write_csv(options.out, against_dense(rows))
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
