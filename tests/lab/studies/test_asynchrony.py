import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kondo.actors.setup import process_seed
from kondo_lab.studies.asynchrony import analysis, run, traces
from kondo_lab.studies.asynchrony.settings import BUSY, FRESH, SMALL, Settings, settings
from kondo_lab.studies.asynchrony.traces import Step, Turn
from kondo_lab.tasks.digits import DigitsBandit
from kondo_lab.training.actors import slowed
from kondo_lab.training.learner_error import LEARNER_ERROR
from kondo_lab.training.member import Frictions
from kondo_lab.training.part import Context, Stopped
from lab.made_up import Record, table_of
from tolerances import assert_close

TINY = dataclasses.replace(SMALL, width=8, batch=20, num_steps=6, learning_rate=0.05)
LATE = [0, 0, 1, 0, 3, 2]
"""Versions that six steps act with."""


def turns(versions, incarnations=None):
    made = incarnations or [1] * len(versions)
    return [(Turn(n, i, v),) for n, (i, v) in enumerate(zip(made, versions, strict=True))]


def replayed(method="PG", versions=LATE, samples_of=9, **options):
    chosen = run.actor_settings(TINY, BUSY, method, seed=4)
    return traces.replay(run.setup(TINY), chosen, turns(versions), samples_of=samples_of, **options)


def plain(loss, versions, samples_of):
    """The same run in plain torch: keep every version, act with the one that is asked for."""
    setup = run.setup(TINY)
    policy = setup.make_policy(process_seed(4, 0))
    actor = setup.make_policy(0)
    task = setup.make_task(process_seed(samples_of, 1))
    optimiser = torch.optim.Adam(policy.parameters(), lr=TINY.learning_rate)
    kept = []
    for version in versions:
        kept.append({k: v.clone() for k, v in policy.state_dict().items()})
        actor.load_state_dict(kept[version])
        rollout = task.rollout(actor)
        optimiser.zero_grad()
        log_probs = policy.log_prob(rollout.rows)
        loss(log_probs, rollout.advantages, rollout.log_probs).mean().backward()
        optimiser.step()
    return policy


LOSSES = {
    "PG": lambda own, advantages, old: -advantages * own,
    "IS-PG": lambda own, advantages, old: -(own - old).exp().detach() * advantages * own,
    "DG": lambda own, advantages, old: (
        -torch.sigmoid(-own * advantages).detach() * advantages * own
    ),
}


@pytest.mark.parametrize("method", LOSSES)
def test_a_replay_acts_with_the_versions_it_is_given(method):
    ends = replayed(method).policy.state_dict()
    expected = plain(LOSSES[method], LATE, samples_of=9).state_dict()
    for name, value in expected.items():
        assert_close(ends[name], value)


@hypothesis_settings(max_examples=8, deadline=None)
@given(st.tuples(*(st.integers(0, step) for step in range(4))))
def test_whatever_the_ages_a_replay_is_the_plain_loop(versions):
    ends = replayed(versions=versions).policy.state_dict()
    for name, value in plain(LOSSES["PG"], versions, samples_of=9).state_dict().items():
        assert_close(ends[name], value)


def test_a_replay_depends_on_the_samples_and_the_ages():
    first = replayed().policy.state_dict()["layers.0.weight"]
    assert first.equal(replayed().policy.state_dict()["layers.0.weight"])
    assert not first.equal(replayed(samples_of=10).policy.state_dict()["layers.0.weight"])
    fresh = replayed(versions=[0, 1, 2, 3, 4, 5])
    assert not first.equal(fresh.policy.state_dict()["layers.0.weight"])
    assert [step.ages(n) for n, step in enumerate(fresh.steps, start=1)] == [[0]] * 6


def test_each_process_of_a_replay_has_samples_of_its_own():
    chosen = run.actor_settings(TINY, BUSY, "PG", seed=4)
    both = turns([0, 0], [1, 2])
    found = traces.replay(run.setup(TINY), chosen, both, samples_of=9)
    same = traces.replay(run.setup(TINY), chosen, turns([0, 0]), samples_of=9)
    assert found.steps[0] == same.steps[0]
    assert found.steps[1].error != same.steps[1].error


def test_a_process_makes_its_rollouts_in_the_order_they_were_asked_for():
    """Whatever the order they arrive in: the second order's samples are the second ones drawn."""
    many = dataclasses.replace(TINY, batch=200)
    chosen = run.actor_settings(many, BUSY, "PG", seed=4)
    first, second = turns([0, 0])
    late = traces.replay(run.setup(many), chosen, [second, first], samples_of=9)
    in_turn = traces.replay(run.setup(many), chosen, [first, second], samples_of=9)
    assert [step.error for step in late.steps] == [step.error for step in in_turn.steps[::-1]]
    assert late.steps[0].error != late.steps[1].error


