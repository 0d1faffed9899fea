"""The study `scale`: the simulation against closed forms and conservation laws, and its numbers.

Costs are made up: no time is measured here. Real processes are in test_scale_ray.py.
"""

import dataclasses
import math
import statistics
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.evidence import plotting
from kondo_lab.evidence import records as files
from kondo_lab.studies import registry
from kondo_lab.studies.scale import STUDY, analysis, run, simulation, theory
from kondo_lab.studies.scale.costs import Costs
from kondo_lab.studies.scale.events import Clock, Shared
from kondo_lab.studies.scale.settings import Settings, settings
from kondo_lab.studies.scale.simulation import HERE, Network, System, simulate
from kondo_lab.training.record import Log
from tolerances import assert_close

NOTHING = {field.name: 0.0 for field in dataclasses.fields(Costs)} | {"samples": 1000}
LINK = Network(name="link", bandwidth=1e6, latency=0.5)


def costs(**given):
    return Costs(**NOTHING | given)


def system(**given):
    return System(**{"actors": 1, "sent": 0.0, "kept": 0.0} | given)


def outcome(found, built, rollouts=200, warm_up=50, seed=0):
    return simulate(found, built, rollouts=rollouts, warm_up=warm_up, seed=seed)


# Events.


def never():
    return False


def test_calls_of_the_same_time_are_made_in_the_order_given():
    clock, heard = Clock(), []
    for name in "abc":
        clock.after(1.0, lambda name=name: heard.append(name))
    clock.after(0.5, lambda: heard.append("first"))
    clock.run(until=never)
    assert heard == ["first", "a", "b", "c"]


def test_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="seconds must be >= 0, got -1"):
        Clock().after(-1.0, never)
    with pytest.raises(ValueError, match="work must be >= 0"):
        Shared(Clock(), 1).serve(-1.0, never)
    with pytest.raises(ValueError, match="capacity must be positive"):
        Shared(Clock(), 0)


def shared_by_small_steps(jobs, capacity, step=0.01):
    """Ends of jobs (start, work) served at equal rates, by brute force."""
    left = [work for _, work in jobs]
    ends = [None] * len(jobs)
    now = 0.0
    while None in ends:
        there = [i for i, (start, _) in enumerate(jobs) if start <= now and ends[i] is None]
        for i in there:
            left[i] -= step * min(1.0, capacity / len(there))
            if left[i] <= 0:
                ends[i] = now + step
        now += step
    return ends


@given(
    jobs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6),
    capacity=st.sampled_from([1, 2, 2.5]),
)
def test_jobs_share_a_resource_evenly(jobs, capacity):
    jobs = [(start / 10, work / 10) for start, work in jobs]
    clock, ends = Clock(), [0.0] * len(jobs)
    resource = Shared(clock, capacity)
    for place, (start, work) in enumerate(jobs):

        def end(place=place):
            ends[place] = clock.now

        clock.after(start, lambda work=work, end=end: resource.serve(work, end))
    clock.run(until=never)
    by_hand = shared_by_small_steps(jobs, capacity)
    assert all(abs(a - b) < 0.1 for a, b in zip(ends, by_hand, strict=True))


# The system, where a closed form is known.


def test_one_actor_with_one_order_is_a_cycle():
    """Every second of the way counts once: nothing overlaps with anything."""
    found = costs(
        rollout=1.0, load=0.25, pack=0.5, pack_row=0.01, actor_gap=0.125, actor_gap_byte=1e-4,
        actor_hop=0.375, wait=0.05, wait_reference=0.01, handle=0.02, learner_step=2.0, publish=0.1,
        message=0.2, sent_row=0.03, kept_row=0.04, learner_gap=0.15, learner_hop=0.35,
        header_bytes=100, row_bytes=10, weights_bytes=1e6,
    )  # fmt: skip
    built = system(queue=1, sent=20, kept=5, network=LINK)
    actor = 0.25 + 1.0 + 0.5 + 0.01 * 20 + 0.125 + 1e-4 * 300
    weights = 2 * 0.5 + 1e6 / 1e6
    # The receipt's turn asks for the receipt alone, the report's for the report alone.
    turns = 2 * (0.05 + 0.01 + 0.02)
    messages = 2 * 0.5 + 300 / 1e6
    learner = 2.0 + 0.1 + 0.2 + 0.03 * 20 + 0.04 * 5 + 0.15
    cycle = 0.5 + weights + actor + 0.375 + 0.5 + turns + 0.35 + messages + learner
    found_pace = outcome(found, built).pace
    assert_close(found_pace, 1 / cycle)


