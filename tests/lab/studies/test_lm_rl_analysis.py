import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo_lab.evidence import claims, failures, findings, records, runs
from kondo_lab.evidence.runs import LEARNER, LOOP, ROLLOUTS, TOKENS, Reach, Run, SpeedUp
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.lm_gates import drawing
from kondo_lab.studies.lm_gates.arena import Arena, targets
from kondo_lab.studies.lm_rl import (
    analysis,
    assignments,
    comparisons,
    page,
    plane,
)
from kondo_lab.studies.lm_rl.comparisons import Statement
from kondo_lab.studies.lm_rl.settings import FULL, SMALL
from kondo_lab.training import fields, tuning
from kondo_lab.training.gates import Everything
from kondo_lab.training.language_arms import text_arm
from lab.made_up import Record, table_of
from tolerances import assert_close

GRID, PLANE = SMALL.main, SMALL.planes[0]
ROWS = GRID.num_rows
AXES = (ROLLOUTS, TOKENS, LEARNER, LOOP, runs.ROWS)


def made(rewards, *, series="PG", seed=0, per_step=2.0):
    """A run evaluated at every step that pays `per_step` on every axis."""
    steps = np.arange(len(rewards))
    paid = {axis: per_step * steps.astype(float) for axis in AXES}
    return Run(series, seed, steps, np.array(rewards, dtype=float), paid)


def grid_records(rewards, *, field=GRID, entropy=0.2):
    """Records of a population from {(series, seed): reward by step}; entropy: one, or by series."""
    part = assignments.grid_names(SMALL, field)[0]
    lines = []
    for (series, seed), several in rewards.items():
        for step, reward in enumerate(several):
            values = {tuning.QUALITY: reward}
            if step:
                random = entropy[series] if isinstance(entropy, dict) else entropy
                values |= {TOKENS: 100.0 * step, "entropy": random, "mixed groups": 0.5}
            for metric, value in values.items():
                place = (step, ROWS * step, 10 * step)
                lines.append(Record(part, series, 1e-3, seed, *place, metric, value))
    return table_of(lines, part=part)


def joined(*tables):
    return records.pd.concat(tables, ignore_index=True)


def clocked(part, point, runs_of, *, learner=1.0, loop=2.0):
    """Records of a part by the clock from {(learning rate, seed): reward by step}."""
    lines = []
    for (rate, seed), rewards in runs_of.items():
        for step, reward in enumerate(rewards):
            values = {tuning.QUALITY: reward}
            if step:
                seconds = {"seconds learner": learner * step, "seconds loop": loop * step}
                values |= {TOKENS: 5 * step, **seconds}
            for metric, value in values.items():
                place = (step, point.num_rows * step, point.num_kept * step)
                lines.append(Record(part, point.name, rate, seed, *place, metric, value))
    return table_of(lines, part=part)


def tried(number, by_rate, **seconds):
    """Records of a point's tuning from {learning rate: reward by step}."""
    point = PLANE.points[number]
    runs_of = {(rate, 1000): rewards for rate, rewards in by_rate.items()}
    return clocked(assignments.point_name(PLANE, point), point, runs_of, **seconds)


def best(number, role, *by_seed, **seconds):
    """Records of a role's best point, the rewards of seeds 0, 1, ..."""
    runs_of = {(1e-3, seed): rewards for seed, rewards in enumerate(by_seed)}
    return clocked(assignments.best_name(PLANE, role), PLANE.points[number], runs_of, **seconds)


def test_a_target_is_met_between_two_evaluations():
    # 0.5 is met half way between steps 1 and 2, each of which costs 2.
    assert_close(runs.time_to(made([0.2, 0.4, 0.6, 0.3]), 0.5, LEARNER), 3.0)
    assert runs.time_to(made([0.6, 0.1]), 0.5, LEARNER) == 0.0
    assert runs.time_to(made([0.2, 0.4]), 0.5, LEARNER) == math.inf


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0.01, 0.99))
def test_a_target_is_met_where_the_line_meets_it(rewards, target):
    own = made(rewards, per_step=1.0)
    time = runs.time_to(own, target, LOOP)
    if max(rewards) < target:
        assert time == math.inf
        return
    before = own.steps < time
    assert all(own.reward[before] < target)
    assert np.interp(time, own.steps, own.reward) == pytest.approx(target) or time == 0


