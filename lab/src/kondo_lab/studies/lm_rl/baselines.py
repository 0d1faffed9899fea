"""Unbiased gates against the baselines that everybody has: filter, PODS and dense, each tuned.

    python -m kondo_lab.studies.lm_rl.baselines RUNS.jsonl.gz 85m 300m --minutes 9 --commit C

trains jobs (model, model:noise or model:seconds) in this order, and adds a JSON line per run. Runs
that the file has are not made again. All arms have GRPO's loss and one update per rollout:

    dense N           all of N rows, without kondo
    filter N          the rows whose advantage is not 0, without kondo: dense's gradient
    PODS N            of 8 answers the 2 whose rewards differ most, of whose rewards advantages are
                      taken and by whose tokens the loss is divided, without kondo
    unbiased 10% of N, noise 1.5 of N    `kondo.UnbiasedGate`, by the sampler's log-probs

A run ends where the mean of two successive evaluations is 0.92, or after 80 steps of the larger N,
reported ones 120. An evaluation follows every 4,096 rollouts, on 1,024 prompts.

Learning rates are 1e-5 times a power of 2, with two tuning seeds, which are not reported. An arm
tries a centre (its model's), the rate above and the one below; while the best has a neighbour that
was not tried, that one. The best has the fewest rollouts to the target, a mean over seeds; of equal
ones the higher reward at the end. A run without the target counts with all its rollouts, and ends
at 1.5 times the least that its arm had needed with its seed. So no optimum is at an edge. Dense
takes the filter's rate: both have one gradient. Seconds have no part in the choice.

`baselines-rules.csv` in results/lm-rl-v2 was written before the runs and says how they are judged,
by `judge_baselines`.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kondo import UnbiasedGate
from kondo_lab.evidence import records, runs
from kondo_lab.studies.lm_rl import plane
from kondo_lab.studies.lm_rl.settings import FULL
from kondo_lab.training import starts
from kondo_lab.training.alone import Learner
from kondo_lab.training.alone import Path as Way
from kondo_lab.training.arms import Arm
from kondo_lab.training.cuda_graphs import free
from kondo_lab.training.fields import TOY, Field
from kondo_lab.training.gates import DrawnVarianceGate
from kondo_lab.training.language_arms import FILTER, LOSSES, text_arm
from kondo_lab.training.member import Member
from kondo_lab.training.programs import Shape, TextProgram
from kondo_lab.training.supervised import Start
from kondo_lab.training.worker_pool import one_thread

Line = dict[str, Any]
GRPO = LOSSES["GRPO"]
TARGET, START, REPEATS, HELD_OUT, EVERY = 0.92, 0.3, 8, 1024, 4096
STEPS = {"tuning": 80, "reported": 120}
"""At most, of the larger number of rows."""
TUNING, FIRST, NUM_SEEDS = (2000, 2001), 100, {"300m": 3}
ROWS = {"25m": (2048, 4096), "toy": (64, 128), "": (1024, 2048)}
"""Of a step; the second for gates and PODS."""
CENTRES = {"toy": 64e-5, "25m": 4e-5, "85m": 2e-5, "300m": 1e-5}
WORSE = 1.5
"""A tuning run ends at so many times the fewest rollouts."""
ROUNDS = 3


class Baseline(NamedTuple):
    """Whose runs are compared."""

    arm: Arm
    num_rows: int
    way: Way

    @property
    def tuned_as(self) -> str:
        """The arm whose learning rate it has."""
        return self.arm.name.replace("dense", "filter")


def arms(size: str, kind: str = "") -> dict[str, Baseline]:
    """Return the arms of a model by name; of the kind noise, that alone."""
    grpo, (few, many) = GRPO, ROWS.get(size, ROWS[""])
    noise = text_arm(name=f"noise 1.5 of {many}", gate=UnbiasedGate(noise=1.5), **grpo)
    unbiased = text_arm(name=f"unbiased 10% of {many}", gate=UnbiasedGate(rate=0.1), **grpo)
    by_group = DrawnVarianceGate(rate=0.25, group=REPEATS)
    pods = text_arm(name=f"PODS {many}", gate=by_group, denominator="kept", **grpo)
    found = [Baseline(text_arm(name=f"filter {n}", **grpo), n, "filtered") for n in (many, few)]
    found += [Baseline(unbiased, many, "product"), Baseline(pods, many, "filtered")]
    found += [Baseline(text_arm(name=f"dense {n}", **grpo), n, "plain") for n in (many, few)]
    if kind == "noise":
        found = [Baseline(noise, many, "product")]
    return {each.arm.name: each for each in found}


def run_of(line: Line) -> runs.Run:
    """Return a line as the study's analysis has runs, smoothed."""
    table = {name: np.array([row[name] for row in line["curve"]]) for name in line["curve"][0]}
    loop = table["seconds generate"] + table["seconds rest"] + table["seconds learner"]
    costs = {runs.ROLLOUTS: table["rollouts"], runs.ROWS: table["passes"]}
    costs |= {runs.LEARNER: table["seconds learner"], runs.LOOP: loop}
    one = runs.Run(line["arm"], line["seed"], table["step"], table["reward"], costs)
    return plane.smoothed(one)


