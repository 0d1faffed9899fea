"""Actors on Ray: bytes on the wire, learner time, learner idleness, and recovery from kills.

    python benchmarks/bench_actors.py [--tasks digits] [--steps 200] [--actors 2] [--quick --out F]

    dense      everything is sent and trained on          the baseline of every ratio
    send-all   everything is sent, the learner gates
    at-source  actors send what is worth the price

`step_ms` is the learner's time per step: fetch, check, train, publish. The first fifth of the steps
is left out. Every contender trains the same setup for the same number of samples.
"""

import argparse
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from harness import Row, environment, percentile, write_csv
from kondo.distributed.ray import Settings, Setup, Status, Summary, run
from kondo.distributed.ray.cluster import connected
from kondo.lab.actors import digits, reversal

DATA = Path(__file__).resolve().parent / "data"
RATE = 0.03
# At 1e-3 dense collapses within 80 steps at a staleness of 3, and then has nothing to train on.
LEARNING_RATE = 2e-4
DENSE, SEND_ALL, AT_SOURCE = "dense", "send-all", "at-source"
MODES: dict[str, dict[str, Any]] = {
    DENSE: {"rate": None, "price": -float("inf"), "at_source": False},
    SEND_ALL: {"rate": RATE, "at_source": False},
    AT_SOURCE: {"rate": RATE, "at_source": True},
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
    error: float
    """1 - mean reward over the last fifth of the steps."""
    held_out_error: float | None
    actor_recovery_s: float | None
    """From the death of an actor to the first rollout of the process that replaced it."""
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
    """Kills an actor, and once it is back the learner; is done when both are back."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: set[str] = set()

    def __call__(self, status: Status) -> None:
        super().__call__(status)
        # A spare is there in all but the first seconds of a run.
        if status.spares and "actor" not in self._asked:
            self._kill("actor", status.pids[0])
        if self.recovery("actor back") is not None and "learner" not in self._asked:
            self._kill("learner", status.learner_pid)

    def _kill(self, who: str, pid: int) -> None:
        self._asked.add(who)
        os.kill(pid, signal.SIGKILL)

    def done(self) -> bool:
        """Return whether both have come back."""
        return self.recovery("learner back") is not None


def measure(
    name: str, setup: Setup, mode: str, settings: Settings, where: dict[str, Any]
) -> ActorRow:
    """Run one contender and return its line; ratios to dense are filled in later."""
    record = Record()
    summary = run(setup, settings, observe=record)
    return line(name, setup, mode, settings, record, summary, where)


def measure_kills(name: str, setup: Setup, settings: Settings, where: dict[str, Any]) -> ActorRow:
    """Run until an actor and the learner were killed and are back."""
    record = Killing()
    endless = dataclasses.replace(settings, steps=10**9)
    summary = run(setup, endless, observe=record, stopped=record.done)
    return line(name, setup, KILLS, settings, record, summary, where)


def line(
    name: str,
    setup: Setup,
    mode: str,
    settings: Settings,
    record: Record,
    summary: Summary,
    where: dict[str, Any],
) -> ActorRow:
    """Turn one run into a line of the CSV."""
    reports = [status.report for status in record.statuses]
    steady = reports[round(WARM_UP * len(reports)) :]
    last = reports[-max(1, round(WARM_UP * len(reports))) :]
    times = [1e3 * report.seconds for report in steady]
    trained = sum(report.trained for report in steady)
    accepted = trained + sum(report.skipped for report in steady)
    sent = sum(report.wire_bytes for report in steady)
    full = sum(report.full_bytes for report in steady)
    idle = sum(report.idle_seconds for report in steady)
    busy = sum(report.seconds for report in steady)
    rate = settings.rate or 1.0
    return ActorRow(
        benchmark="actors",
        model=name,
        config=f"{setup.samples} samples per rollout, {len(reports)} steps, float32",
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
        peak_memory_mb=record.peak_mb,
        repeats=len(steady),
        actors=settings.actors,
        samples=summary.counts["produced"],
        kept_share=trained / accepted,
        wire_bytes=sent,
        bytes_share=sent / full,
        bytes_per_rate=sent / full / rate,
        idle_share=idle / (idle + busy),
        staleness=sum(age * n for age, n in summary.staleness.items())
        / sum(summary.staleness.values()),
        error=sum(report.error for report in last) / len(last),
        held_out_error=summary.held_out_error,
        actor_recovery_s=record.recovery("actor back"),
        learner_recovery_s=record.recovery("learner back"),
        balanced=summary.balanced,
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
        f"rate  idle {row.idle_share:5.1%}  stale {row.staleness:.1f}  error {row.error:.3f}  "
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
    return [
        f"bytes at the source: at most {max(sources):.2f} x rate (to reach: {TARGET_BYTES})",
        f"learner idle with enough actors: {idle:.1%} (to reach: {TARGET_IDLE:.0%})",
        f"back after a kill: actor {actor:.1f} s (to reach: {TARGET_ACTOR:g}), learner "
        f"{learner:.1f} s (to reach: {TARGET_LEARNER:g})",
        f"accounts exact in all runs: {all(row.balanced for row in rows)}",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["digits", "reversal"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--actors", type=int, nargs="+", default=[2])
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
                    steps = 10 if options.quick else options.steps
                    settings = Settings(
                        actors=actors, steps=steps, learning_rate=LEARNING_RATE, **choice
                    )
                    rows.append(measure(task, makers[task](), mode, settings, where))
                    say(rows[-1])
            settings = Settings(actors=options.actors[0], rate=RATE)
            rows.append(measure_kills(task, makers[task](), settings, where))
            say(rows[-1])
    write_csv(options.out, against_dense(rows))
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
