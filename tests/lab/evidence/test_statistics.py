import math

import pytest

from kondo_lab.evidence import statistics
from kondo_lab.evidence.statistics import Cost
from kondo_lab.evidence.study import Estimate
from lab.made_up import Record, table_of


def table(*rows, part="a"):
    """Return records of (series, setting, seed, step, value): 100 forwards a step, 3 backwards."""
    made = [
        Record(part, series, setting, seed, step, 100 * step, 3 * step, "error", value)
        for series, setting, seed, step, value in rows
    ]
    return table_of(made, part=part)


NAN = math.nan
# Two seeds at three steps; the means are 1, 0.5, 0.15.
PG = table(
    ("PG", NAN, 0, 0, 1.0),
    ("PG", NAN, 0, 10, 0.4),
    ("PG", NAN, 0, 20, 0.1),
    ("PG", NAN, 1, 0, 1.0),
    ("PG", NAN, 1, 10, 0.6),
    ("PG", NAN, 1, 20, 0.2),
)
SWEEP = table(*[("DG", rate, 0, 10, rate) for rate in (0.01, 0.03, 1 / 3)])


def test_estimate_is_mean_standard_error_and_count():
    # Deviations -1, 0, 1: variance 1, standard error 1 / sqrt(3).
    assert statistics.estimate([1, 2, 3]) == (2, pytest.approx(1 / math.sqrt(3)), 3)
    alone = statistics.estimate([5.0])
    assert (alone.mean, alone.seeds) == (5, 1)
    assert math.isnan(alone.se)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_a_seed_that_diverged_takes_the_standard_error_with_it(value):
    found = statistics.estimate([1.0, value, 3.0])
    assert repr(found.mean) == repr((1.0 + value + 3.0) / 3)
    assert math.isnan(found.se)
    assert found.seeds == 3


def test_the_order_of_records_does_not_choose_between_two_steps_as_near():
    rows = [("PG", NAN, 0, step, value) for step, value in ((0, 1.0), (95, 0.4), (105, 0.2))]
    for ordered in (rows, rows[::-1]):
        assert statistics.at(table(*ordered), "a", "PG", "error", 100).mean == 0.4


@pytest.mark.parametrize("asked", [10, 9.5, 10.9])
def test_at_takes_the_nearest_logged_step(asked):
    found = statistics.at(PG, "a", "PG", "error", asked)
    assert found == Estimate(pytest.approx(0.5), pytest.approx(0.1), 2)


def test_at_counts_forward_passes_too():
    assert statistics.at(PG, "a", "PG", "error", 1900, by="forward").mean == pytest.approx(0.15)


@pytest.mark.parametrize("asked", [8, 30])
def test_at_refuses_a_step_far_from_any_logged_one(asked):
    with pytest.raises(ValueError, match=f"step must lie within 10% of a logged.*got {asked};"):
        statistics.at(PG, "a", "PG", "error", asked)


def test_at_refuses_if_one_seed_ended_early():
    short = PG[(PG["seed"] == 0) | (PG["step"] < 20)]
    with pytest.raises(ValueError, match="seed 1, is 10"):
        statistics.at(short, "a", "PG", "error", 20)


def test_final_is_the_last_step_of_each_seed():
    short = PG[(PG["seed"] == 0) | (PG["step"] < 20)]
    assert statistics.final(short, "a", "PG", "error").mean == pytest.approx((0.1 + 0.6) / 2)


def test_curve_is_in_the_order_of_steps():
    line = statistics.curve(PG.sample(frac=1, random_state=0), "a", "PG", "error")
    assert list(line["step"]) == [0, 10, 20]
    assert list(line["mean"]) == pytest.approx([1.0, 0.5, 0.15])
    assert list(line["se"]) == pytest.approx([0.0, 0.1, 0.05])
    assert list(line["seeds"]) == [2, 2, 2]
    assert list(line["forward"]) == [0, 1000, 2000]
    assert list(line["backward"]) == [0, 30, 60]


