"""A run of actors whose processes are killed, stopped and lied to; its accounts must add up.

One case is one run of the command in a process of its own, from its first start over some resumes
to its last checkpoint. What is checked comes from its files alone, read here with json and torch:

    log.jsonl       no step without a line, but those that a resume names; no order used twice
    checkpoint.pt   loads, is finite, and its ledger adds up and agrees with the log
    processes       none is left
"""

import contextlib
import itertools
import json
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from actors import quick_command
from actors.toys import REASON, SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # it has its own deadlines

# Deadlines of the run: long for a busy machine, short to wait for.
DEADLINES = {"rollout_timeout": 4.0, "step_timeout": 8.0, "start_timeout": 60.0}
PATIENCE = 240.0
"""Seconds until what must happen has not happened."""
# Ray's own helpers end by themselves up to two minutes after a driver that was killed.
HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def test_actors(campaign):
    campaign.run(chaos)


def chaos(draw, counts):
    # A short name: Ray puts sockets there.
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run = Run(draw, counts, Path(folder))
        try:
            run.start()
            for _ in range(draw.randint(5, 10)):
                run.await_steps()
                run.disturb()
            run.await_steps()
            run.end(draw.choice((signal.SIGINT, signal.SIGTERM)))
            check_accounts(run.home, counts)
        except BaseException as error:
            error.add_note("\n".join([*run.story, run.printed()[-6000:]]))
            raise
        finally:
            run.clean_up()