def test_a_seed_that_never_gets_there_counts_with_its_whole_run():
    several = [made([0.0, 1.0, 1.0], seed=0), made([0.0, 0.1, 0.2], seed=1)]
    found = runs.reach(several, 0.5, TOKENS)
    assert found.times == {0: 1.0, 1: math.inf}
    assert (found.reached, found.seeds) == (1, 2)
    assert_close(found.mean.mean, (1.0 + 4.0) / 2)


def reach(*times, end=10.0):
    return Reach(dict(enumerate(times)), dict.fromkeys(range(len(times)), end))


def test_speed_ups_with_missing_seeds_are_bounds():
    whole = runs.speed_up(reach(8.0, 8.0), reach(2.0, 2.0))
    assert (whole.value, whole.se, whole.bound) == (4.0, 0.0, "")
    assert runs.speed_up(reach(8.0, math.inf), reach(2.0, 2.0)).bound == "at least"
    assert runs.speed_up(reach(8.0, 8.0), reach(2.0, math.inf)).bound == "at most"
    assert runs.speed_up(reach(math.inf, math.inf), reach(math.inf)).bound == "unknown"
    assert_close(runs.speed_up(reach(8.0, math.inf), reach(3.0, 3.0)).value, 3.0)
    assert str(runs.speed_up(reach(8.0, math.inf), reach(2.0, 2.0))) == "at least 4.50x ± 0.5"
    assert str(runs.speed_up(reach(8.0), reach(math.inf))) == "at most 0.80x"


def test_speed_ups_are_of_the_seeds_that_both_have():
    found = runs.speed_up(reach(8.0, math.inf), reach(4.0))
    assert (found.value, found.bound) == (2.0, "")
    assert math.isnan(runs.speed_up(reach(), reach(4.0)).value)


def test_a_target_that_the_start_has_met_gives_no_ratio():
    nothing = "unknown size (nothing had been paid, or no seed is of both)"
    assert str(runs.speed_up(reach(8.0), reach(0.0))) == nothing
    never = runs.speed_up(reach(math.inf, math.inf), reach(math.inf))
    assert str(never) == "unknown size (seeds of both never got there)"


def test_the_error_of_a_speed_up_is_that_of_paired_seeds():
    found = runs.speed_up(reach(7.0, 9.0), reach(1.0, 3.0))
    assert_close(found.value, 4.0)
    assert_close(found.se, 1.5)  # 7 - 4 * 1 and 9 - 4 * 3 have a standard error of 3, divided by 2
    # Slow seeds are slow for both: no reason to doubt the ratio.
    assert_close(runs.speed_up(reach(4.0, 8.0), reach(1.0, 2.0)).se, 0.0)
    assert math.isnan(runs.speed_up(reach(8.0), reach(2.0)).se)  # one seed has none


def test_runs_of_a_population_are_read_with_all_that_was_paid_and_no_seconds():
    table = grid_records({("PG", 0): [0.1, 0.2], ("PG", 1): [0.3, 0.4]})
    (first, second) = runs.grid_runs(table, assignments.grid_names(SMALL, GRID))["PG"]
    assert (first.seed, second.seed) == (0, 1)
    assert_close(second.reward, np.array([0.3, 0.4]))
    expected = {ROLLOUTS: ROWS, runs.ROWS: 10, TOKENS: 100}
    assert {axis: values.tolist() for axis, values in first.costs.items()} == {
        axis: [0.0, float(paid)] for axis, paid in expected.items()
    }


def test_targets_lie_between_the_start_and_dense_grpos_end():
    arena = Arena(
        GRID,
        {
            "GRPO": [made([0.2, 0.6, 0.6, 0.9], series="GRPO")],
            "PG": [made([0.4, 0.5, 0.5, 0.5])],
        },
    )
    # From the mean start 0.3 to the mean of the last three, 0.7.
    found = targets(arena)
    assert_close(found["half way"], 0.5)
    assert_close(found["90% of the way"], 0.66)
    lost = Arena(GRID, {"GRPO": [made([0.5, 0.1], series="GRPO")]})
    assert targets(lost) == {}
    assert targets(Arena(GRID, {"PG": [made([0.1, 0.2])]})) == {}


