import math

import pytest

from kondo_lab.summary import curve, estimate, summarise, trim, window
from lab.examples import comparison, record, result
from tolerances import assert_close


def test_estimate():
    # Mean 2; standard deviation of (1, 3) is sqrt(2), over sqrt(2) seeds is 1.
    assert_close(estimate([1.0, 3.0]).mean, 2.0)
    assert_close(estimate([1.0, 3.0]).standard_error, 1.0)


def test_one_seed_has_no_standard_error():
    assert math.isnan(estimate([1.0]).standard_error)


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (19, 1), (40, 2), (600, 30)])
def test_window_is_a_twentieth_of_the_steps(steps, width):
    assert window(steps) == width


def test_final_error_is_that_of_the_last_twentieth():
    records = [record(1.0)] * 38 + [record(0.2), record(0.4)]
    rows = summarise([result("PG", records)])
    assert_close(rows[0].error.mean, 0.3)


def test_rows_are_means_over_seeds_of_each_runs_totals():
    results = [
        result("PG", [record(0.5)] * 3, seed=0, test_error=0.1),
        result("PG", [record(0.7)] * 3, seed=1, test_error=0.3),
        result("DG-K (3%)", [record(0.2, paid=3, gate=0.5, forward=0.25, backward=0.25)] * 3),
    ]
    dense, gated = summarise(results)
    assert (dense.num_seeds, dense.num_steps, gated.num_seeds) == (2, 3, 1)
    assert_close(dense.error.mean, 0.6)
    assert_close(dense.error.standard_error, 0.1)
    assert_close(dense.test_error.mean, 0.2)
    assert gated.test_error is None
    assert (dense.samples, dense.backward_passes) == (300, 300)
    assert (gated.samples, gated.backward_passes) == (300, 9)
    assert dense.seconds == {
        "sampling": 3.0, "gate": 0.0, "forward": 6.0, "backward": 12.0, "optimiser": 3.0,
    }  # fmt: skip
    # Learner: 18 s dense, 3 x (0.5 + 0.25 + 0.25) = 3 s gated; the loop adds 6 s to both.
    assert (dense.speed_up, gated.speed_up) == (1.0, 6.0)
    assert gated.learner_seconds == 3.0
    assert_close(gated.loop_speed_up, 24 / 9)


def test_speed_ups_are_within_a_task():
    results = comparison()
    slow = [result("PG", [record(0.5, backward=98.0)] * 40, task="other")]
    rows = summarise(results + slow)
    assert [row.speed_up for row in rows] == [1.0, 1.0, 6.0, 1.0, 1.0, 6.0, 1.0]


def test_trim_gives_every_method_the_same_samples():
    results = [
        result("PG", [record(0.1)] * 5),
        result("DG", [record(0.1)] * 4),
        result("PG", [record(0.1)] * 9, task="reversal"),
    ]
    assert [len(r.records) for r in trim(results)] == [4, 4, 9]


def test_trim_drops_a_task_that_some_method_never_began():
    results = [
        result("PG", [record(0.1)] * 5),
        result("PG", [record(0.1)] * 5, task="reversal"),
        result("DG", [], task="reversal"),
    ]
    assert [r.task for r in trim(results)] == ["digits"]


def test_curve_sums_up_to_each_point():
    records = [record(step / 40, paid=3, gate=0.5) for step in range(1, 41)]
    points = curve(records, num_points=4)
    assert [point.samples for point in points] == [1000, 2000, 3000, 4000]
    assert [point.backward_passes for point in points] == [30, 60, 90, 120]
    # Window of two steps: the mean of steps 9 and 10 of 40.
    assert_close(points[0].error, 9.5 / 40)
    assert_close(points[-1].error, 39.5 / 40)
    assert_close(points[-1].learner_seconds, 40 * 6.5)
    assert_close(points[-1].sampling_seconds, 40.0)


def test_short_curves_have_a_point_per_step():
    assert [point.samples for point in curve([record(0.1)] * 3)] == [100, 200, 300]