def test_two_orders_overlap_actor_and_learner():
    """The slower of the two sets the pace, and the other waits."""
    for rollout, step in ((3.0, 1.0), (1.0, 3.0)):
        seen = outcome(costs(rollout=rollout, learner_step=step), system(queue=2))
        assert_close(seen.pace, 1 / 3)
        assert_close(seen.idle, 1 - step / 3)
        assert_close(seen.actors_busy, rollout / 3)


def test_actors_add_up_until_the_learner_is_full():
    found = costs(rollout=8.0, learner_step=1.0)
    paces = [outcome(found, system(actors=actors)).pace for actors in (1, 2, 4, 16)]
    assert_close(paces[0], 1 / 8)
    assert_close(paces[1], 2 / 8)
    assert_close(paces[2], 4 / 8)
    assert_close(paces[3], 1.0)


def test_two_cores_pass_no_more_than_two_seconds_of_work_a_second():
    """8 actors, one second of rollout and one of the learner: each core does half of both."""
    found = costs(rollout=1.0, learner_step=0.5, system=0.5)
    seen = outcome(found, system(actors=8, cores=2, queue=8), rollouts=400)
    assert 0.95 < seen.pace <= 1.0 + 1e-9
    assert outcome(found, system(actors=8, queue=8)).pace == pytest.approx(2.0)


def test_a_learner_that_is_faster_does_only_its_own_work_faster():
    found = costs(learner_step=4.0, learner_gap=1.0)
    assert_close(outcome(found, system(actors=4)).pace, 1 / 5)
    assert_close(outcome(found, system(actors=4, learner_speed=4.0)).pace, 1 / 2)


def test_a_learner_that_fetches_waits_for_the_network_and_one_that_is_sent_to_does_not():
    found = costs(learner_step=1.0, header_bytes=2e6)
    built = system(actors=8, network=LINK, threads=1)
    assert_close(outcome(found, built).pace, 1 / (1.0 + 2 * 0.5 + 2.0))
    # With a second thread the next messages come while a step is at work, as fast as the link is.
    two = dataclasses.replace(built, threads=2)
    assert 1 / 4 < outcome(found, two).pace <= 1 / 2 + 0.01
    ahead = dataclasses.replace(built, prefetch=True)
    # The link is full, the learner is not; messages of one burst arrive together.
    assert outcome(found, ahead).pace == pytest.approx(1 / 2, rel=0.05)
    slim = dataclasses.replace(found, header_bytes=1e5)
    assert_close(outcome(slim, ahead).pace, 1.0)


def test_weights_go_out_once_per_version_and_machine():
    found = costs(rollout=1.0, learner_step=0.1, weights_bytes=1000)
    apart = outcome(found, system(actors=8, per_step=8, actors_per_machine=1))
    together = outcome(found, system(actors=8, per_step=8, actors_per_machine=8))
    assert_close(apart.outward / apart.pace, 1000.0)
    assert_close(together.outward / together.pace, 1000 / 8)


def test_weights_are_loaded_only_where_they_are_new():
    """Two rollouts ordered together act with one version: 1 + 1 + 1, then a step of 1."""
    found = costs(rollout=1.0, load=1.0, learner_step=1.0)
    assert_close(outcome(found, system(queue=2, per_step=2)).pace, 2 / 4)


def test_a_link_full_of_weights_sets_the_pace():
    found = costs(weights_bytes=2e6, learner_step=0.01)
    network = dataclasses.replace(LINK, latency=0.0)
    seen = outcome(found, system(actors=50, queue=1, network=network))
    assert seen.pace == pytest.approx(0.5, rel=0.05)


def test_checkpoints_take_their_time():
    built = system(actors=4, checkpoint_every=10)
    seen = outcome(costs(learner_step=1.0, checkpoint=5.0), built, rollouts=200, warm_up=50)
    assert_close(seen.pace, 10 / 15)


def test_a_driver_that_is_slow_sets_the_pace():
    """A receipt and a report of each rollout; of a step of ten, one report for all."""
    found = costs(handle=1.0, learner_step=0.1)
    assert outcome(found, system(actors=20)).pace == pytest.approx(1 / 2, rel=0.02)
    together = outcome(found, system(actors=20, per_step=10), rollouts=1000)
    assert together.pace == pytest.approx(1 / 1.1, rel=0.03)


