import math

import pytest

from kondo_lab.training.record import Log, keeping


def test_rows_of_an_arm_x_and_seed_are_one_run_in_the_order_of_their_first_rows():
    log = Log("p", task="digits bandit", learning_rate=1e-3)
    for step in (1, 2):
        for seed in (1, 0):
            log.add("PG", seed, {"error": 0.5 / step}, step=step, rollouts=step, passes=step)
    log.add("PG", 0, {"error": 0.25}, x=0.5)
    log.add("DG", 0, {"error": 0.25}, learning_rate=1e-2)
    found = log.runs()
    assert [(run.arm, run.seed, run.learning_rate) for run in found] == [
        ("PG", 1, 1e-3),
        ("PG", 0, 1e-3),
        ("PG", 0, 1e-3),
        ("DG", 0, 1e-2),
    ]
    assert [run.x for run in found[2:]] == [0.5, pytest.approx(math.nan, nan_ok=True)]
    assert {(run.part, run.task, run.k) for run in found} == {("p", "digits bandit", 1)}
    assert found[0].curve == [
        {"step": 1, "rollouts": 1, "passes": 1, "error": 0.5},
        {"step": 2, "rollouts": 2, "passes": 2, "error": 0.25},
    ]


def test_metrics_of_one_place_share_a_row_and_none_is_written_over():
    log = Log("p")
    for name, value in (("error", 0.5), ("entropy", 1.0), ("error", 0.25)):
        log.add("PG", 0, {name: value}, step=1)
    log.add("PG", 0, {"entropy": 2.0}, step=1, passes=3)
    place = {"step": 1, "rollouts": 0}
    assert log.runs()[0].curve == [
        place | {"passes": 0, "error": 0.5, "entropy": 1.0},
        place | {"passes": 0, "error": 0.25},  # for the runner to refuse
        place | {"passes": 3, "entropy": 2.0},
    ]


def test_a_metric_may_not_be_called_as_a_place():
    with pytest.raises(ValueError, match="measured must not have passes, step, which say where"):
        Log("p").add("PG", 0, {"step": 1.0, "passes": 2.0})


def test_metrics_are_kept_by_row_and_name_and_empty_rows_and_runs_are_left_out():
    log = Log("p")
    for arm in ("PG", "DG"):
        for step in (1, 2):
            log.add(arm, 0, {"error": 0.5 if arm == "PG" else 0.0, "entropy": 1.0}, step=step)
    (kept,) = keeping(log.runs(), lambda row, name: row["step"] == 2 and row[name] == 0.5)
    assert kept.arm == "PG"
    assert kept.curve == [{"step": 2, "rollouts": 0, "passes": 0, "error": 0.5}]
    assert len(log.runs()[0].curve) == 2  # as it was
