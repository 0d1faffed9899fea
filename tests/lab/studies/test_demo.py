import dataclasses
import json
import math
from functools import partial

import matplotlib.image
import pandas as pd
import pytest
import torch

from kondo_lab.evidence import plotting, progress, runner
from kondo_lab.studies.demo import STUDY, analysis
from kondo_lab.studies.demo import run as demo
from kondo_lab.studies.demo.settings import Settings, settings
from kondo_lab.studies.demo.training import StepRecord
from kondo_lab.training import worker_pool
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.record import Log
from lab.made_up import table_of
from tolerances import assert_close

NAMES = ["PG", "DG", "DG-K (3%)"]
QUICK = settings("small", None)


def step(error, *, paid=100, gate=0.0, forward=2.0, backward=4.0):
    return StepRecord(error, 100, paid, 1.0, gate, forward, backward, 1.0)


def result(method, steps, *, seed=0, test_error=None, finished=True):
    return demo.RunResult(
        method=method, seed=seed, steps=steps, finished=finished, test_error=test_error
    )


def comparison(*, gate=0.5, num_steps=40):
    """Two tasks, three methods, two seeds; the gated learner takes gate + 0.25 + 0.25 a step."""
    tables = []
    for task in ("digits", "reversal"):
        log = Log(task)
        for seed in (0, 1):
            for method, end in (("PG", 0.4), ("DG", 0.1), ("DG-K (3%)", 0.2)):
                errors = [0.9 + (end - 0.9) * at / num_steps for at in range(num_steps)]
                cost = {"paid": 3, "gate": gate, "forward": 0.25, "backward": 0.25}
                cost = cost if method.startswith("DG-K") else {}
                steps = [step(error + 0.01 * seed, **cost) for error in errors]
                tested = 0.05 + 0.02 * seed if task == "digits" else None
                run = result(method, steps, seed=seed, test_error=tested)
                demo.add(log, run)
        tables.append(table_of(log.runs(), part=task))
    return pd.concat(tables, ignore_index=True)


@pytest.fixture(scope="module")
def found():
    with plotting.style():
        return analysis.analyse(comparison(), settings("full", None))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run from seed 5 on: its outcome and its folder."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    order = dataclasses.replace(order_of(out), first_seed=5)
    return runner.run(order, progress.make_console()), out


def order_of(out):
    return runner.Order(
        study=STUDY,
        size="small",
        num_seeds=None,
        out=out,
        device=torch.device("cpu"),
        command="kondo demo",
    )


def context(stopped=lambda: False, notes=None):
    log = [] if notes is None else notes
    return Context(
        device=torch.device("cpu"),
        progress=lambda share, note: log.append((share, note)),
        stopped=stopped,
        checkpoint=None,
    )


def test_all_methods_on_both_tasks_saw_the_same_samples(quick):
    outcome, _ = quick
    lines = [line for line in outcome.analysis.headline if line.metric == "backward passes"]
    pairs = [(line.figure, line.series) for line in lines]
    assert pairs == [(task, name) for task in ("digits", "reversal") for name in NAMES]
    assert {line.x for line in lines} == {400}
    assert [line.ours for line in lines] == [400, 400, 12] * 2


def test_the_seed_is_in_the_manifest_and_the_run_can_be_analysed_again(quick):
    _, out = quick
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["seeds"], manifest["settings"]["first_seed"]) == ([5], 5)
    before = (out / "headline.csv").read_bytes()
    runner.reanalyse(STUDY, out)
    assert (out / "headline.csv").read_bytes() == before


def test_the_same_seed_gives_the_same_errors():
    for task in demo.TASKS:
        train = partial(
            demo.train_seeds,
            send=lambda sent: None,
            stopped=lambda: False,
            settings=QUICK,
            task=task,
        )
        first, again, other = (
            [[one.error for one in run.steps] for run in train([seed])] for seed in (5, 5, 6)
        )
        assert first == again
        assert first != other


def test_several_seeds_are_trained_in_several_processes(monkeypatch):
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 2)
    chosen, notes = dataclasses.replace(QUICK, num_seeds=2), []
    found = table_of(demo._train(chosen, "reversal", context(notes=notes)), part="reversal")
    assert set(found["seed"]) == {0, 1}
    assert notes[-1][0] == 1.0
    assert all(name in notes[-1][1] for name in NAMES)
    # A process of its own changes nothing: the second seed learns as it would here.
    here = demo.train_seeds(
        [1], send=lambda sent: None, stopped=lambda: False, settings=chosen, task="reversal"
    )
    last = found[(found["seed"] == 1) & (found["metric"] == "online error") & (found["step"] == 4)]
    assert last["value"].tolist() == [run.steps[-1].error for run in here]


def test_a_stopped_part_gives_the_steps_that_all_methods_made():
    calls = iter(range(1000))
    # 6 steps in the first round, then two and one of two more.
    with pytest.raises(Stopped) as stop:
        demo._train(QUICK, "digits", context(stopped=lambda: next(calls) >= 9))
    table = table_of(stop.value.runs, part="digits")
    assert table["step"].max() == 2
    assert set(table["series"]) == set(NAMES)


def test_a_part_stopped_before_its_first_step_has_no_records():
    with pytest.raises(Stopped) as stop:
        demo._train(QUICK, "digits", context(stopped=lambda: True))
    assert list(stop.value.runs) == []


def test_trim_gives_every_method_the_same_samples():
    runs = [result("PG", [step(0.1)] * 5), result("DG", [step(0.1)] * 4)]
    assert [len(run.steps) for run in demo.trim(runs)] == [4, 4]
    assert demo.trim([*runs, result("DG-K (3%)", [])]) == []


