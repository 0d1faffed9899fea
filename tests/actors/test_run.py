"""Real processes on a real Ray, and what happens to them. Nothing here depends on how fast."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import time

import psutil
import pytest
import ray
import torch

import kondo
from actors.toys import SAMPLES, slow_pg, toy
from kondo.actors import Settings, checkpoint, log, run
from kondo.actors.learner import Publication
from kondo.actors.source_price import EVERYTHING
from kondo.actors.worker_pool import WorkerPool
from kondo.run_files import FolderInUseError

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]

# Of the n-th process; those that replace the first three are slow.
BEHAVIOURS = {
    1: "kill -9",
    2: "hang",
    3: "poison, then raise",
    **dict.fromkeys(range(4, 40), "slow"),
}


class Watch:
    """Sees every step, kills the learner, and ends the run once everything has happened."""

    def __init__(self):
        self.statuses = []
        self.killed_learner = 0
        self.until = time.monotonic() + 150

    def __call__(self, status):
        self.statuses.append(status)
        if status.report.step >= 25 and not self.killed_learner:
            self.killed_learner = status.learner_pid
            os.kill(self.killed_learner, signal.SIGKILL)

    @property
    def events(self):
        return [event for status in self.statuses for event in status.events]

    def stopped(self):
        back = {(event.kind, event.who) for event in self.events}
        poison = [r for status in self.statuses for r in status.report.quarantined]
        wanted = {("actor back", 0), ("actor back", 1), ("actor back", 2), ("learner back", -1)}
        return (wanted <= back and len(poison) >= 13) or time.monotonic() > self.until


@pytest.fixture(scope="module")
def eventful(ray_cluster, tmp_path_factory):
    """One run in which everything happens."""
    folder, watch = tmp_path_factory.mktemp("eventful"), Watch()
    settings = Settings(
        actors=3,
        steps=100_000,
        gate="delight:0.25",
        checkpoint_every=10,
        rollout_timeout=4.0,
    )
    setup = toy(BEHAVIOURS, seconds=0.01)
    summary = run(setup, settings, folder=folder, observe=watch, stopped=watch.stopped)
    return folder, watch, summary


def happened(watch, kind, who):
    return [event for event in watch.events if event.kind == kind and event.who == who]


def test_an_actor_killed_in_a_rollout_is_replaced_and_the_run_goes_on(eventful):
    _, watch, summary = eventful
    assert len(happened(watch, "actor died", 0)) == 1
    assert len(happened(watch, "actor back", 0)) == 1
    # The rollout it was killed in, and perhaps the one that waited behind it.
    assert summary.lost["actor died"] in (SAMPLES, 2 * SAMPLES)


def test_an_actor_that_hangs_is_replaced(eventful):
    _, watch, summary = eventful
    assert happened(watch, "actor hung", 1)
    assert happened(watch, "actor back", 1)
    assert summary.lost["actor hung"] >= SAMPLES


def test_slow_actors_are_waited_for(eventful):
    _, watch, _ = eventful
    assert {event.who for event in watch.events if event.kind == "actor back"} == {0, 1, 2}
    assert [event.who for event in watch.events if event.kind == "actor hung"] == [1]


def test_an_actor_that_raises_is_replaced_and_its_error_shown(eventful):
    _, watch, _ = eventful
    assert "the simulator is gone" in happened(watch, "actor raised", 2)[0].detail
    assert happened(watch, "actor back", 2)


def test_a_killed_learner_goes_on_where_it_was(eventful):
    """Steps are consecutive over the kill: what was done since the checkpoint was done again."""
    _, watch, summary = eventful
    assert happened(watch, "learner died", -1)
    assert watch.statuses[-1].learner_pid not in (0, watch.killed_learner)
    steps = [status.report.step for status in watch.statuses]
    assert steps == list(range(1, len(steps) + 1))
    assert summary.step == steps[-1]
    counts = [status.report.counts for status in watch.statuses]
    for earlier, later in itertools.pairwise(counts):
        assert all(later[k] >= earlier[k] for k in earlier if k != "in_flight")


def test_poison_is_refused_by_actor_and_reason(eventful):
    _, _, summary = eventful
    assert set(summary.quarantined_by_actor) == {2}
    assert {"nan", "reward", "range", "shape", "dtype", "rows", "structure"} <= set(
        summary.quarantined
    )


def test_every_sample_is_in_one_place_and_none_was_trained_on_twice(eventful):
    folder, watch, summary = eventful
    assert summary.balanced
    assert summary.duplicates == 0
    lines = [line for line in log.lines(folder) if "orders" in line]
    trained = [number for line in lines for number in line["orders"]]
    lost = [number for line in lines for number, _ in line["lost"]]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(lost)
    # The same accounts, kept by adding up what each step said.
    kept = sum(status.report.trained for status in watch.statuses)
    skipped = sum(status.report.skipped for status in watch.statuses)
    refused = sum(len(status.report.quarantined) for status in watch.statuses)
    assert summary.counts["trained"] == kept
    assert summary.counts["skipped"] == skipped
    assert summary.counts["quarantined"] == refused * SAMPLES
    assert summary.counts["produced"] >= (len(trained) + len(lost)) * SAMPLES


def test_what_is_sent_is_what_is_kept(eventful):
    _, _, summary = eventful
    accepted = summary.counts["trained"] + summary.counts["skipped"]
    assert 0.1 < summary.counts["trained"] / accepted < 0.4
    assert summary.wire_bytes < summary.full_bytes
    assert sum(summary.staleness.values()) == accepted
    assert min(summary.staleness) >= 0


def test_no_actor_runs_ahead_of_the_learner(eventful):
    _, watch, _ = eventful
    assert all(max(status.open) <= 2 for status in watch.statuses)


def test_the_run_leaves_weights_that_load_as_plain_values(eventful):
    folder, _, summary = eventful
    state = torch.load(folder / checkpoint.FILE, weights_only=True)
    assert state["step"] == summary.step
    assert state["ledger"]["trained"] == summary.counts["trained"]


class Copying:
    """Keeps the checkpoint as it was at some step: what a driver killed there leaves behind."""

    def __init__(self, folder, step):
        self._folder, self._step = folder, step

    def __call__(self, status):
        if status.report.step == self._step:
            shutil.copy(self._folder / checkpoint.FILE, self._folder / "kept.pt")


def test_a_run_that_was_killed_as_a_whole_goes_on_and_counts_what_ended_with_it(tmp_path):
    """A slow learner besides: the queues are full, and the actors wait for it."""
    full = []

    def observe(status):
        copying(status)
        full.append(status.open)

    copying = Copying(tmp_path, 8)
    settings = Settings(
        actors=1, queue=3, steps=12, gate="delight:0.25", checkpoint_every=4, loss=slow_pg, spares=0
    )
    first = run(toy(), settings, folder=tmp_path, observe=observe)
    assert max(full) == (2,)  # seen when one of three has just been trained on
    assert first.counts["produced"] <= (12 + 3) * SAMPLES
    ended = log.last_issued(tmp_path)[0]
    os.replace(tmp_path / "kept.pt", tmp_path / checkpoint.FILE)

    with pytest.raises(ValueError, match="holds a checkpoint; give resume"):
        run(toy(), settings, folder=tmp_path)
    second = run(toy(), settings, folder=tmp_path, resume=True)
    assert second.step == 12
    assert second.balanced
    # Trained on by the checkpoint: 8 rollouts. All the others of the first run ended with it.
    assert second.lost == {"run ended": (ended - 8) * SAMPLES}
    assert second.counts["trained"] + second.counts["skipped"] == 12 * SAMPLES
    lines = [line for line in log.lines(tmp_path) if "orders" in line]
    assert min(number for line in lines[12:] for number in line["orders"]) >= ended


class StoppingTheLearner:
    """Sends SIGSTOP to the learner at step 5: it answers nothing any more, and never dies."""

    def __init__(self):
        self.pid, self.events = 0, []

    def __call__(self, status):
        self.events += status.events
        if status.report.step == 5 and not self.pid:
            self.pid = status.learner_pid
            os.kill(self.pid, signal.SIGSTOP)


# Long enough for a busy machine, short enough to wait for.
STOPPED = Settings(
    actors=1, steps=12, gate="delight:0.25", checkpoint_every=4, spares=0, step_timeout=6.0
)


def test_a_learner_that_hangs_is_replaced_and_nothing_is_trained_on_twice(tmp_path):
    stopping = StoppingTheLearner()
    summary = run(toy(seconds=0.02), STOPPED, folder=tmp_path, observe=stopping)
    assert [event.kind for event in stopping.events] == ["learner hung", "learner back"]
    assert summary.step == 12
    assert summary.balanced
    assert summary.duplicates == 0
    lines = [line for line in log.lines(tmp_path) if "orders" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    # It must not wake up and write a checkpoint over those of its successor.
    assert not psutil.pid_exists(stopping.pid)


def test_a_run_whose_learner_hangs_ends_when_it_is_asked_to(tmp_path):
    stopping = StoppingTheLearner()
    forever = dataclasses.replace(STOPPED, steps=10**6)
    summary = run(
        toy(seconds=0.02),
        forever,
        folder=tmp_path,
        observe=stopping,
        stopped=lambda: bool(stopping.pid),
    )
    assert 5 <= summary.step <= 8  # the steps that were planned, done again by its successor
    assert summary.balanced
    assert torch.load(tmp_path / checkpoint.FILE, weights_only=True)["step"] == summary.step


def test_actors_draw_what_they_send(tmp_path):
    """A row that was not drawn would be quarantined."""
    settings = Settings(actors=2, steps=40, gate="unbiased:0.25", spares=0)
    summary = run(toy(), settings, folder=tmp_path)
    assert summary.step == 40
    assert summary.balanced
    assert summary.counts["quarantined"] == 0
    accepted = summary.counts["trained"] + summary.counts["skipped"]
    assert 0.1 < summary.counts["trained"] / accepted < 0.4
    assert summary.wire_bytes < summary.full_bytes
    second = run(toy(), dataclasses.replace(settings, steps=50), folder=tmp_path, resume=True)
    assert second.step == 50
    assert second.counts["quarantined"] == 0


def work_for_ever(pool, weights):
    while True:
        pool.give_orders(-1, EVERYTHING, weights)
        expected = dict(pool.expect())
        ready, _ = ray.wait(list(expected))
        pool.arrived(expected[ready[0]], ready[0])


def test_an_actor_that_never_works_ends_the_run_with_its_story():
    always = dict.fromkeys(range(1, 20), "die at once")
    settings = Settings(actors=1, max_failures=1, spares=0)
    pool = WorkerPool(toy(always), settings, issued=0, incarnations=0)
    weights = ray.put(Publication(-1, EVERYTHING, {}))
    try:
        with pytest.raises(RuntimeError, match=r"actor 0 failed 2 times in a row.*actor died"):
            work_for_ever(pool, weights)
    finally:
        pool.stop()
    assert [event.kind for event in pool.events] == ["actor died"] * 2
    assert pool.issued == 4
    assert sorted(number for number, _ in pool.lost) == [0, 1, 2, 3]


def test_a_setup_that_contradicts_its_task_ends_the_run_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match="41 rows"):
        run(dataclasses.replace(toy(), samples=SAMPLES + 1), folder=tmp_path)


def test_resume_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run(toy(), folder=tmp_path, resume=True)


def test_two_runs_do_not_share_a_folder(tmp_path):
    refused = []

    def observe(status):
        for resume in (False, True):
            with pytest.raises(FolderInUseError, match=f"another run, process {os.getpid()} on"):
                run(toy(), folder=tmp_path, resume=resume)
            refused.append(resume)

    summary = run(toy(), Settings(actors=1, steps=2, spares=0), folder=tmp_path, observe=observe)
    assert refused == [False, True] * 2
    assert summary.balanced
    assert [line["step"] for line in log.lines(tmp_path) if "orders" in line] == [1, 2]


def test_ray_listens_on_loopback_alone(ray_cluster):
    listening = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # an earlier test's actor may just be going
            listening |= {
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


class EveryThird(kondo.BaseGate):
    """Of the units in the order of their values, over all rollouts of a step."""

    def __init__(self):
        self.calls = 0

    def choose(self, values, mask, generator=None):
        self.calls += 1
        order = values.argsort(dim=-1).argsort(dim=-1)
        return kondo.Choice.of(mask & (order % 3 == 0), mask)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_gate_that_nobody_knows_chooses_at_the_learner_and_the_log_says_so(tmp_path):
    settings = Settings(
        actors=2, steps=12, gate=EveryThird(), rollouts_per_step=2, checkpoint_every=5, spares=0
    )
    summary = run(toy(), settings, folder=tmp_path)
    assert summary.balanced
    assert summary.wire_bytes == summary.full_bytes  # actors sent everything
    assert summary.counts["trained"] == 12 * -(-2 * SAMPLES // 3)
    assert summary.counts["quarantined"] == 0
    said = [line for line in log.lines(tmp_path) if line.get("event") == "gate at the learner"]
    assert len(said) == 1
    assert "EveryThird" in said[0]["detail"]
    second = run(toy(), dataclasses.replace(settings, steps=14), folder=tmp_path, resume=True)
    assert second.step == 14
    assert checkpoint.load(tmp_path)["gate_state"] == {"calls": 14}