def test_a_step_ordered_ahead_hides_its_way_to_the_learner():
    found = costs(learner_step=1.0, learner_hop=1.0)
    assert_close(outcome(found, system(actors=8, ahead=2)).pace, 1.0)
    assert_close(outcome(found, system(actors=8, ahead=1)).pace, 1 / 2)


# Laws that hold whatever the costs.

SECONDS = st.floats(0.0, 2.0)
ANY_COSTS = st.builds(
    costs,
    rollout=st.floats(0.1, 3.0),
    load=SECONDS,
    learner_step=st.floats(0.1, 3.0),
    message=SECONDS,
    kept_row=st.floats(0.0, 0.01),
    sent_row=st.floats(0.0, 0.01),
    learner_gap=SECONDS,
    learner_hop=SECONDS,
    actor_hop=SECONDS,
    wait=st.floats(0.0, 0.1),
    wait_reference=st.floats(0.0, 0.01),
    handle=st.floats(0.0, 0.1),
    header_bytes=st.floats(1.0, 1e6),
    row_bytes=st.floats(0.0, 1e3),
    weights_bytes=st.floats(1.0, 1e6),
)


@st.composite
def systems(draw):
    actors, queue = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    sent = draw(st.integers(0, 100))
    return System(
        actors=actors,
        queue=queue,
        per_step=draw(st.integers(1, actors)),
        sent=sent,
        kept=draw(st.integers(0, sent)),
        network=draw(st.sampled_from([HERE, LINK])),
        learner_speed=draw(st.sampled_from([1.0, 4.0])),
        prefetch=draw(st.booleans()),
        actors_per_machine=draw(st.sampled_from([1, 4])),
        checkpoint_every=1,
    )


@given(found=ANY_COSTS, built=systems())
def test_the_pace_is_within_the_bounds_of_queueing_theory(found, built):
    """At most what the scarcest resource passes; at least as if everybody always queued up."""
    # In a finite run up to one set of orders is counted without the work done before the warm-up.
    rollouts = 20 * built.orders
    seen = outcome(found, built, rollouts=rollouts, warm_up=4 * built.orders)
    # Orders of one turn name the same version: then an actor has its weights already.
    limits = theory.limits(dataclasses.replace(found, load=0.0), built)
    limits.pop(theory.OUTWARD, None)
    assert seen.pace <= min(limits.values()) * (1 + 2 * built.orders / rollouts)
    size = found.message_bytes(built.sent)
    network = built.network
    transfer = (size + found.weights_bytes) / network.bandwidth + 8 * network.latency
    slow = (
        found.actor_seconds(built.sent, new_weights=True)
        + found.actor_hop
        + found.learner_hop
        + transfer
        + found.step_seconds(1, built.sent, built.kept)
        + found.learner_gap
        + 3 * (found.wait + found.handle + found.wait_reference * (built.orders + built.ahead))
    )
    assert seen.pace >= 1 / slow * (1 - 2 * built.orders / rollouts)


@given(found=ANY_COSTS, built=systems())
def test_orders_are_neither_lost_nor_made(found, built):
    """Little's law: orders under way = pace x time each is under way; and every one is trained."""
    seen = outcome(found, built, rollouts=30 * built.orders, warm_up=4 * built.orders)
    assert seen.rollouts == seen.steps * built.per_step == len(seen.staleness)
    # A trained order is under way again only once the driver has heard of it.
    assert seen.pace * seen.response <= built.orders * 1.05
    away = 2 * (found.wait + found.handle * (built.orders + 1)) + found.learner_gap
    away += 2 * found.wait_reference * (built.orders + built.ahead)
    assert seen.pace * (seen.response + 2 * away) >= 0.95 * built.orders
    assert 0 <= seen.idle <= 1 + 1e-9
    assert seen.actors_busy <= 1.05
    assert seen.waiting <= built.orders