def test_points_sum_up_to_each_step(monkeypatch):
    monkeypatch.setattr(demo, "NUM_POINTS", 4)
    steps = [step(at / 40, paid=3, gate=0.5) for at in range(1, 41)]
    log = Log("digits")
    demo.add(log, result("DG-K (3%)", steps, test_error=0.3))
    (run,) = log.runs()
    assert [row["rollouts"] for row in run.curve] == [1000, 2000, 3000, 4000]
    assert [row["passes"] for row in run.curve] == [30, 60, 90, 120]
    # Window of two steps: the mean of steps 9 and 10 of 40.
    assert_close(run.curve[0]["online error"], 9.5 / 40)
    assert_close(run.curve[-1]["online error"], 39.5 / 40)
    last = run.curve[-1]
    assert last["seconds gate"] == 20.0
    assert last["seconds optimiser"] == 40.0
    assert last["test error"] == 0.3
    assert sum("test error" in row for row in run.curve) == 1


def test_short_runs_have_a_point_per_step():
    log = Log("digits")
    demo.add(log, result("PG", [step(0.1)] * 3))
    assert [row["rollouts"] for row in log.runs()[0].curve if "online error" in row] == [
        100,
        200,
        300,
    ]


def test_headline_has_means_over_seeds_and_speed_ups_over_pg(found):
    lines = {(line.figure, line.series, line.metric): line for line in found.headline}
    assert ("reversal", "PG", "test error") not in lines
    gated = {metric: lines["digits", "DG-K (3%)", metric] for _, _, metric in lines}
    # Steps 39 and 40 of 40 of a line from 0.9 to 0.2, and 0.01 more for the second seed.
    assert_close(gated["final error"].ours, 0.9 - 0.7 * 38.5 / 40 + 0.005)
    assert_close(gated["final error"].se, 0.005)
    assert_close(gated["test error"].ours, 0.06)
    assert (gated["backward passes"].ours, gated["backward passes"].x) == (120, 4000)
    # Learner: 6 s a step dense, 0.5 + 0.25 + 0.25 s gated; the loop adds 2 s to both.
    assert gated["learner speed-up"].ours == 6.0
    assert_close(gated["loop speed-up"].ours, 8 / 3)
    assert lines["digits", "PG", "learner speed-up"].ours == 1.0


def test_one_finding_per_task_with_the_measured_numbers(found):
    digits, reversal = found.findings
    assert digits.startswith("digits: DG-K (3%) paid for 3.0% of the backward passes")
    assert reversal.startswith("reversal: ")
    assert "23.1 ±0.5% (PG 42.4 ±0.5% and DG 13.5 ±0.5%)" in digits
    assert "ran at 6.00x, where the count of kept rows alone would allow 33x" in digits
    assert "choosing units took 500.0 ms a step and the kept rows 500.0 ms" in digits
    assert "against 6000.0 ms dense" in digits
    assert "slower" not in digits


def test_the_figure_has_a_caption_with_the_measured_numbers(found):
    assert found.captions["figure"].startswith(
        "Final error on digits: PG 42.4 ±0.5%, DG 13.5 ±0.5%, DG-K (3%) 23.1 ±0.5%, with a learner "
        "6.0 times as fast as PG's. Final error on reversal: "
    )


def test_a_slower_learner_is_called_slower_and_why():
    # 8 s to choose against 6 s dense.
    digits, _ = analysis.analyse(comparison(gate=8.0), settings("full", None)).findings
    assert "Its learner was slower than dense, 0.71x: choosing units took 8000.0 ms" in digits
    assert "too small to earn them back" in digits


def test_small_errors_get_more_digits_and_one_seed_no_error():
    assert analysis.percent(analysis.Estimate(0.1234, math.nan, 1)) == "12.3"
    assert analysis.percent(analysis.Estimate(0.00346, math.nan, 1)) == "0.35"


def test_the_figure_has_a_row_of_three_panels_per_task(found):
    titles = [ax.get_title(loc="left") for ax in found.figures["figure"].axes]
    assert [title.split(":")[0] for title in titles] == ["digits"] * 3 + ["reversal"] * 3


def test_curves_show_the_mean_over_seeds_against_samples_and_backward_passes(found):
    by_samples, by_backward, *_ = found.figures["figure"].axes
    for ax, end in ((by_samples, 4000), (by_backward, 120)):
        lines = {line.get_label(): line for line in ax.get_lines()}
        assert list(lines) == NAMES
        xs, ys = lines["DG-K (3%)"].get_data()
        assert xs[-1] == end
        assert_close(float(ys[-1]), 0.9 - 0.7 * 38.5 / 40 + 0.005)
    assert by_backward.get_xscale() == by_samples.get_yscale() == "log"


def test_bars_add_up_to_the_learner_seconds_and_carry_the_speed_up(found):
    ax = found.figures["figure"].axes[2]
    ends = sorted({round(bar.get_x() + bar.get_width(), 6) for bar in ax.patches})
    assert ends[-1] == 6000.0  # ms of a dense step
    assert 1000.0 in ends  # of a gated one
    assert sorted(text.get_text() for text in ax.texts) == ["1.00x", "1.00x", "6.00x"]


def test_an_error_of_zero_can_be_drawn(quick):
    table = comparison()
    table.loc[(table["metric"] == "online error") & (table["step"] > 20), "value"] = 0.0
    with plotting.style():
        figure = analysis.analyse(table, settings("full", None)).figures["figure"]
    low, high = figure.axes[0].get_ylim()
    assert 0 < low < high
    assert matplotlib.image.imread(quick[1] / "figure.png").std() > 0.05  # something was drawn


def test_settings_with_empty_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must lie between 1 and the fewest steps"):
        dataclasses.replace(QUICK, rounds=5)
    assert Settings(num_seeds=2) == settings("full", None)