def test_dense_is_the_path_whose_learner_was_faster():
    both = {
        "GRPO": [made([0, 1], series="GRPO", per_step=3.0)],
        "GRPO plain": [made([0, 1], series="GRPO plain", per_step=2.0)],
    }
    assert Arena(PLANE, both).dense == "GRPO plain"
    assert Arena(PLANE, both | {"GRPO plain": both["GRPO"]}).dense == "GRPO"
    assert Arena(PLANE, {"GRPO plain": both["GRPO plain"]}).dense == "GRPO plain"


def test_differences_are_taken_seed_by_seed():
    values = {"a": {0: 0.5, 1: 0.9, 2: 0.1}, "b": {0: 0.4, 1: 0.6}}
    assert_close(comparisons.difference(values, "a", "b").mean, 0.2)
    assert_close(comparisons.difference(values, "a", "b").se, 0.1)
    assert comparisons.difference(values, "a", "b").seeds == 2
    assert comparisons.difference(values, "a", "c") is None
    assert comparisons.difference(values | {"c": {7: 1.0}}, "a", "c") is None


@pytest.mark.parametrize(
    ("mean", "se", "seeds", "verdict"),
    [
        (0.10, 0.03, 3, "met"),
        (0.10, 0.04, 3, "open"),  # 2.5 errors, and chance of three seeds makes 2.92
        (0.10, 0.04, 5, "met"),
        (0.10, 0.01, 2, "open"),
        (0.0, 0.01, 5, "open"),
        (-0.10, 0.20, 5, "open"),
        (-0.10, 0.03, 3, "missed"),
        (-0.10, 0.04, 3, "open"),
    ],
)
def test_a_statement_is_met_missed_or_open(mean, se, seeds, verdict):
    assert claims.above_zero(Estimate(mean, se, seeds)) == verdict


def test_a_statement_that_ours_is_lower_is_tested_the_other_way_round():
    values = {"a": dict.fromkeys(range(3), 0.1), "b": {0: 0.3, 1: 0.31, 2: 0.32}}
    low = comparisons.claim(Statement("a", "b", lower=True), values, "entropy")
    measured = "-0.210 ± 0.006, seed by seed, 3 seeds"
    assert low == ("a has a lower entropy than b", "met", measured)
    high = comparisons.claim(Statement("a", "b"), values, "entropy")
    assert high == ("a has a higher entropy than b", "missed", measured)
    assert comparisons.claim(Statement("a", "c"), values, "entropy") is None


@pytest.mark.parametrize(
    ("ratio", "seeds", "verdict"),
    [
        (SpeedUp(6.0, 0.5, ""), 3, "met"),
        (SpeedUp(5.2, 0.5, ""), 3, "open"),
        (SpeedUp(4.9, 0.5, ""), 3, "missed"),
        (SpeedUp(6.0, 0.5, ""), 2, "open"),
        (SpeedUp(6.0, 0.5, "at least"), 3, "met"),
        (SpeedUp(4.0, 0.5, "at least"), 3, "open"),
        (SpeedUp(4.0, 0.5, "at most"), 3, "missed"),
        (SpeedUp(6.0, 0.5, "at most"), 3, "open"),
        (SpeedUp(6.0, 0.5, "unknown"), 3, "open"),
        (SpeedUp(math.nan, math.nan, ""), 3, "open"),
    ],
)
def test_an_aim_is_met_by_at_least_its_error(ratio, seeds, verdict):
    assert comparisons.aim_verdict(ratio, seeds, 5.0) == verdict


def test_every_statement_is_about_arms_of_the_study():
    names = {each.name for each in SMALL.everyone()}
    asked = [*comparisons.selection_statements(), *comparisons.entropy_statements()]
    assert {name for each in asked for name in (each.ours, each.other)} <= names
    assert asked[0] == Statement("delight by PG", "random by PG")
    assert Statement("delight by GRPO", "random by GRPO") in asked


