import csv
import dataclasses
import math

import pandas as pd
import pytest

import kondo
from kondo_lab.evidence import progress, records, runner, statistics
from kondo_lab.evidence.statistics import Cost, Reach
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.frontier import STUDY, analysis, compared_gates, points
from kondo_lab.studies.frontier.run import logged
from kondo_lab.studies.frontier.settings import settings
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import QuantileGate
from lab.made_up import Record, table_of
from lab.studies import toy

FULL = settings("full", None)


def quick(size, num_seeds):
    """The small size, cut to a few steps."""
    return dataclasses.replace(
        settings(size, num_seeds),
        image_steps=20,
        image_target=0.95,
        reversal_steps=10,
        reversal_target=0.99,
        linear_points=4,
        log_points=4,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("frontier") / "run"
    study = dataclasses.replace(STUDY, settings=quick)
    runner.run(toy.order(out, study), progress.make_console())
    return out


def point(series, backward, error, reached=None, seeds=2):
    costs = dict.fromkeys(range(seeds), reached) if reached else {}
    line = compared_gates.Line(series, series, 0.1, Arm(gate=kondo.Gate(rate=0.1)))
    return points.Point(line, Estimate(error, 0.0, seeds), backward, Reach(costs, seeds))


def test_every_gate_stands_at_every_rate():
    lines = {line.series: line for line in compared_gates.lines(FULL)}
    assert len(lines) == len(compared_gates.lines(FULL)) == 2 + 4 * 3 + 4 * 2 + 3 + 2
    assert lines["DG-K 3%"].arm == Arm(gate=QuantileGate(rate=0.03))
    assert lines["top 1%"].arm == Arm(gate=kondo.Gate(rate=0.01))
    assert lines["rolling 30%"].arm == Arm(gate=kondo.Gate(rate=0.3, window=16))
    drawn = Arm(gate=kondo.Gate(rate=0.1, temperature=0.1))
    assert lines["draw, eta 0.1, 10%"].arm == drawn
    assert lines["price 0.5"].arm == Arm(gate=kondo.Gate(price=0.5))
    assert math.isnan(lines["price 0.5"].rate)
    assert lines["random 10%"].arm == Arm(gate=kondo.Gate(rate=0.1, signal=kondo.signals.uniform))
    members = compared_gates.members(FULL, learning_rate=1e-3)
    assert len({(m.series, m.seed) for m in members}) == len(members) == 10 * len(lines)
    assert {m.setting for m in members if m.series.startswith("price")} == {0, 0.1, 0.5}


def test_the_last_interval_is_whole():
    steps = logged(10_000, FULL)
    assert steps == sorted(set(steps))
    assert steps[-2:] == [9750, 10_000]
    assert logged(3000, FULL)[-2:] == [2925, 3000]
    assert steps[:3] == [1, 2, 3]


def test_the_front_holds_those_that_nobody_beats():
    free, cheap, dear = point("free", 10, 0.5), point("cheap", 100, 0.2), point("dear", 1000, 0.1)
    beaten = point("beaten", 500, 0.3)
    same_cost, same_error = point("same cost", 1000, 0.2), point("same error", 2000, 0.1)
    others = [same_error, beaten, same_cost]
    assert points.front([dear, *others, cheap, free]) == [free, cheap, dear]


def test_a_cost_is_forward_plus_c_times_backward():
    assert point("a", 10, 0.5, Cost(1000.0, 30.0)).cost(4) == 1120
    assert math.isnan(point("a", 10, 0.5, None).cost(4))


def made(series_values, *, part, metrics, num_steps=10_000):
    """Records of two seeds whose error falls as 0.5^(step / half) and backward as a share."""
    return [
        Record(part, series, math.nan, seed, step, 100 * step, round(100 * step * share), m, error)
        for series, (share, half) in series_values.items()
        for seed in range(2)
        for step in logged(num_steps, FULL)
        for m in metrics
        for error in [0.5 ** (step / half)]
    ]


@pytest.fixture(scope="module")
def full_records():
    """Every series alike, but PG half as fast, and three rates at their price."""
    values = {line.series: (line.rate, 500) for line in compared_gates.lines(FULL)}
    values |= {
        line.series: (0.2, 500) for line in compared_gates.lines(FULL) if math.isnan(line.rate)
    }
    values["PG"] = (1.0, 1000)
    values["random 3%"] = (0.03, 1e6)
    mnist = made(values, part="mnist", metrics=["online error", "test error"])
    reversal = made(values, part="reversal", metrics=["online error"], num_steps=3000)
    parts = [
        table_of(found, part=part) for part, found in (("mnist", mnist), ("reversal", reversal))
    ]
    return pd.concat(parts, ignore_index=True)


def test_the_analysis_compares_with_the_papers_numbers(full_records):
    found = analysis.analyse(full_records, FULL)
    lines = {(h.figure, h.series, h.metric, h.x): h for h in found.headline}
    fig3 = lines["Kondo Fig 3", "DG-K 3%", "speed-up over PG to 5% test error", "c = 4"]
    # PG needs twice the samples: 2 (1 + 4) / (1 + 0.03 x 4).
    assert fig3.ours == pytest.approx(2 * 5 / 1.12)
    assert fig3.expected == 6.30
    fig1 = lines["Kondo Fig 1", "PG", "online error", "1M forward passes"]
    assert (fig1.expected, fig1.ours) == (0.037, pytest.approx(0.5**10))
    fig8 = lines["Kondo Fig 8", "PG", "online error", "step 2000"]
    assert (fig8.expected, fig8.seeds) == (0.23, 2)
    end = lines["beyond the paper", "PG", "mnist: test error at the end", ""]
    assert (end.expected, end.verdict) == (None, "")
    paid = lines["beyond the paper", "top 10%", "mnist: backward passes of the run", ""]
    assert paid.ours == 100_000


def test_the_cheapest_gate_has_got_every_seed_there(full_records):
    found = analysis.analyse(full_records, FULL)
    cost = "mnist: least counted cost to 5% test error, in forward passes"
    (line,) = (h for h in found.headline if h.metric == cost and h.x == "c = 2")
    # A rate of 1% is cheapest; 0.05 = 0.5^(step / 500) at 500 log2(20) steps.
    assert line.series.endswith(" 1%")
    assert line.ours == pytest.approx(100 * 500 * math.log2(20) * 1.02, rel=1e-3)
    one_seed = full_records[
        ~(full_records["series"].str.endswith(" 1%") & (full_records["seed"] == 0))
        | (full_records["step"] < 100)
    ]
    found = analysis.analyse(one_seed, FULL)
    (line,) = (h for h in found.headline if h.metric == cost and h.x == "c = 2")
    assert line.series.endswith(" 3%")
    assert not line.series.startswith("random")


def test_frontier_points_tell_cost_rate_and_quality(full_records):
    found = {(p.task, p.series): p for p in analysis.analyse(full_records, FULL).frontier}
    assert len(found) == 2 * len(compared_gates.lines(FULL))
    top = found["mnist", "top 10%"]
    needed = 100 * 500 * math.log2(20)
    assert top.forward == pytest.approx(needed, rel=1e-3)
    assert top.backward == pytest.approx(needed / 10, rel=1e-3)
    assert (top.rate, top.target, top.reached, top.seeds) == (0.1, "5% test error", 2, 2)
    never = found["reversal", "random 3%"]
    assert never.reached == 0
    assert math.isnan(never.forward)
    assert found["reversal", "PG"].target == "5% online error"


def test_half_a_study_is_analysed(full_records):
    half = full_records[full_records["part"] == "mnist"]
    found = analysis.analyse(half, FULL)
    assert list(found.figures) == ["mnist"]
    assert {p.task for p in found.frontier} == {"mnist"}


def test_a_small_run_has_both_tasks_and_no_paper_to_match(folder):
    table = records.table(records.read(folder / runner.RECORDS))
    names = {line.series for line in compared_gates.lines(quick("small", None))}
    for part, metrics in (
        ("digits", {"online error", "test error"}),
        ("reversal", {"online error"}),
    ):
        own = table[table["part"] == part]
        assert set(own["series"]) == names
        assert set(own["metric"]) == metrics
        assert (folder / f"{part}.png").stat().st_size > 1000
    last = statistics.curve(table, "digits", "top 10%", "test error").iloc[-1]
    assert (last["forward"], last["backward"]) == (2000, 200)
    with (folder / runner.HEADLINE).open() as file:
        assert all(row["expected"] == "" for row in csv.DictReader(file))
    with (folder / runner.FRONTIER).open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(names)
