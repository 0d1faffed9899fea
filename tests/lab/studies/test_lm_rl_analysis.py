"""The analysis of made-up records whose answers are known."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo_lab.gates import Everything
from kondo_lab.language.contenders import Contender
from kondo_lab.part import Record
from kondo_lab.studies import records
from kondo_lab.studies.lm_rl import analysis, assignments, drawing, failures, runs, tuning
from kondo_lab.studies.lm_rl.runs import LEARNER, LOOP, ROLLOUTS, TOKENS, Arena, Reach, Run
from kondo_lab.studies.lm_rl.settings import SMALL
from tolerances import assert_close

GRID, WALL = SMALL.main, SMALL.walls[0]
ROWS = GRID.num_rows


def made(rewards, *, series="PG", seed=0, per_step=2.0):
    """A run evaluated at every step that pays `per_step` on every axis."""
    steps = np.arange(len(rewards))
    paid = {axis: per_step * steps.astype(float) for axis in (*runs.AXES, runs.ROWS)}
    return Run(series, seed, steps, np.array(rewards, dtype=float), paid)


def grid_records(rewards, *, tokens=100.0):
    """Records of the grid from {(series, seed): reward by step}."""
    (part,) = assignments.grid_names(SMALL, GRID)
    lines = []
    for (series, seed), several in rewards.items():
        for step, reward in enumerate(several):
            values = {tuning.QUALITY: reward, tuning.GREEDY: reward}
            if step:
                values |= {TOKENS: tokens * step, "entropy": 0.2, "mixed groups": 0.5}
            for metric, value in values.items():
                place = (step, ROWS * step, 10 * step)
                lines.append(Record(part, series, 1e-3, seed, *place, metric, value))
    return records.frame(lines, part=part)


def seconds_records(seconds, field=GRID):
    """Records of the clock from {series: (learner, loop)}."""
    part = assignments.seconds_name(field)
    return records.frame(
        [
            Record(part, series, math.nan, 0, 0, ROWS, 0, f"seconds {stage} {quantile}", factor * s)
            for series, both in seconds.items()
            for stage, s in zip(("learner", "loop"), both, strict=True)
            for quantile, factor in (("p20", 0.5), ("p50", 1.0), ("p80", 3.0))
        ],
        part=part,
    )


def joined(*tables):
    return records.pd.concat(tables, ignore_index=True)


def clocked(series, seed, rewards, *, learner, loop):
    """Records of one run by the clock."""
    name = series.removesuffix(" plain")
    contender = next(each for each in SMALL.clocked(WALL) if each.name == name)
    path = "plain" if series.endswith("plain") else "product"
    part = assignments.wall_name(WALL, contender, path, seed)
    lines = []
    for step, reward in enumerate(rewards):
        values = {tuning.QUALITY: reward, tuning.GREEDY: reward}
        if step:
            values |= {
                TOKENS: 5 * step,
                "seconds learner": learner * step,
                "seconds loop": loop * step,
            }
        for metric, value in values.items():
            place = (step, WALL.num_rows * step, step)
            lines.append(Record(part, series, 1e-3, seed, *place, metric, value))
    return records.frame(lines, part=part)


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


def test_the_fastest_is_whose_seeds_all_got_there():
    known = {"a": reach(1.0, math.inf), "b": reach(8.0, 9.0), "c": reach(7.0, 9.5)}
    assert runs.fastest(known, ["a", "b", "c", "d"]) == "c"
    assert runs.fastest(known, ["d"]) is None


def test_the_fastest_is_so_on_the_seeds_that_all_have():
    # On seed 0 alone b is the faster; seed 1 is slow for b, and a does not have it.
    known = {"a": reach(5.0), "b": reach(4.0, 9.0)}
    assert runs.fastest(known, ["a", "b"]) == "b"
    # Nor does a seed that b alone has, and never got there with, count against it.
    assert runs.fastest(known | {"b": reach(4.0, math.inf)}, ["a", "b"]) == "b"
    # Who is not among them takes no seeds away.
    known = {"a": reach(5.0, 5.0), "b": reach(4.0, 9.0), "c": reach(1.0)}
    assert runs.fastest(known, ["a", "b"]) == "a"
    apart = {"a": reach(5.0), "b": Reach({1: 4.0}, {1: 9.0})}
    assert runs.fastest(apart, ["a", "b"]) is None


def test_grid_runs_are_read_with_all_that_was_paid():
    table = joined(
        grid_records({("PG", 0): [0.1, 0.2], ("PG", 1): [0.3, 0.4]}),
        seconds_records({"PG": (0.4, 1.0), "PG plain": (0.3, 0.9)}),
    )
    (first, second) = runs.grid_runs(table, SMALL, GRID)["PG"]
    assert (first.seed, second.seed) == (0, 1)
    assert_close(second.reward, np.array([0.3, 0.4]))
    expected = {ROLLOUTS: ROWS, runs.ROWS: 10, TOKENS: 100, LEARNER: 0.3, LOOP: 0.9}
    assert {axis: values.tolist() for axis, values in first.costs.items()} == {
        axis: [0.0, float(paid)] for axis, paid in expected.items()
    }


def test_the_slower_path_of_a_dense_contender_does_not_count():
    table = seconds_records({"GRPO": (0.2, 1.0), "GRPO plain": (0.3, 0.9), "DG-K 10%": (0.1, 0.5)})
    assert dict(runs.step_seconds(table, GRID).loc["GRPO"]) == {"learner": 0.2, "loop": 1.0}
    found = analysis.step_speed_ups(table, GRID)
    assert set(found) == {"GRPO", "DG-K 10%"}
    assert_close(found["DG-K 10%"][0], 2.0)
    assert_close(found["DG-K 10%"][1], 2.0)


def test_without_a_clock_a_grid_has_no_seconds():
    table = grid_records({("PG", 0): [0.1, 0.2]})
    assert set(runs.grid_runs(table, SMALL, GRID)["PG"][0].costs) == {ROLLOUTS, TOKENS, runs.ROWS}


def test_targets_lie_between_the_start_and_dense_grpos_end():
    arena = Arena(
        GRID,
        False,
        {
            "GRPO": [made([0.2, 0.6, 0.6, 0.9], series="GRPO")],
            "PG": [made([0.4, 0.5, 0.5, 0.5])],
        },
    )
    # From the mean start 0.3 to the mean of the last three, 0.7.
    found = runs.targets(arena)
    assert_close(found["half way"], 0.5)
    assert_close(found["90% of the way"], 0.66)
    lost = Arena(GRID, False, {"GRPO": [made([0.5, 0.1], series="GRPO")]})
    assert runs.targets(lost) == {}
    assert runs.targets(Arena(GRID, False, {"PG": [made([0.1, 0.2])]})) == {}


def test_dense_is_the_path_whose_learner_was_faster():
    both = {
        "GRPO": [made([0, 1], series="GRPO", per_step=3.0)],
        "GRPO plain": [made([0, 1], series="GRPO plain", per_step=2.0)],
    }
    assert Arena(WALL, True, both).dense == "GRPO plain"
    assert Arena(WALL, True, both | {"GRPO plain": both["GRPO"]}).dense == "GRPO"
    assert Arena(WALL, True, {"GRPO plain": both["GRPO plain"]}).dense == "GRPO plain"


RISING = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]


def claimed(ours, *, others=RISING, learner=0.1):
    names = {"GRPO": RISING, "DG-K 10%": ours, "PODS 10%": others, "random 10%": others}
    return joined(
        grid_records({(name, seed): own for name, own in names.items() for seed in (0, 1)}),
        seconds_records(
            {
                "GRPO": (1.0, 2.0),
                "DG-K 10%": (learner, 1.0 + learner),
                "PODS 10%": (0.2, 1.2),
                "random 10%": (0.5, 1.5),
            }
        ),
    )


def test_the_verdict_says_what_was_aimed_for_and_what_came():
    found = analysis.analyse(claimed(RISING), SMALL)
    (told,) = (each for each in found.findings if "DG-K 10% reached" in each)
    # 90% of the way from 0.2 to 0.8 is 0.74, met after 2.7 steps of 0.1 seconds.
    assert "reached a held-out reward of 0.74 in 0.27 learner seconds (2 of 2 seeds)" in told
    assert "a speed-up over GRPO of 10.00x ± 0 (aim 5x: met)" in told
    assert "by the whole loop of 1.82x ± 0" in told
    assert "Over PODS 10%, the best alternative: 2.00x ± 0 (aim 1.5x: met)" in told
    assert told.endswith("on 2 seeds of both: not worse by more than one standard error.")


def test_the_verdict_says_what_was_missed():
    slow = [0.2, 0.2, 0.3, 0.4, 0.4, 0.4]
    (told,) = (
        each
        for each in analysis.analyse(claimed(slow), SMALL).findings
        if "DG-K 10% reached" in each
    )
    assert "in at least 0.5 learner seconds (0 of 2 seeds)" in told
    assert "over GRPO of at most 5.40x ± 0 (aim 5x: not met)" in told
    assert "(aim 1.5x: not met)" in told
    assert told.endswith("0.800 ± 0.000 on 2 seeds of both: worse by more than one standard error.")


def at_the_end(ours, dense):
    """Say how {seed: reward} at the end compare."""
    both = {"PG": ours, "GRPO": dense}
    several = {
        name: [made([0.1, end], series=name, seed=seed) for seed, end in ends.items()]
        for name, ends in both.items()
    }
    return analysis._at_the_end(Arena(GRID, False, several), "PG")


def test_rewards_at_the_end_are_of_the_seeds_that_both_have():
    # Over all its seeds dense ends at 0.6, below 0.7; on seeds 0 and 1 it ends at 0.9.
    assert at_the_end({0: 0.7, 1: 0.7}, {0: 0.9, 1: 0.9, 2: 0.0}) == (
        "Reward at the end 0.700 ± 0.000, GRPO 0.900 ± 0.000 on 2 seeds of both: worse by more "
        "than one standard error."
    )


def test_one_seed_of_both_has_no_standard_error():
    assert at_the_end({0: 0.7}, {0: 0.9, 1: 0.3}) == (
        "Reward at the end 0.700, GRPO 0.900 on the one seed of both: lower; one seed has no "
        "standard error."
    )
    assert "on the one seed of both: not lower;" in at_the_end({0: 0.7, 1: 0.1}, {0: 0.7})
    assert at_the_end({0: 0.7}, {1: 0.9}) == (
        "No seed is of both PG and GRPO: their ends are not compared."
    )


def test_a_difference_at_the_end_within_its_error_is_not_told_as_worse():
    # Means 0.6 and 0.7, errors 0.1 and 0.1: a difference of 0.1 with an error of 0.14.
    assert "not worse by more" in at_the_end({0: 0.5, 1: 0.7}, {0: 0.6, 1: 0.8})
    # Errors 0.02 and 0.02.
    assert "both: worse by more" in at_the_end({0: 0.58, 1: 0.62}, {0: 0.68, 1: 0.72})


def test_an_aim_that_is_met_by_chance_is_not_told_as_met():
    assert analysis._aim(runs.SpeedUp(5.5, 0.2, ""), 5.0) == " (aim 5x: met)"
    assert analysis._aim(runs.SpeedUp(5.5, 0.2, "at least"), 5.0) == " (aim 5x: met)"
    assert analysis._aim(runs.SpeedUp(5.5, 0.2, "at most"), 5.0) == " (aim 5x: not met)"
    assert analysis._aim(runs.SpeedUp(5.5, 0.2, "unknown"), 5.0) == " (aim 5x: not met)"
    unsure = " (aim 5x: met by less than a standard error)"
    assert analysis._aim(runs.SpeedUp(5.5, 0.9, ""), 5.0) == unsure


def test_times_to_targets_stand_in_the_headline_with_missing_seeds():
    slow = [0.2, 0.2, 0.3, 0.4, 0.4, 0.4]
    lines = analysis.analyse(claimed(slow), SMALL).headline
    known = {(line.series, line.metric): line for line in lines}
    line = known["GRPO", "learner seconds to 0.74, 90% of the way"]
    assert (line.ours, line.se, line.seeds) == (pytest.approx(2.7), pytest.approx(0, abs=1e-9), 2)
    line = known[
        "DG-K 10%", "tokens differentiated to 0.50, half way, at least: 2 of 2 seeds never"
    ]
    assert line.ours == 500
    step = known["DG-K 10%", "learner speed-up over GRPO"]
    assert (step.ours, step.x) == (pytest.approx(10), "sorting-2-toy, a step")


def test_speed_ups_stand_in_the_headline_with_their_bounds():
    lines = analysis.analyse(claimed(RISING), SMALL).headline
    known = {(line.series, line.metric): line.ours for line in lines}
    assert_close(known["DG-K 10%", "learner seconds to 0.74, speed-up over GRPO"], 10.0)
    assert_close(known["DG-K 10%", "loop seconds to 0.74, speed-up over GRPO"], 2 / 1.1)
    assert_close(known["DG-K 10%", "learner seconds to 0.74, speed-up over PODS 10%"], 2.0)
    assert ("GRPO", "learner seconds to 0.74, speed-up over GRPO") not in known
    slow = analysis.analyse(claimed([0.2, 0.2, 0.3, 0.4, 0.4, 0.4]), SMALL).headline
    assert ("DG-K 10%", "learner seconds to 0.74, speed-up over GRPO, at most") in {
        (line.series, line.metric) for line in slow
    }


def test_there_is_no_time_without_a_target_or_a_clock():
    table = grid_records({("GRPO", 0): [0.5, 0.1], ("DG-K 10%", 0): [0.5, 0.6]})
    (told,) = (each for each in analysis.analyse(table, SMALL).findings if "no time" in each)
    assert told.endswith("dense GRPO did not learn, so there is no time to a target.")
    table = grid_records({("GRPO", 0): [0.1, 0.5], ("DG-K 10%", 0): [0.5, 0.6]})
    (told,) = (each for each in analysis.analyse(table, SMALL).findings if "no time" in each)
    assert "seconds of a step were not measured" in told


def test_the_frontier_counts_passes_of_those_that_got_there():
    table = claimed([0.2, 0.2, 0.3, 0.4, 0.4, 0.4])
    points = {(p.series, p.target): p for p in analysis.analyse(table, SMALL).frontier}
    point = points["GRPO", "held-out reward 0.740, 90% of the way"]
    assert (point.rate, point.reached, point.seeds) == (1.0, 2, 2)
    assert_close(point.forward, 2.7 * ROWS)
    assert_close(point.backward, 27.0)
    assert_close(point.final_error, 0.2)
    missed = points["DG-K 10%", "held-out reward 0.740, 90% of the way"]
    assert (missed.rate, missed.reached) == (0.1, 0)
    assert math.isnan(missed.forward)


def test_runs_by_the_clock_have_their_own_seconds():
    table = joined(
        clocked("GRPO", 0, [0.2, 0.5, 0.8], learner=3.0, loop=4.0),
        clocked("GRPO plain", 0, [0.2, 0.5, 0.8], learner=2.0, loop=3.5),
        clocked("DG-K 10%", 0, [0.2, 0.5, 0.8], learner=0.25, loop=1.0),
    )
    (arena,) = runs.arenas(table, SMALL)
    assert arena.by_clock
    assert arena.dense == "GRPO plain"
    assert arena.runs["GRPO"][0].costs[LOOP].tolist() == [0.0, 4.0, 8.0]
    (told,) = (
        each for each in analysis.analyse(table, SMALL).findings if "DG-K 10% reached" in each
    )
    assert "over GRPO plain of 8.00x (aim 5x: met), and by the whole loop of 3.50x." in told


def test_the_gate_that_was_first_there_is_named_whatever_it_looks_at():
    table = joined(
        clocked("GRPO", 0, [0.2, 0.5, 0.8], learner=3.0, loop=4.0),
        clocked("DG-K 10%", 0, [0.2, 0.3, 0.8], learner=0.75, loop=2.0),
        clocked("PODS 10%", 0, [0.2, 0.5, 0.8], learner=0.75, loop=2.0),
        clocked("random 10%", 0, [0.2, 0.3, 0.4], learner=0.1, loop=1.0),
    )
    (told,) = (each for each in analysis.analyse(table, SMALL).findings if "of all gates" in each)
    assert "PODS 10% was the first at" in told
    assert "over GRPO of 4.00x in learner seconds and of 2.00x by the whole loop (half way" in told
    assert "there, at 0.43: 4.00x and 2.00x)" in told


def test_speed_ups_by_size_are_those_by_the_clock_of_gates_that_met_two_sizes():
    def arena(size, by_clock=True, **per_step):
        field = dataclasses.replace(WALL, size=size)
        several = {
            name: [made([0.2, 0.5, 0.8] if name != "DG-K 10%" else [0.2, 0.2, 0.2], per_step=paid)]
            for name, paid in per_step.items()
        }
        return Arena(field, by_clock, several)

    arenas = [
        arena("toy", **{"GRPO": 6.0, "PODS 10%": 3.0, "DG-K 10%": 1.0}),
        arena("1m", **{"GRPO": 6.0, "PODS 10%": 1.5, "DG-K 10%": 1.0, "random 10%": 1.0}),
        arena("5m", by_clock=False, **{"GRPO": 6.0, "random 10%": 1.0}),
    ]
    found = analysis.speed_ups_by_size(arenas, SMALL)
    sizes = [98_304, 983_040]
    for axis in (LEARNER, LOOP):
        assert list(found[axis]) == ["DG-K 10%", "PODS 10%"]
        assert [found[axis]["PODS 10%"][size].value for size in sizes] == [2.0, 4.0]
        assert {found[axis]["DG-K 10%"][size].bound for size in sizes} == {"at most"}
    left = drawing.sizes(found).axes[0]
    drawn = [(line.get_marker(), place) for line in left.lines for place in line.get_xdata()]
    assert [place for marker, place in drawn if marker == "o"] == sizes
    assert [place for marker, place in drawn if marker == "v"] == sizes
    empty = [line for line in left.lines if line.get_markerfacecolor() == "white"]
    assert len(empty) == 2  # single seeds
    assert not any(analysis.speed_ups_by_size(arenas[:1], SMALL).values())


def test_the_zero_advantage_filter_is_one_of_the_gates():
    table = joined(
        clocked("GRPO", 0, [0.2, 0.5, 0.8], learner=3.0, loop=4.0),
        clocked("PODS 10%", 0, [0.2, 0.5, 0.8], learner=0.75, loop=2.0),
        clocked("zero-advantage filter", 0, [0.2, 0.5, 0.8], learner=0.5, loop=1.0),
    )
    (told,) = (each for each in analysis.analyse(table, SMALL).findings if "of all gates" in each)
    assert "zero-advantage filter was the first at" in told
    assert "over GRPO of 6.00x in learner seconds and of 4.00x by the whole loop (half way" in told


def test_saved_time_that_bought_rollouts_is_compared_by_the_loop():
    part = next(iter(assignments.more_runs(SMALL, WALL)))
    base = joined(
        clocked("GRPO", 0, [0.2, 0.5, 0.8], learner=3.0, loop=4.0),
        clocked("DG-K 10%", 0, [0.2, 0.5, 0.8], learner=0.25, loop=1.0),
    )
    more = clocked("DG-K 10%", 0, [0.2, 0.9, 0.9], learner=1.0, loop=2.0)
    more["part"], more["forward"] = part, more["step"] * 500
    told = analysis.analyse(joined(base, more), SMALL).findings
    (told,) = (each for each in told if "instead of" in each)
    assert f"500 rollouts a step instead of {WALL.num_rows}" in told
    assert " in 1.16 loop seconds (1 of 1 seeds)" in told
    assert "a speed-up of 4.67x over GRPO, and over the same without of 1.17x" in told
    assert "reward at the end 0.900, GRPO of the same seeds 0.650." in told


def test_saved_time_may_have_bought_nothing():
    part = next(iter(assignments.more_runs(SMALL, WALL)))
    base = joined(
        clocked("GRPO", 0, [0.2, 0.5, 0.8], learner=3.0, loop=4.0),
        clocked("DG-K 10%", 0, [0.2, 0.5, 0.8], learner=0.25, loop=1.0),
    )
    more = clocked("DG-K 10%", 0, [0.2, 0.3, 0.3], learner=1.0, loop=2.0)
    more["part"] = part
    told = analysis.analyse(joined(base, more), SMALL).findings
    (told,) = (each for each in told if "instead of" in each)
    assert "in at least 4 loop seconds (0 of 1 seeds), a speed-up of at most" in told


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


def diagnosed(reward, *, series="PG", contenders=(), **logged):
    """Return the failures; what was logged is the last value, or the first and the last."""
    arena = Arena(GRID, False, {series: [made([0.2, reward], series=series)]})
    lines = [
        Record("p", series, 1e-3, 0, step, 0, 0, name.replace("_", " "), value)
        for name, given in logged.items()
        for step, value in enumerate(given if isinstance(given, tuple) else (1.0, given))
    ]
    table = records.frame(lines, part="p")
    return [found.kind for found in failures.found(arena, table, contenders)]


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
    contender = Contender(name="PG", gate=gate)
    assert diagnosed(0.5, contenders=[contender], kept_delight_share=share) == kinds


def test_starts_end_at_the_first_reward_that_is_enough():
    table = tuned_points({0: [0.1, 0.35, 0.6], 1: [0.1, 0.1, 0.2]})
    assert analysis.start_rewards(table, 0.3) == {0: 0.35, 1: 0.2}
    told = analysis.analyse(table, SMALL).findings
    assert told == [
        "sorting-2-toy: supervised starts of 2 seeds end at rewards of 0.20 to 0.35; 1 never got "
        "to 0.3."
    ]


def tuned_points(rewards):
    part = assignments.warm_name(GRID)
    return records.frame(
        [
            Record(part, "start", math.nan, seed, step, 0, 0, tuning.QUALITY, reward)
            for seed, several in rewards.items()
            for step, reward in enumerate(several, start=1)
        ],
        part=part,
    )


def test_best_learning_rates_are_told_by_rate_and_denominator():
    (part,) = assignments.denominator_names(SMALL)
    best = {(0.1, "full"): 1e-3, (0.1, "kept"): 3e-4, (0.3, "full"): 3e-4, (0.3, "kept"): 3e-4}
    table = records.frame(
        [
            Record(part, each.name, rate, 0, step, 0, 0, tuning.QUALITY, reward)
            for each in assignments.denominators(SMALL)
            for rate in SMALL.denominator_learning_rates
            for step in (0, 1)
            for reward in [1.0 if rate == best[each.rate, each.denominator] else 0.5]
        ],
        part=part,
    )
    assert analysis.best_by_rate(table, SMALL) == {
        "full": {0.1: 1e-3, 0.3: 3e-4},
        "kept": {0.1: 3e-4, 0.3: 3e-4},
    }
    told = analysis.analyse(table, SMALL).findings
    assert "Best learning rate of DG-K with the full denominator: 10%: 0.001, 30%: 0.0003." in told


def test_a_best_rate_at_the_edge_of_those_tried_is_told():
    tuned = {"PG": {1e-4: 0.1, 1e-3: 0.9, 1e-2: 0.2}, "DG": {1e-4: 0.9, 1e-3: 0.1, 1e-2: 0.2}}
    assert analysis.edges(tuned, (1e-4, 1e-3, 1e-2)) == ["DG"]


def test_a_family_has_one_colour_and_a_dash_for_each_rate():
    among = ["GRPO", "DG-K 3%", "DG-K 10%", "DG, eta 1"]
    looks = {name: drawing.look(name, among) for name in among}
    assert looks["DG-K 3%"][0] == looks["DG-K 10%"][0] != looks["DG, eta 1"][0]
    assert looks["DG-K 3%"][1] != looks["DG-K 10%"][1]


def test_small_settings_know_what_the_tests_rely_on():
    assert dataclasses.replace(GRID).num_rows == ROWS
    assert {"PODS 10%", "random 10%", "DG-K 10%"} <= {each.name for each in SMALL.headliners()}