def test_selections_are_told_with_what_they_lose_to_dense_and_gain_on_random():
    rewards = {"PG": 0.9, "random by PG": 0.5, "delight by PG": 0.7}
    entropies = {"PG": 0.1, "random by PG": 0.2, "delight by PG": 0.6}
    table = grid_records(
        {
            (name, seed): [0.3, end + 0.01 * seed]
            for name, end in rewards.items()
            for seed in (0, 1, 2)
        },
        entropy=entropies,
    )
    found = analysis.analyse(table, SMALL)
    lines = {(line.series, line.metric): line for line in found.headline}
    delight = "delight by PG"
    gain = lines[delight, "reward at the end less that of random rows, seed by seed"]
    assert_close(gain.ours, 0.2)
    assert (gain.seeds, gain.x) == (3, "sorting-2-toy")
    assert_close(lines[delight, "reward at the end less that of dense PG, seed by seed"].ours, -0.2)
    assert ("PG", "reward at the end less that of dense PG, seed by seed") not in lines
    assert_close(lines[delight, "share of rows with a kept token"].ours, 10 / ROWS)
    assert_close(lines[delight, "entropy at the last evaluation, nats a token"].ours, 0.6)
    told = " ".join(found.findings)
    assert "delight by PG has a higher reward at the end than random by PG: met (+0.200" in told
    assert "random by PG has a lower entropy at the end than delight by PG: met (-0.400" in told
    (claim,) = found.claims
    assert claim.statement.startswith("sorting-2-toy, PG: rows of highest delight end at a higher")
    assert (claim.verdict, claim.measured) == ("met", "1 of 1 met")


RISING = [0.2, 0.4, 0.6, 0.8]


def test_smoothed_rewards_stand_between_evaluations():
    found = plane.smoothed(made([0.2, 0.4, 0.8], per_step=2.0))
    assert_close(found.reward, np.array([0.3, 0.6]))
    assert_close(found.costs[LOOP], np.array([1.0, 3.0]))
    assert_close(found.steps, np.array([0.5, 1.5]))


def test_a_run_has_reached_where_its_smoothed_reward_meets_the_target():
    for rewards in ([0.1, 0.6, 0.5], [0.1, 0.9, 0.09], [0.9, 0.0, 0.2], [0.4, 0.6]):
        history = [{"values": {tuning.QUALITY: [own]}} for own in rewards]
        ended = next(
            (end for end in range(1, 4) if plane.has_reached(history[:end], 0.5)), len(rewards)
        )
        run = plane.smoothed(made(rewards[:ended]))
        reached = math.isfinite(runs.time_to(run, 0.5, LOOP))
        assert reached == plane.has_reached(history[:ended], 0.5)


def test_the_best_point_is_the_first_at_the_target_by_the_loop():
    table = joined(
        tried(0, {3e-4: RISING, 1e-3: [0.2, 0.7, 0.8]}, loop=2.0),
        tried(1, {1e-3: [0.2, 0.7, 0.8]}, loop=3.0),
        tried(2, {3e-4: [0.2, 0.2], 1e-3: [0.2, 0.3]}),
    )
    found = plane.trials(table, PLANE)
    assert len(found) == 5
    point, rate, run = plane.best(found, "dense", SMALL.target)
    assert (point, rate) == (PLANE.points[0], 1e-3)
    # Smoothed: 0.45 at 1 and 0.75 at 3 seconds; 0.5 lies a sixth of the way.
    assert_close(runs.time_to(run, SMALL.target, LOOP), 1 + 2 / 6)
    # Of points that never got there, the highest at the end.
    assert plane.best(found, "gated", SMALL.target)[:2] == (PLANE.points[2], 1e-3)
    with pytest.raises(ValueError, match="role must be one of those tried, got 'PODS'"):
        plane.best(found, "PODS", SMALL.target)


def test_speed_ups_are_over_the_best_dense_point():
    table = joined(
        tried(0, {3e-4: RISING}),
        tried(2, {3e-4: RISING}),
        best(0, "dense", RISING, [0.3, *RISING], learner=1.0, loop=2.0),
        best(2, "gated", RISING, [0.3, *RISING], learner=0.2, loop=1.0),
    )
    found = analysis.analyse(table, SMALL)
    lines = {(line.series, line.metric): line for line in found.headline}
    ours = "unbiased 30% of 64"
    learner = lines[ours, "learner seconds to 0.5, speed-up over the best dense point"]
    assert_close(learner.ours, 5.0)
    assert learner.se < 1e-9
    assert_close(lines[ours, "loop seconds to 0.5, speed-up over the best dense point"].ours, 2.0)
    assert lines["dense 32", "loop seconds to 0.5, best dense point"].seeds == 2
    (told,) = (each for each in found.findings if "sooner than" in each)
    assert "unbiased 30% of 64 reached a held-out reward of 0.5 (2 of 2 seeds)" in told
    assert "by 5.00x ± 0 in learner seconds" in told
    assert "aim" not in told  # of another size