def paid(line: Line, axis: str) -> float:
    """Return what a run had paid when it was at the target; all it had paid if it never was."""
    own = run_of(line)
    return min(runs.time_to(own, TARGET, axis), float(own.costs[axis][-1]))


def next_rate(tried: Mapping[float, Sequence[Line]], centre: float) -> tuple[float, bool]:
    """Return the rate to try next, and False; or the best one and True."""

    def rank(rate: float) -> tuple[float, float]:
        ends = [float(run_of(line).reward[-1]) for line in tried[rate]]
        return statistics.mean(paid(line, runs.ROLLOUTS) for line in tried[rate]), -sum(ends)

    first = [rate for rate in (centre, 2 * centre, centre / 2) if rate not in tried]
    best = min(tried, key=rank, default=centre)
    missing = first or [rate for rate in (best / 2, 2 * best) if rate not in tried]
    return (missing[0], False) if missing else (best, True)


class TimeUpError(Exception):
    """No time is left."""


class Runner:
    """Makes runs of one model, and keeps them in a file."""

    def __init__(self, path: Path, field: Field, shared: Line, device: torch.device, until: float):
        self.path, self.field, self.device, self.until = path, field, device, until
        self.shared = shared | {"task": f"{field.task}-{field.level}", "model": field.size}
        self.seeds = range(FIRST, FIRST + NUM_SEEDS.get(field.size, 5))
        self.lines: list[Line] = []
        if path.exists():
            self.lines = records.lines(path)
        self.learner: Learner | None = None
        self.start: Start

    def make_start(self, folder: Path) -> None:
        """Read the starts of all seeds, or make and save them."""
        path, field = folder / f"start-{self.field.name}.pt", self.field
        if path.exists():
            self.start = Start.load(path, self.device)
            return
        begun = time.monotonic()
        seeds, wanted = [*self.seeds, *TUNING], {"num_prompts": HELD_OUT, "until": START}
        self.start, points = starts.make_start(field, seeds, self.device, every=10, **wanted)
        self.start.save(path)
        took = time.monotonic() - begun
        print(f"{field.name}: starts after {points[-1].step} steps, {took:.0f} s", flush=True)

    def job(self, kind: str) -> None:
        """Make the runs of a job."""
        if kind == "seconds":
            self.time_steps()
            return
        for name, arm in arms(self.field.size, kind).items():
            self.learner = None
            free(self.device)
            rate = self.tuned(arm)
            ends = [self.run(arm, "reported", rate, seed) for seed in self.seeds]
            loop, learner = (
                statistics.mean(paid(each, axis) for each in ends)
                for axis in (runs.LOOP, runs.LEARNER)
            )
            said = f"rate {rate:g}, loop {loop:.3g} s, learner {learner:.3g} s"
            print(f"{time.strftime('%X')} {self.field.name} {name}: {said}", flush=True)

    def tuned(self, arm: Baseline) -> float:
        """Return the best rate of an arm, tried now where it was not."""
        arm = (arms(self.field.size) | arms(self.field.size, "noise"))[arm.tuned_as]
        tried: dict[float, list[Line]] = {}
        while True:
            rate, found = next_rate(tried, CENTRES[self.field.size])
            if found:
                return rate
            others = [line for several in tried.values() for line in several]
            tried[rate] = []
            for seed in TUNING:
                least = [paid(own, runs.ROLLOUTS) for own in others if own["seed"] == seed]
                most = WORSE * min(least, default=math.inf)
                tried[rate].append(self.run(arm, "tuning", rate, seed, most))

    def run(self, arm: Baseline, role: str, rate: float, seed: int, most: float = math.inf) -> Line:
        """Return a run of at most so many rollouts: the file's, or one that is made now."""
        key: Line = {"model": self.field.size, "arm": arm.arm.name, "role": role}
        key |= {"learning_rate": rate, "seed": seed}
        for line in self.lines:
            if key.items() <= line.items():
                return line
        learner = self.ready(arm, rate, seed)
        rows, every = arm.num_rows, max(1, EVERY // arm.num_rows)
        most = min(most, STEPS[role] * ROWS.get(self.field.size, ROWS[""])[1])
        curve: list[dict[str, float]] = []
        while True:
            curve.append(self.measured(learner, rows))
            recent = [row["reward"] for row in curve[-2:]]
            if len(recent) == 2 and sum(recent) / 2 >= TARGET:
                break
            if curve[-1]["rollouts"] >= most:
                break
            for _ in range(every):
                if time.monotonic() > self.until:
                    raise TimeUpError(f"{self.field.name}, {arm.arm.name}, {role}")
                learner.begin_step()
                learner.end_step()
        return self.keep(key | {"rows": rows, "path": arm.way, "curve": curve})

    def keep(self, own: Line) -> Line:
        """Add a line to the file, and return it."""
        line = self.shared | {"k": 1} | own
        records.add(self.path, [line])
        self.lines.append(line)
        return line

    def ready(self, arm: Baseline, rate: float, seed: int) -> Learner:
        """Return a learner at its start; graphs that another run of the arm recorded serve it."""
        own = Member(series=arm.arm.name, seed=seed, learning_rate=rate, arm=arm.arm)
        learner, start = self.learner, self.start.of([seed])
        if learner is not None and learner.arm == arm.arm:
            learner.restart(start, own)
            return learner
        shape = Shape(
            num_prompts=arm.num_rows // REPEATS,
            repeats=REPEATS,
            num_held_out=HELD_OUT,
            greedy=False,
        )
        self.learner = Learner(
            TextProgram(
                starts.task_of(self.field), starts.model_of(self.field, self.device), shape
            ),
            start,
            own,
            path=arm.way,
        )
        return self.learner

    @staticmethod
    def measured(learner: Learner, rows: int) -> dict[str, float]:
        """Return a row of a curve: what was paid so far, the reward, means of the last steps."""
        now = (
            {name: value[0] for name, value in learner.read().items()} if learner.num_steps else {}
        )
        stages = [now.get(f"seconds {name}", 0.0) for name in ("generate", "learner", "loop")]
        row = {
            "step": learner.num_steps,
            "seconds generate": stages[0],
            "seconds rest": stages[2] - stages[0] - stages[1],
            "seconds learner": stages[1],
            "rollouts": learner.num_steps * rows,
            "passes": learner.read_backward()[0],
            "reward": learner.evaluate()["held-out sampled reward"].item(),
        }
        if now:
            row |= {name: now[name] for name in ("entropy", "mixed groups")}
            row["share kept"] = now["kept rows"] / rows
        return {name: rounded(value) for name, value in row.items()}

    def time_steps(self) -> None:
        """Time a step of every arm in turns, by kondo and without, at the start and the target.

        Of the larger number of rows. The weights stay, and all meet the same answers.
        """
        known = arms(self.field.size) | arms(self.field.size, "noise")
        most = max(arm.num_rows for arm in known.values())
        own = {arm.arm.name: arm.arm for arm in known.values() if arm.num_rows == most}
        by_kondo = own | {f"filter {most}": text_arm(name="filter", gate=FILTER, **GRPO)}
        turns: list[tuple[str, Arm, Way]] = [
            (name, each, known[name].way) for name, each in own.items()
        ]
        turns += [(name, each, "product") for name, each in by_kondo.items()]
        turns += [(name, own[name], "filtered") for name in own if known[name].way == "product"]
        turns = [turn for place, turn in enumerate(turns) if turn not in turns[:place]]
        arm, seed = known[f"filter {most}"], self.seeds[0]
        rate = self.tuned(arm)
        steps: int = self.run(arm, "reported", rate, seed)["curve"][-1]["step"]
        self.learner = None
        free(self.device)
        curve = []
        for policy in ("start", "target"):
            learner = self.ready(arm, rate, seed)
            for _ in range(steps if policy == "target" else 0):
                learner.step()
            learner.optimiser.param_groups[0]["lr"] = 0.0
            first = learner.num_steps
            # The first half are rehearsals: packs have many shapes, and the first is recorded.
            for number in range(2 * ROUNDS):
                for name, each, way in turns:
                    learner.num_steps = first + number % ROUNDS  # the same answers for all
                    learner.arm, learner.path = each, way
                    step = learner.step()
                    row: Line = {"policy": policy, "arm": name, "path": way, "round": number}
                    row["passes"] = step.learned.rows
                    for stage in ("generate", "learner", "loop"):
                        row[f"seconds {stage}"] = rounded(step.seconds[stage])
                    curve += [row] if number >= ROUNDS else []
            self.learner = None
            free(self.device)
        self.keep(
            {"arm": "seconds", "role": "seconds", "seed": seed, "learning_rate": 0.0}
            | {"curve": curve}
        )


def rounded(value: float) -> float:
    """Return six digits of a number that is not whole."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("jobs", nargs="+", help="model, model:noise or model:seconds")
    parser.add_argument("--starts", type=Path, required=True, help="folder of supervised starts")
    parser.add_argument("--task", default="sorting")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", required=True)
    given = parser.parse_args()
    until, device = time.monotonic() + 60 * given.minutes, torch.device(given.device)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    shared = {"study": "lm-rl", "device": gpu, "torch": torch.__version__, "commit": given.commit}
    given.starts.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Field] = {field.size: field for field in (TOY, *FULL.planes)}
    runner = None
    for size, _, kind in (each.partition(":") for each in given.jobs):
        if runner is None or runner.field.size != size:
            field = dataclasses.replace(fields[size], task=given.task)
            runner = None
            free(device)
            runner = Runner(given.path, field, shared, device, until)
            runner.make_start(given.starts)
        try:
            with one_thread():
                runner.job(kind)
        except TimeUpError as error:
            print(f"no time left at {error}", flush=True)
            break


if __name__ == "__main__":
    main()