@pytest.mark.parametrize(("actors", "queue", "per_step"), [(1, 1, 1), (5, 2, 1), (6, 2, 6)])
@pytest.mark.parametrize(("rollout", "step"), [(5.0, 0.1), (0.1, 5.0)])
def test_staleness_is_the_orders_under_way_over_the_rollouts_of_a_step(
    actors, queue, per_step, rollout, step
):
    """Whoever is slow: in the time of an order all others are trained on once."""
    found = costs(rollout=rollout, learner_step=step, actor_spread=0.2, learner_spread=0.2)
    built = system(actors=actors, queue=queue, per_step=per_step)
    seen = outcome(found, built, rollouts=40 * built.orders, warm_up=10 * built.orders)
    expected = actors * queue / per_step - 1
    assert statistics.mean(seen.staleness) == pytest.approx(expected, abs=0.1)


def test_an_order_names_the_newest_version_the_driver_has_heard_of():
    """Steps that ended while the driver was busy are not published before its next turn."""
    seen = outcome(costs(handle=1.0, learner_step=0.1), system(actors=4, queue=1), rollouts=40)
    assert set(seen.staleness) == {3}


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    found = costs(rollout=1.0, learner_step=0.5, actor_spread=0.3, learner_spread=0.3)
    built = system(actors=4, cores=2)
    first, again, other = (outcome(found, built, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.pace != other.pace


def test_the_spread_of_times_is_log_normal():
    """Mean exp(s^2 / 2) of the median: a learner that is always busy takes that long a step."""
    found = costs(learner_step=1.0, learner_spread=0.5)
    seen = outcome(found, system(actors=4), rollouts=5000)
    assert 1 / seen.pace == pytest.approx(math.exp(0.125), rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"actors": 0}, "actors must be >= 1, got 0"),
        ({"per_step": 3}, r"per_step must be at most actors \* queue \(2\), got 3"),
        ({"kept": 1.0}, r"kept must lie between 0 and sent \(0.0\), got 1.0"),
    ],
)
def test_a_system_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        system(**wrong)


def test_a_simulation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rollouts must be >= 1"):
        simulate(costs(rollout=1.0), system(), rollouts=0, warm_up=0, seed=0)


# Theory.


def test_limits_are_what_each_resource_passes():
    found = costs(
        rollout=2.0, learner_step=3.0, message=0.5, handle=0.1, header_bytes=1e5, weights_bytes=2e5
    )
    built = system(actors=4, network=LINK, prefetch=True, per_step=2)
    limits = theory.limits(found, built)
    assert_close(limits[theory.ACTORS], 4 / 2.5)
    assert_close(limits[theory.LEARNER], 2 / 4.0)
    assert_close(limits[theory.INWARD], 10.0)
    assert_close(limits[theory.OUTWARD], 5.0)
    assert_close(limits[theory.DRIVER], 1 / (0.1 * 1.5))
    assert_close(limits[theory.AHEAD], 2 * 2 / (4.0 + 0.1))
    assert_close(limits[theory.ORDERS], 8 / (2.5 + 0.5 + 4.0))
    assert [name for name, _ in theory.scarcest(found, built)][:2] == [
        theory.LEARNER,
        theory.AHEAD,
    ]


def test_what_takes_no_time_is_no_limit():
    assert set(theory.limits(costs(rollout=1.0, learner_step=1.0, header_bytes=1.0), system())) == {
        theory.ACTORS,
        theory.LEARNER,
        theory.AHEAD,
        theory.ORDERS,
    }


# The study.

TINY = Settings(
    tasks=("digits",),
    rounds=3,
    real_actors=(1, 2),
    real_seconds=1.0,
    seeds=2,
    actors=(2, 20),
    rates=(0.03, 1.0),
    rollouts=50,
)
MADE_UP = costs(
    rollout=1.0, learner_step=0.1, message=0.01, kept_row=1e-4, sent_row=1e-4, handle=1e-3,
    header_bytes=1000.0, row_bytes=100.0, weights_bytes=1e5, learner_gap=0.01,
)  # fmt: skip


class Quiet:
    """A context that nobody watches."""

    def progress(self, share, note):
        assert 0 <= share <= 1

    def stopped(self):
        return False