def test_the_aim_is_about_the_gated_point_of_one_size(monkeypatch):
    monkeypatch.setattr("kondo_lab.studies.lm_rl.plane_analysis.AIMED_SIZE", "toy")
    several = [RISING, [0.3, *RISING], [0.25, *RISING]]
    table = joined(
        tried(0, {3e-4: RISING}),
        best(0, "dense", *several, learner=1.0, loop=2.0),
        best(2, "gated", *several, learner=0.1, loop=1.0),
        best(4, "PODS", *several, learner=0.1, loop=1.0),
    )
    gated, pods = (each for each in analysis.analyse(table, SMALL).findings if "sooner" in each)
    assert "(aim 5x: met)" in gated
    assert "(aim 2.5x: missed)" in gated
    assert "aim" not in pods


def rival(*by_seed, **seconds):
    """Records of the plane's rival, the rewards of seeds 0, 1, ..."""
    (point,) = PLANE.rivals
    runs_of = {(3e-4, seed): rewards for seed, rewards in enumerate(by_seed)}
    return clocked(assignments.rival_name(PLANE, point), point, runs_of, **seconds)


@pytest.mark.parametrize(("theirs", "expected"), [(1.5, 1.5), (4.0, 2.0)])
def test_gates_are_compared_with_a_rival_that_is_sooner_than_the_chosen_point(theirs, expected):
    table = joined(
        tried(0, {3e-4: RISING}),
        best(0, "dense", RISING, [0.3, *RISING], loop=2.0),
        best(2, "gated", RISING, [0.3, *RISING], loop=1.0),
        rival(RISING, [0.3, *RISING], loop=theirs),
    )
    found = analysis.analyse(table, SMALL)
    lines = {(line.series, line.metric): line for line in found.headline}
    metric = "loop seconds to 0.5, speed-up over the best dense point"
    assert_close(lines["unbiased 30% of 64", metric].ours, expected)
    assert ("dense 64", "loop seconds to 0.5, rival") in lines
    assert any("which the tuning seed did not choose, took" in told for told in found.findings)


def test_points_that_never_got_there_are_bounds():
    table = tried(1, {1e-3: [0.1, 0.2, 0.3]}, loop=2.0)
    found = analysis.analyse(table, SMALL)
    lines = {(line.series, line.metric): line for line in found.headline}
    assert_close(lines["dense 64", "loop seconds to 0.5, at least: never"].ours, 3.0)
    assert any("which reached 0.5 never" in told for told in found.findings)


def test_seeds_that_never_got_there_are_told_and_not_dropped():
    table = joined(
        tried(0, {3e-4: RISING}),
        best(0, "dense", RISING, [0.1, 0.1, 0.1], loop=2.0),
        best(2, "gated", RISING, RISING, loop=1.0),
    )
    found = analysis.analyse(table, SMALL)
    metrics = {line.metric for line in found.headline}
    assert "loop seconds to 0.5, best dense point, at least: 1 of 2 seeds never" in metrics
    assert "loop seconds to 0.5, speed-up over the best dense point, at least" in metrics
    (point, _) = found.frontier
    assert (point.series, point.reached, point.seeds) == ("dense 32", 1, 2)


def test_a_fade_is_a_fall_from_the_peak_beyond_its_error():
    faded = [made([0.1, 0.9, 0.5], seed=0), made([0.1, 0.8, 0.5], seed=1)]
    step, fall = failures.fade(faded)
    assert (step, fall.seeds) == (1, 2)
    assert_close(fall.mean, 0.35)
    assert_close(fall.se, 0.05)
    noisy = [made([0.1, 0.9, 0.5], seed=0), made([0.1, 0.5, 0.6], seed=1)]
    assert failures.fade(noisy) is None
    assert failures.fade([made([0.1, 0.5, 0.9], seed=seed) for seed in (0, 1)]) is None
    assert failures.fade([made([0.1, 0.9, 0.5])]) is None  # one seed has no error


def test_two_seeds_must_agree_on_a_fade_and_five_less_so():
    def of(*ends):
        return failures.fade([made([0.1, 0.9, end], seed=seed) for seed, end in enumerate(ends)])

    assert of(0.5, 0.75) is None  # 2.2 standard errors
    assert of(0.5, 0.75, 0.5, 0.75, 0.625) is not None
    assert of(0.86, 0.86) is None  # what one evaluation does by chance


