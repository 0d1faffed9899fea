"""The study `scale` with real processes: costs come from them, and they are watched as they run.

No time is compared with any other: only that what is counted is counted, and that all of it is
there.
"""

import dataclasses
import math
import statistics

import pytest

from kondo.actors.cluster import connected
from kondo.actors.setup import Settings as RaySettings
from kondo_lab.studies.scale import STUDY, analysis, measure, real_runs, run
from kondo_lab.studies.scale.settings import NETWORKS, Settings
from kondo_lab.training import actors
from lab.made_up import table_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES = 100
TINY = Settings(
    tasks=("digits",),
    rate=0.1,
    rounds=2,
    real_actors=(1,),
    real_seconds=0.5,
    warm_up_seconds=0.1,
    seeds=1,
    actors=(2, 10),
    rates=(0.1, 1.0),
    networks=NETWORKS[:1],
    rollouts=20,
)
CHOSEN = RaySettings(
    gate="delight:0.1", learning_rate=1e-6, checkpoint_every=10**9, spares=0, start_timeout=500.0
)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with connected():
        yield


def small():
    return actors.digits(batch=SAMPLES, width=16)


@pytest.fixture(scope="module")
def samples():
    rounds = []
    found, weights = measure.on_ray(small(), CHOSEN, 2, rounds.append)
    assert rounds == [0, 1]
    found |= measure.here(small(), CHOSEN, 2) | measure.waiting(2)
    found |= measure.driving(small(), CHOSEN, seconds=0.5, warm_up=0.1, rounds=1)
    return found, weights


def test_everything_is_timed_in_every_round(samples):
    found, weights = samples
    once = {measure.DRIVER, measure.PROCESSOR}
    assert all(len(values) == 2 for name, values in found.items() if name not in once)
    assert all(value >= 0 for values in found.values() for value in values)
    # 64 pixels, two layers of 16, 10 actions; with biases; four bytes each
    parameters = sum(p.numel() for p in small().make_policy(0).parameters())
    assert weights == 4 * parameters


def test_ways_differ_in_what_they_send_and_keep(samples):
    found, _ = samples
    middle = {name: statistics.median(values) for name, values in found.items()}
    assert 0 < middle["at source: kept"] < 40
    assert 0 < middle["send all: kept"] < 40
    assert middle["dense: kept"] == SAMPLES
    assert middle["dense: bytes"] == middle["send all: bytes"] > 2 * middle["at source: bytes"]


def test_fitted_costs_are_seconds_and_bytes(samples):
    found, weights = samples
    costs = measure.fitted(found, small(), weights)
    values = dataclasses.asdict(costs)
    assert all(math.isfinite(value) and value >= 0 for value in values.values())
    assert (costs.samples, costs.weights_bytes) == (SAMPLES, weights)
    # Pixels, action, log-prob, advantage, reward, place.
    assert costs.row_bytes == pytest.approx(64 * 4 + 8 + 4 + 4 + 4 + 4, rel=0.01)
    sent = statistics.median(found["at source: kept"])
    assert costs.message_bytes(sent) == pytest.approx(
        statistics.median(found["at source: bytes"]), rel=1e-6
    )


def test_a_real_run_is_watched_once_all_actors_are_up():
    seen = real_runs.observe(
        small(),
        dataclasses.replace(CHOSEN, actors=2, steps=10**9),
        seconds=0.5,
        warm_up=0.1,
        interrupted=lambda: False,
    )
    assert seen.steps > 1
    found = seen.metrics
    assert 0 <= found[run.IDLE] <= 1
    assert found[run.STALENESS] == pytest.approx(3, abs=1)  # 2 actors x 2 orders - 1
    assert 0 < seen.driver < found[run.PROCESSOR] + 0.05
    assert 0 < found[run.KEPT] < SAMPLES


def test_a_real_run_that_the_user_stops_says_nothing():
    seen = real_runs.observe(small(), CHOSEN, seconds=60.0, warm_up=0.1, interrupted=lambda: True)
    assert seen is None


def test_the_whole_study_runs_and_is_analysed(monkeypatch):
    monkeypatch.setattr(run, "_setup", lambda task: small())
    (part,) = STUDY.parts(TINY)

    class Quiet:
        def progress(self, share, note):
            assert 0 <= share <= 1

        def stopped(self):
            return False

    table = table_of(part.run(Quiet()), part="digits")
    found = STUDY.analyse(table, TINY)
    assert {line.series for line in found.headline} >= {"digits, at source", "digits, send all"}
    assert len(found.figures) == 3
    assert analysis.costs_of(table, "digits").samples == SAMPLES