class Run:
    """One run of the command, and what is done to it."""

    def __init__(self, draw, counts, folder):
        self._draw, self._counts, self._folder = draw, counts, folder
        self.home, self.story, self._began = folder / "run", [], time.monotonic()
        self._process, self._stopped = None, []
        self._seen = set()  # every process of the run, Ray's too
        gate = draw.choice(("delight:0.25", "unbiased:0.25", "variance:0.25"))
        actors, sending = draw.randint(1, 3), draw.choice(((), ("--send-all",)))
        self._options = ("--actors", str(actors), "--gate", gate, *sending)
        self._settings = {
            "checkpoint_every": draw.choice((1, 5, 20, 50)),
            "spares": draw.randint(0, 2),
            "queue": draw.randint(1, 3),
            "max_failures": 50,
            **DEADLINES,
        }
        self._tell(f"{self._options} {self._settings}")

    def _tell(self, what):
        self.story.append(f"{time.monotonic() - self._began:.1f} s: {what}")

    def start(self, *more):
        with (self._folder / "out").open("ab") as out:
            self._process = quick_command.start(
                *(self.home, "--steps", "1000000", *self._options, *more),
                task="actors.toys:liars",
                popen={"stdout": out, "stderr": out, "env": {"TMPDIR": str(self._folder)}},
                **self._settings,
            )

    def printed(self):
        return (self._folder / "out").read_text(errors="replace")

    def await_steps(self):
        """Wait until the run goes on."""
        before, until = len(lines(self.home)), time.monotonic() + PATIENCE
        wanted = self._draw.randint(1, 10)
        while sum("orders" in line for line in lines(self.home)[before:]) < wanted:
            self._look()
            assert self._process.poll() is None, f"the run ended: {self._process.returncode}"
            assert time.monotonic() < until, f"no {wanted} steps in {PATIENCE:g} s"
            time.sleep(0.05)

    def disturb(self):
        """Do something to the run."""
        kinds = {self._kill: 5, self._stop: 5, self._pause_driver: 1, self._end_and_resume: 3}
        self._draw.choices(list(kinds), list(kinds.values()))[0]()
        time.sleep(self._draw.uniform(0.0, 1.5))
        self._wake(self._draw.random())

    def _look(self):
        """Remember every process of the run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._process.pid)
            self._seen |= {driver, *driver.children(recursive=True)}

    def _victim(self):
        """Return the learner or an actor."""
        self._look()
        wanted = "ray::LearnerProcess" if self._draw.random() < 0.4 else "ray::RolloutProcess"
        found = [one for one in self._seen if title(one).startswith(wanted)]
        return self._draw.choice(sorted(found, key=lambda one: one.pid)) if found else None

    def _signal(self, process, number, what):
        with contextlib.suppress(psutil.NoSuchProcess):
            who = "driver" if process.pid == self._process.pid else title(process)
            self._tell(f"{who} {signal.Signals(number).name}")
            process.send_signal(number)
            self._counts[what] += 1

    def _kill(self):
        if (victim := self._victim()) is not None:
            self._signal(victim, signal.SIGKILL, "kills")

    def _stop(self):
        if (victim := self._victim()) is not None:
            self._signal(victim, signal.SIGSTOP, "stops")
            self._stopped.append(victim)

    def _wake(self, share):
        """Let some of the stopped processes go on; the others are left to the run's deadlines."""
        for victim in self._stopped:
            if self._draw.random() < share:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
        self._stopped.clear()

    def _pause_driver(self):
        driver = psutil.Process(self._process.pid)
        self._signal(driver, signal.SIGSTOP, "stops")
        time.sleep(self._draw.uniform(0.5, 10.0))
        driver.send_signal(signal.SIGCONT)

    def _end_and_resume(self):
        kinds = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
        self.end(self._draw.choice(kinds))
        self._draw.choice((self._tear, self._garble, self._damage, lambda: None))()
        self._counts["resumes"] += 1
        self._tell("resume")
        self.start("--resume")

    def end(self, number):
        """End the driver by a signal, and check what it leaves."""
        self._look()
        driver = psutil.Process(self._process.pid)
        self._signal(driver, number, "kills" if number == signal.SIGKILL else "signals")
        status = self._process.wait(PATIENCE)
        if number == signal.SIGKILL:
            assert status == -number
            self._check_gone(HELPERS)
            self._kill_all()  # the helpers: nobody waits for them
            return
        assert status == 128 + number, status
        self._check_gone(())
        last = lines(self.home)[-1]
        assert last["event"] == "finished", last
        assert last["balanced"], last
        assert last["duplicates"] == 0, last
        assert last["step"] == load(self.home)["step"] == last_step(self.home)

    def _check_gone(self, besides):
        """Check that no process of the run is left; a stopped learner must not wake up later."""
        until = time.monotonic() + 60.0
        while left := [one for one in self._seen if alive(one) and title(one) not in besides]:
            assert time.monotonic() < until, f"left behind: {[title(one) for one in left]}"
            time.sleep(0.1)

    def _refused(self, told):
        """Check that a resume ends, with a line that says why."""
        before = len(self.printed())
        self.start("--resume")
        assert self._process.wait(PATIENCE) == 1
        assert told in self.printed()[before:], told
        self._counts["refusals"] += 1

    def _tear(self):
        """A line of the log that was cut off is dropped."""
        with (self.home / "log.jsonl").open("ab") as file:
            file.write(b'{"step": 3, "err'[: self._draw.randint(1, 16)])
        self._tell("torn line")
        self._counts["damages"] += 1

    def _garble(self):
        """A line that is none is named; without it the run resumes."""
        path = self.home / "log.jsonl"
        content = path.read_bytes().split(b"\n")
        place = self._draw.randrange(len(content) - 1)
        garbled = [*content[:place], b"\x00{7", *content[place:]]
        path.write_bytes(b"\n".join(garbled))
        self._tell(f"garbled line {place + 1}")
        self._counts["damages"] += 1
        self._refused(f"log.jsonl is damaged: line {place + 1} is not a JSON object.")
        path.write_bytes(b"\n".join(content))

    def _damage(self):
        """A damaged checkpoint is refused and set aside; with a good copy the run resumes."""
        path = self.home / "checkpoint.pt"
        whole = path.read_bytes()
        path.write_bytes(whole[: self._draw.randrange(len(whole))])
        self._tell("damaged checkpoint")
        self._counts["damages"] += 1
        self._refused("checkpoint.pt is damaged")
        aside = [one for one in self.home.iterdir() if ".damaged" in one.name]
        assert not path.exists()
        assert len(aside) == 1
        aside[0].unlink()
        path.write_bytes(whole)

    def clean_up(self):
        """Leave nothing on this machine, whatever was found."""
        self._look()
        self._kill_all()
        self._process.wait()

    def _kill_all(self):
        for one in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def title(process):
    """Return the first word of a command line: Ray writes there what a process is."""
    try:
        return (process.cmdline() or [""])[0].strip().partition(".")[0]
    except psutil.NoSuchProcess:
        return ""


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(home):
    """Return the whole lines of the log."""
    path = home / "log.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def last_step(home):
    """Return the step that was logged last: a resumed run makes those since its checkpoint anew."""
    return next((line["step"] for line in reversed(lines(home)) if "orders" in line), 0)