def diagnosed(reward, *, series="PG", arms=(), **logged):
    """Return the failures; what was logged is the last value, or the first and the last."""
    arena = Arena(GRID, {series: [made([0.2, reward], series=series)]})
    lines = [
        Record("p", series, 1e-3, 0, step, 0, 0, name.replace("_", " "), value)
        for name, given in logged.items()
        for step, value in enumerate(given if isinstance(given, tuple) else (1.0, given))
    ]
    table = table_of(lines, part="p")
    return [found.kind for found in failures.found(arena.runs, table, arms)]


def test_entropy_collapse_is_one_only_before_the_task_is_solved():
    assert diagnosed(0.5, entropy=0.005) == ["entropy collapse"]
    assert diagnosed(0.95, entropy=0.005) == []
    assert diagnosed(0.5, entropy=0.05) == []


def test_a_policy_that_becomes_more_random_is_told():
    assert diagnosed(0.5, entropy=(0.3, 0.6)) == ["growing entropy"]
    assert diagnosed(0.5, entropy=(0.3, 0.4)) == []
    assert diagnosed(0.5, entropy=(0.6, 0.3)) == []
    assert diagnosed(0.5, mixed_groups=0.5) == []  # not logged


def test_groups_that_all_agree_are_told():
    assert diagnosed(0.5, mixed_groups=0.01) == ["no mixed groups"]
    assert diagnosed(0.5, mixed_groups=0.2) == []


@pytest.mark.parametrize(
    ("gate", "share", "kinds"),
    [
        (Everything(1.0), 0.5, ["flat gate"]),
        (Everything(1.0), 0.99, ["saturated gate"]),
        (Everything(1.0), 0.8, []),
        (kondo.Gate(rate=0.1), 0.99, ["saturated gate"]),
        (kondo.Gate(rate=0.1), 0.5, []),
        (kondo.Gate(rate=0.1, signal=kondo.signals.uniform), 0.99, []),
        (None, 1.0, []),
    ],
)
def test_gates_that_no_longer_tell_units_apart_are_told(gate, share, kinds):
    arm = text_arm(name="PG", gate=gate)
    assert diagnosed(0.5, arms=[arm], kept_delight_share=share) == kinds


def test_starts_end_at_the_first_reward_that_is_enough():
    table = tuned_points({0: [0.1, 0.35, 0.6], 1: [0.1, 0.1, 0.2]})
    assert findings.start_rewards(table, 0.3) == {0: 0.35, 1: 0.2}
    told = analysis.analyse(table, SMALL).findings
    assert told == [
        "sorting-2-toy: supervised starts of 2 seeds end at rewards of 0.20 to 0.35; 1 never got "
        "to 0.3."
    ]


def tuned_points(rewards):
    part = fields.warm_name(GRID)
    return table_of(
        [
            Record(part, "start", math.nan, seed, step, 0, 0, tuning.QUALITY, reward)
            for seed, several in rewards.items()
            for step, reward in enumerate(several, start=1)
        ],
        part=part,
    )


def test_a_best_rate_at_the_edge_of_those_tried_is_told():
    tuned = {"PG": {1e-4: 0.1, 1e-3: 0.9, 1e-2: 0.2}, "DG": {1e-4: 0.9, 1e-3: 0.1, 1e-2: 0.2}}
    assert findings.edges(tuned, (1e-4, 1e-3, 1e-2)) == ["DG"]


def test_a_family_has_one_colour_and_a_dash_for_each_rate():
    among = ["GRPO", "DG-K 3%", "DG-K 10%", "DG, eta 1"]
    looks = {name: drawing.look(name, among) for name in among}
    assert looks["DG-K 3%"][0] == looks["DG-K 10%"][0] != looks["DG, eta 1"][0]
    assert looks["DG-K 3%"][1] != looks["DG-K 10%"][1]


def test_the_page_has_the_tables_of_the_committed_headline():
    root = Path(__file__).parents[3]
    headline = pd.read_csv(root / "results/lm-rl-v2/headline.csv")
    text = (root / "docs/results/studies/lm-rl.md").read_text(encoding="utf-8")
    made = page.tables(headline, FULL)
    assert {"crossed", "variants", "points, sorting-3-300m"} <= set(made)
    assert [name for name, markdown in made.items() if markdown not in text] == []
