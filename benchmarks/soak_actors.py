"""Train for a long time while processes are killed at random; memory flat, accounts exact.

    python benchmarks/soak_actors.py --minutes 20 [--actors 3] [--every 4] [--out FILE]

Every few seconds a rollout process, now and then the learner, gets SIGKILL. Ends with status 1 if
the accounts do not balance, an order was used twice, or a process that lived all the time grew.
"""

import argparse
import csv
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from kondo.actors import Settings, Status, Summary, log, run
from kondo.actors.cluster import connected
from kondo_lab.training.actors import digits

LEARNER_SHARE = 0.15
"""Of the kills."""
MAX_GROWTH = 0.15
"""From the second quarter of the run to the last, of any process that lives all the time."""
SAMPLE_SECONDS = 2.0
LASTING = ("driver", "raylet", "gcs_server")
COLUMNS = ("seconds", "step", *(f"{name}_mb" for name in LASTING), "learner_mb", "kills")


class Killer:
    """Kills, and writes down how large everything is."""

    def __init__(self, every: float, seed: int):
        self._every, self._random = every, random.Random(seed)
        self._next = time.monotonic() + every
        self._sample = 0.0
        self.kills = {"actor": 0, "learner": 0}
        self.recoveries: dict[str, list[float]] = {"actor back": [], "learner back": []}
        self.samples: list[tuple[float, ...]] = []

    def __call__(self, status: Status) -> None:
        for event in status.events:
            if event.kind in self.recoveries:
                self.recoveries[event.kind].append(event.seconds)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every * self._random.uniform(0.5, 1.5)
            self._kill(status)
        if now >= self._sample:
            self._sample = now + SAMPLE_SECONDS
            self.samples.append(self._measure(status))

    def _kill(self, status: Status) -> None:
        alive = [pid for pid in status.pids if pid]
        learner = self._random.random() < LEARNER_SHARE
        if not learner and not alive:
            return
        victim = status.learner_pid if learner else self._random.choice(alive)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return  # it was killed a moment ago, and nobody has noticed yet
        self.kills["learner" if learner else "actor"] += 1

    def _measure(self, status: Status) -> tuple[float, ...]:
        sizes = {"driver": _megabytes(os.getpid())}
        for child in psutil.Process().children():
            name = child.name()
            if name in LASTING:
                sizes[name] = _megabytes(child.pid)
        lasting = [sizes.get(name, 0.0) for name in LASTING]
        learner = _megabytes(status.learner_pid)
        return (status.seconds, status.report.step, *lasting, learner, sum(self.kills.values()))

    def growth(self) -> dict[str, float]:
        """Return how much each lasting process grew from the second quarter to the last."""
        quarter = len(self.samples) // 4
        grown = {}
        for place, name in enumerate(LASTING, start=2):
            sizes = [sample[place] for sample in self.samples]
            before = sum(sizes[quarter : 2 * quarter]) / max(1, quarter)
            after = sum(sizes[3 * quarter :]) / max(1, len(sizes) - 3 * quarter)
            grown[name] = after / before - 1 if before else 0.0
        return grown


def _megabytes(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def orders_used_twice(home: Path) -> int:
    """Count, from the log alone, orders that were trained on twice, or trained on and lost."""
    lines = [line for line in log.lines(home) if "orders" in line]
    used = [number for line in lines for number in line["orders"]]
    lost = [number for line in lines for number, _ in line["lost"]]
    return len(used) + len(lost) - len({*used, *lost})


def soak(minutes: float, actors: int, every: float, home: Path) -> tuple[Summary, Killer]:
    """Run, killing, for some minutes."""
    killer, end = Killer(every, seed=0), time.monotonic() + 60 * minutes
    settings = Settings(actors=actors, steps=10**9, checkpoint_every=20, rollout_timeout=20.0)
    summary = run(
        digits(batch=200, width=64),
        settings,
        folder=home,
        observe=killer,
        stopped=lambda: time.monotonic() > end,
    )
    return summary, killer


def report(summary: Summary, killer: Killer, twice: int) -> dict[str, Any]:
    """Return what is to be told."""
    return {
        "steps": summary.step,
        "counts": summary.counts,
        "balanced": summary.balanced,
        "orders_used_twice": twice,
        "duplicates": summary.duplicates,
        "lost": summary.lost,
        "quarantined": summary.quarantined,
        "kills": killer.kills,
        "growth": {name: round(grown, 4) for name, grown in killer.growth().items()},
        "recovery_seconds_p50_max": {
            kind: [round(sorted(times)[len(times) // 2], 2), round(max(times), 2)]
            for kind, times in killer.recoveries.items()
            if times
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    parser.add_argument("--out", type=Path, help="CSV of sizes over time")
    options = parser.parse_args()
    with connected(), tempfile.TemporaryDirectory() as folder:
        summary, killer = soak(options.minutes, options.actors, options.every, Path(folder))
        twice = orders_used_twice(Path(folder))
    told = report(summary, killer, twice)
    print(json.dumps(told, indent=2))
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([f"{v:.6g}" for v in sample] for sample in killer.samples)
    sound = summary.balanced and twice == 0 and summary.duplicates == 0
    flat = max(killer.growth().values()) <= MAX_GROWTH
    return 0 if sound and flat else 1


if __name__ == "__main__":
    sys.exit(main())