def load(home):
    return torch.load(home / "checkpoint.pt", weights_only=True)


def history(home):
    """Return the steps that count, in their order, and check that none is missing.

    A resume goes on from the checkpoint: what the log has beyond it was done by a run that ended
    and does not count. Steps that a killed driver did not write are named when the run resumes.
    """
    steps, unlogged = {}, set()
    for line in lines(home):
        if line.get("event") == "resumed":
            steps = {step: found for step, found in steps.items() if step <= line["step"]}
            assert sorted(line["unlogged"]) == line["unlogged"]
            unlogged = {step for step in unlogged if step <= line["step"]} | {*line["unlogged"]}
        elif "orders" in line:
            assert line["step"] not in steps, f"step {line['step']} twice"
            steps[line["step"]] = line
    assert not unlogged & set(steps)
    assert sorted(unlogged | set(steps)) == list(range(1, max(steps) + 1))
    return [steps[step] for step in sorted(steps)]


def check_accounts(home, counts):
    """Check that every sample is in one place, by the log and by the ledger."""
    steps, state = history(home), load(home)
    ledger = state["ledger"]
    refused = [found for line in steps for found in line["quarantined"]]
    assert {reason for _, reason, _ in refused} <= set(REASON.values())
    # No order is used twice, or used and lost.
    used = [number for line in steps for number in line["orders"]]
    lost = [number for line in steps for number, _ in line["lost"]]
    assert len({*used, *lost}) == len(used) + len(lost)
    given = [number for line in lines(home) for number in line.get("orders", ())]
    assert len(set(given)) == len(given), "an order of a run that ended was given again"
    settled = {*range(ledger["below"]), *ledger["settled"]}
    assert {*used, *lost} <= settled
    assert max(settled, default=-1) < ledger["issued"]
    # The ledger adds up.
    sums = {name: sum(ledger[name].values()) for name in ("quarantined", "lost")}
    sums |= {name: ledger[name] for name in ("trained", "skipped")}
    assert sum(sums.values()) == len(settled) * SAMPLES
    assert ledger["duplicates"] == 0
    # And it agrees with the log, step by step.
    for earlier, later in itertools.pairwise(steps):
        if later["step"] != earlier["step"] + 1:
            continue  # a step without a line between them
        grown = {name: later["counts"][name] - earlier["counts"][name] for name in sums}
        assert grown == {
            "trained": later["trained"],
            "skipped": later["skipped"],
            "quarantined": len(later["quarantined"]) * SAMPLES,
            "lost": len(later["lost"]) * SAMPLES,
        }, (earlier, later)
    last = steps[-1]["counts"]
    assert {name: sums[name] for name in sums if name != "lost"} == {
        name: last[name] for name in sums if name != "lost"
    }
    assert sums["lost"] >= last["lost"]  # the last ones are settled after the last step
    assert all(bool(torch.isfinite(one).all()) for one in tensors(state))
    counts["steps"] += steps[-1]["step"]
    counts["poisoned"] += len(refused)


def tensors(found):
    """Return all tensors of a nest of dicts and lists."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return [one for part in found for one in tensors(part)]
    return []