@pytest.fixture(scope="module")
def made_up():
    """Records of one task: made-up costs, measured paces 10% below simulated, TINY's systems."""
    log = Log("digits")
    log.add(run.FITTED, 0, dataclasses.asdict(MADE_UP))
    for number, value in enumerate((0.001, 0.002, 0.003)):
        timed = dict.fromkeys(analysis.TIMED_LINES, value)
        log.add(run.TIMED, number, timed)
    for mode in run.MODES:
        for actors in TINY.real_actors:
            for seed in range(2):
                for who, pace in ((run.MEASURED, 9.0 * actors), (run.SIMULATED, 10.0 * actors)):
                    values = {run.PACE: pace + 0.1 * seed, run.IDLE: 0.5, run.STALENESS: 1.0}
                    values[run.BYTES] = 5.0
                    log.add(f"{who}, {mode}", seed, values, x=actors, step=1)
    run._simulate(TINY, MADE_UP, Quiet(), log)
    return files.table(files.checked(log.runs(), part="digits"))


@pytest.fixture(scope="module")
def found(made_up):
    with plotting.style():
        return STUDY.analyse(made_up, TINY)


def test_every_case_is_simulated_with_every_number_of_actors(made_up):
    cases = run.cases(TINY)
    assert len({case.name for case in cases}) == len(cases) == 2 * 3 * 2 * 2 * 2
    own = made_up[made_up["series"].isin([case.name for case in cases])]
    assert len(own) == len(cases) * len(TINY.actors) * 9
    assert sorted(own["setting"].unique()) == [2, 20]


def test_what_is_dropped_at_the_source_is_not_sent():
    case = run.Case(run.ROUND, LINK, 10.0, run.SOURCE, 0.03)
    built = case.system(TINY, 1000, 20)
    assert (built.sent, built.kept, built.per_step, built.prefetch) == (30, 30, 20, True)
    every = case._replace(mode=run.EVERY_ROW, design=run.SINGLE).system(TINY, 1000, 20)
    assert (every.sent, every.kept, every.per_step, every.prefetch) == (1000, 30, 1, False)
    assert every.learner_speed == 10.0


def test_costs_come_back_from_the_records(made_up):
    assert analysis.costs_of(made_up, "digits") == MADE_UP


def test_the_headline_has_the_simulated_pace_beside_the_measured(found):
    lines = {(x.series, x.metric, x.x): x for x in found.headline}
    line = lines["digits, at source", run.PACE, 2]
    assert (line.expected, line.ours, line.seeds) == (pytest.approx(18.05), pytest.approx(20.05), 2)
    assert line.verdict == "matches"
    ratio = lines["digits, send all", "simulated / measured pace", 1]
    assert ratio.ours == pytest.approx(10.05 / 9.05)
    assert lines["digits", "milliseconds, rollout", "p50"].ours == pytest.approx(2.0)
    assert lines["digits", "bytes of the weights", ""].ours == 1e5


def test_findings_tell_what_was_found(found):
    check, scale, source, limit, advice = found.findings
    assert "1.11 to 1.11 over 4 kinds" in check
    assert "4 of 4 are within 20%" in check
    assert "a step per rollout, learner 1x: 8 rollouts/s, 90% of it with 20 actors" in scale
    assert "brings 4,080 bytes in instead of 103,020" in source
    assert limit.startswith("digits: what sets the pace with 20 actors, counted: learner at")
    assert "actors x queue / rollouts per step" in advice
    assert "finds no rollout waiting" in advice
    assert set(found.figures) == {
        "measured-against-simulated",
        "digits-actors",
        "staleness-and-bytes",
    }


def test_sizes_are_as_they_are_said_to_be():
    full, small = settings("full", None), settings("small", 4)
    assert (min(full.actors), max(full.actors)) == (10, 10_000)
    assert full.real_actors == (1, 2, 4, 8)
    assert full.rates == (0.01, 0.03, 0.1, 1.0)
    assert small.seeds == 4
    with pytest.raises(ValueError, match=r"rates must hold the rate of the real runs, 0\.03"):
        dataclasses.replace(full, rates=(0.5,))


def test_the_studies_of_actors_are_found_without_ray():
    """`kondo list` must work with the laboratory alone."""
    code = (
        "import sys; sys.modules['ray'] = sys.modules['datasketches'] = None\n"
        "from kondo_lab.studies import registry\n"
        "print(*(registry.find(name).name for name in ('scale', 'asynchrony')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["scale", "asynchrony"]
    assert registry.find("scale") is STUDY


def test_records_of_a_part_make_one_table(made_up):
    assert isinstance(made_up, pd.DataFrame)
    assert not made_up["value"].isna().any()
    assert isinstance(
        simulation.simulate(MADE_UP, system(), rollouts=1, warm_up=0, seed=0).pace, float
    )