def test_ages_count_versions_back_from_the_step_before():
    assert Step((Turn(8, 1, 3), Turn(9, 2, 9)), 0.5, 1).ages(10) == [6, 0]


def test_a_replay_ends_where_it_is_stopped():
    left = iter([False, False, True])
    assert len(replayed(stopped=lambda: next(left)).steps) == 2


def test_the_gate_of_a_replay_pays_for_its_rate():
    name = "DG-K 3%"
    assert name in run.methods(TINY)
    paid = [step.trained for step in replayed(name).steps]
    assert 0 < sum(paid) < 0.3 * TINY.batch * TINY.num_steps
    assert sum(step.trained for step in replayed("PG").steps) == TINY.batch * TINY.num_steps


def fake_on_ray(setup, chosen, stopped):
    """Stands for Ray: every second version is acted with once more."""
    versions = [2 * (step // 2) for step in range(chosen.steps)]
    return traces.replay(setup, chosen, turns(versions), samples_of=chosen.seed)


@pytest.fixture
def without_ray(monkeypatch):
    from contextlib import nullcontext

    from kondo.actors import cluster

    monkeypatch.setattr(cluster, "connected", nullcontext)
    monkeypatch.setattr(traces, "on_ray", fake_on_ray)


def context(tmp_path, stopped=lambda: False):
    shares = []
    made = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: shares.append(share),
        stopped=stopped,
        checkpoint=tmp_path / "part.checkpoint",
    )
    return made, shares


def test_a_part_holds_every_way_of_running_and_the_ages(without_ray, tmp_path):
    made, shares = context(tmp_path)
    chosen = dataclasses.replace(TINY, num_seeds=2)
    (part,) = run.parts(chosen)
    table = table_of(part.run(made), part=part.name)
    assert part.name == "busy"
    expected = {f"{m}, {how}" for m in run.methods(TINY) for how in analysis.HOWS}
    assert set(table["series"]) == expected | {run.AGE}
    for series in expected:
        own = table[table["series"] == series]
        assert set(own["metric"]) == {"online error", "test error", LEARNER_ERROR}
        assert set(own["seed"]) == {0, 1}
        assert set(own[own["metric"] == "online error"]["step"]) == {2, 4, 6}
    assert analysis.ages(table, "busy") == {0: 0.5, 1: 0.5}
    assert shares == sorted(shares)
    assert max(shares) <= 1
    found = analysis.analyse(table, chosen)
    assert set(found.figures) == {"ages", "errors", "curves"}
    assert "Crew busy: weights 0.5 versions old in the mean, 0 to 1" in found.findings[0]


def test_simulated_delays_have_the_mean_age_of_the_real_ones(monkeypatch, without_ray, tmp_path):
    caught = []
    monkeypatch.setattr(
        run, "train", lambda populations, *_, **__: caught.extend(populations) or []
    )
    run._simulated(TINY, "busy", 3.4, context(tmp_path)[0], num_images=10)
    members = [member for population in caught for member in population.members]
    assert {(m.series.partition(", ")[2], m.frictions) for m in members} == {
        ("fixed delay", Frictions(delay=3)),
        ("uniform delay", Frictions(delay=7, uniform_delay=True)),
    }
    for member in members:
        assert member.arm == run.methods(TINY)[member.series.partition(",")[0]].arm
        assert member.learning_rate == TINY.learning_rate


def test_a_part_that_is_stopped_says_so_and_leaves_nothing_behind(without_ray, tmp_path):
    asked = iter([False] * 3)
    made, _ = context(tmp_path, stopped=lambda: next(asked, True))
    with pytest.raises(Stopped):
        run.parts(TINY)[0].run(made)
    assert not made.checkpoint.exists()


def test_the_learner_is_asked_itself():
    task = DigitsBandit(batch=5, seed=0)
    policy = run.setup(TINY).make_policy(0)
    with torch.no_grad():
        probs = policy(task.images).double().softmax(-1)
    found = run.errors(policy, task)
    expected = 1 - sum(probs[n, label] for n, label in enumerate(task.labels)) / len(probs)
    assert_close(found[LEARNER_ERROR], expected, dtype=torch.float32)
    assert found["test error"] == task.held_out_error(policy)


def table(errors):
    """Records of two seeds from {(method, how): (error, spread)}; a fresh crew."""
    rows = [Record("fresh", run.AGE, age, 0, 6, 120, 0, run.AGES, 0.5) for age in (0, 4)]
    for (method, how), (error, spread) in errors.items():
        for seed, sign in enumerate((-1, 1)):
            for metric in analysis.METRICS:
                for step in (3, 6):
                    value = error + sign * spread
                    series = run.named(method, how)
                    place = (series, math.nan, seed, step, 20 * step, step, metric)
                    rows.append(Record("fresh", *place, value))
    return table_of(rows, part="fresh")


def everywhere(error, spread):
    return {(m, how): (error, spread) for m in run.methods(TINY) for how in analysis.HOWS}


FRESH_ONLY = dataclasses.replace(TINY, crews=(FRESH,))


def test_a_twin_predicts_what_lies_within_two_standard_errors():
    errors = everywhere(0.2, 0.03)  # se 0.03 each, 0.0424 of a difference
    errors["DG", "replayed"] = (0.28, 0.03)
    errors["PG", "replayed"] = (0.29, 0.03)
    findings = analysis.analyse(table(errors), FRESH_ONLY).findings
    assert findings[0] == (
        "Crew fresh: weights 2.0 versions old in the mean, 0 to 4, most often 0 (50% of the "
        "rollouts)."
    )
    assert findings[2].startswith("Replayed ages predict 9 of 12 errors of the real runs; not of ")
    assert findings[2].count("PG with crew fresh") == 3
    assert "learner error +9.0 ± 4.2 points" in findings[2]
    assert findings[3] == "A fixed delay predicts 12 of 12 errors of the real runs."


def test_a_difference_of_a_hundredth_is_none_however_sure():
    errors = everywhere(0.9, 1e-5)
    errors["PG", "fixed delay"] = (0.9099, 1e-5)
    errors["DG", "fixed delay"] = (0.9101, 1e-5)
    found = analysis.analyse(table(errors), FRESH_ONLY)
    assert "9 of 12" in found.findings[3]
    shares = {
        (line.series, line.metric): line.ours for line in found.headline if "share" in line.metric
    }
    assert set(shares.values()) == {0.75, 1.0}
    assert all(
        (value == 0.75) == (series == "fixed delay") for (series, _), value in shares.items()
    )


def test_one_seed_has_no_standard_error_and_must_agree_to_a_hundredth():
    assert not analysis.Difference("c", "PG", "replayed", "e", 0.02, math.nan, 1).within
    assert analysis.Difference("c", "PG", "replayed", "e", -0.009, math.nan, 1).within


def test_one_seed_is_told_without_a_standard_error():
    found = table(everywhere(0.2, 0.0))
    findings = analysis.analyse(found[found["seed"] == 0], FRESH_ONLY).findings
    assert "DG 20.0, 20.0, 20.0, 20.0;" in findings[1]


def test_online_error_is_that_of_the_whole_run():
    found = table(everywhere(0.2, 0.0))
    early = (found["metric"] == "online error") & (found["step"] == 3)
    found.loc[early, "value"] = 0.8
    assert_close(analysis.error(found, "fresh", "PG, on Ray", "online error").mean, 0.5)
    assert_close(analysis.error(found, "fresh", "PG, on Ray", "test error").mean, 0.2)


def test_a_number_of_seeds_is_taken():
    assert settings("full", 5).num_seeds == 5
    assert settings("full", None) == Settings()
    assert settings("small", None).num_steps < Settings().num_steps


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_run_is_its_ages_and_its_samples():
    """Replayed with its own samples, a run on Ray ends with the same weights."""
    from kondo.actors.cluster import connected

    late = dataclasses.replace(BUSY, publish_every=3, pauses=(0.0, 0.03))
    with connected(num_cpus=4):
        for method in ("PG", "IS-PG"):
            chosen = dataclasses.replace(
                run.actor_settings(TINY, late, method, seed=2), steps=40, learning_rate=1e-3
            )
            setup = run.setup(TINY)
            found = traces.on_ray(slowed(setup, late.pauses), chosen, lambda: False)
            assert len(found.steps) == 40
            assert {turn.version % 3 for step in found.steps for turn in step.turns} == {0}
            again = traces.replay(
                setup, chosen, [step.turns for step in found.steps], samples_of=chosen.seed
            )
            assert again.steps == found.steps
            for name, value in found.policy.state_dict().items():
                assert_close(again.policy.state_dict()[name], value)