def test_a_seed_without_a_number_is_not_left_out_of_a_mean():
    means = statistics.over_seeds(table(("PG", NAN, 0, 1, 2.0), ("PG", NAN, 1, 1, NAN)))
    assert math.isnan(means["mean"][0])
    assert math.isnan(means["se"][0])
    assert means["seeds"][0] == 2


def test_settings_are_told_apart_with_the_digits_of_a_file():
    assert len(statistics.select(SWEEP, "a", "DG", "error", setting=0.333333)) == 1
    assert statistics.final(SWEEP, "a", "DG", "error", setting=0.03).mean == 0.03


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("b", "DG", "error"), r"part must be one of \['a'\], got 'b'"),
        (("a", "PG", "error"), r"series must be one of \['DG'\], got 'PG'"),
        (("a", "DG", "loss"), r"metric must be one of \['error'\], got 'loss'"),
        (("a", "DG", "error"), "setting must be given for series 'DG'"),
    ],
)
def test_what_is_not_there_is_named(chosen, message):
    with pytest.raises(ValueError, match=message):
        statistics.select(SWEEP, *chosen)


def test_an_unknown_setting_is_named():
    with pytest.raises(ValueError, match=r"setting must be one of.*got 0\.5"):
        statistics.select(SWEEP, "a", "DG", "error", setting=0.5)


def test_first_reach_goes_halfway_down_in_log_error():
    # 0.4 -> 0.1 passes 0.2 halfway in the logarithm: 1500 forwards; 0.6 -> 0.2 at its end.
    found = statistics.first_reach(PG, "a", "PG", "error", 0.2)
    assert found.costs == {0: pytest.approx((1500, 45)), 1: pytest.approx((2000, 60))}
    assert (found.reached, found.seeds) == (2, 2)
    assert found.mean == pytest.approx((1750, 52.5))


def test_seeds_that_never_reach_are_counted_apart():
    found = statistics.first_reach(PG, "a", "PG", "error", 0.15)
    assert list(found.costs) == [0]
    assert (found.reached, found.seeds) == (1, 2)
    nobody = statistics.first_reach(PG, "a", "PG", "error", 0.05)
    assert (nobody.reached, nobody.seeds) == (0, 2)
    assert math.isnan(nobody.mean.forward)


def test_only_the_first_crossing_counts():
    bumpy = table(("PG", NAN, 0, 0, 1.0), ("PG", NAN, 0, 1, 0.1), ("PG", NAN, 0, 2, 1.0))
    assert statistics.first_reach(bumpy, "a", "PG", "error", 0.1).costs[0] == pytest.approx(
        (100, 3)
    )


def test_an_error_of_zero_is_reached_linearly():
    # From 0.4 to 0 the target 0.1 lies three quarters down.
    solved = table(("PG", NAN, 0, 0, 0.4), ("PG", NAN, 0, 4, 0.0))
    assert statistics.first_reach(solved, "a", "PG", "error", 0.1).costs[0] == pytest.approx(
        (300, 9)
    )


def test_a_seed_there_from_the_start_counts_with_its_first_point():
    assert statistics.first_reach(PG, "a", "PG", "error", 2.0).costs[0] == (0, 0)


def test_a_frontier_point_tells_what_was_paid():
    point = statistics.frontier_point(PG, "a", "PG", "error", 0.15, task="digits", rate=1.0)
    # Seed 0 alone: log(0.4 / 0.15) / log(4) of the way from 1000 to 2000.
    share = math.log(0.4 / 0.15) / math.log(4)
    assert point[:4] == ("digits", "PG", 1.0, "15% error")
    assert point[4:] == pytest.approx((1000 + 1000 * share, 30 + 30 * share, 1, 2, 0.15))


@pytest.mark.parametrize(("ratio", "expected"), [(0, 100 / 125), (1, 200 / 130), (9, 1000 / 170)])
def test_speed_up_is_a_ratio_of_costs(ratio, expected):
    found = statistics.speed_up(ratio, baseline=Cost(100, 100), cost=Cost(125, 5))
    assert found == pytest.approx(expected)
