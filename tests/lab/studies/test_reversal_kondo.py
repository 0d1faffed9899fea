import math

import pytest

from kondo_lab import progress
from kondo_lab.part import Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.reversal_kondo import STUDY, analysis
from kondo_lab.studies.reversal_kondo.settings import SMALL
from lab.studies import toy


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-kondo"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def test_every_figure_is_drawn(small):
    assert list(small[0].figures) == [
        "fig8-learning-curves",
        "fig10-lengths",
        "speed-up-by-backward-cost",
        "vocabularies",
    ]


def test_both_gates_pay_for_less_than_everything_and_the_exact_count_for_no_more_than_its_rate(
    small,
):
    table = small[1]
    curves = table["part"].str.startswith("curves")
    ends = table[curves & (table["step"] == SMALL.num_steps)]
    paid = ends.groupby("series")["backward"].max()
    assert paid["DG"] == paid["PMPO"] == SMALL.num_steps * 100
    assert paid["DG-K 3%, exact count"] <= SMALL.num_steps * 3
    assert paid["DG-K 3%, exact count"] <= paid["DG-K 3%"] < paid["DG-K price 0"]
    assert paid["DG-K price 0"] < SMALL.num_steps * 100


def test_seeds_come_in_blocks_of_parts_and_are_read_as_one(small):
    found, table = small
    assert list(table["part"].unique()) == [
        "curves-seeds-0-2",
        "lengths-seeds-0-2",
        "vocabularies",
        "curves-seeds-3-3",
        "lengths-seeds-3-3",
    ]
    assert [part.name for part in STUDY.parts(STUDY.settings("full", None))][-2:] == [
        "curves-seeds-6-9",
        "lengths-seeds-6-9",
    ]
    seeds = {line.seeds for line in found.headline if line.figure == "Kondo Fig 10"}
    assert seeds == {4}
    first = table[~table["part"].str.endswith("-seeds-3-3")]
    fewer = analysis.analyse(first, SMALL)
    assert {line.seeds for line in fewer.headline if line.figure == "Kondo Fig 10"} == {3}


def test_no_cell_of_figure_10_is_left_out_and_both_readings_are_there(small):
    cells = {
        (line.series, line.metric)
        for line in small[0].headline
        if line.figure == "Kondo Fig 10" and line.metric.startswith("longest")
    }
    series = ("DG", "DG-K 3%", "DG-K price 0", "PG", "PPO", "PMPO float32", "PMPO")
    assert cells == {(name, metric) for name in series for metric in analysis.READINGS}


def test_pg_is_run_for_ppo_where_ppo_is_not(small):
    found, table = small
    run = table[table["part"] == "lengths-seeds-0-2"]["series"].unique()
    assert "PPO" not in run
    lengths = {
        (line.series, line.metric): line.ours
        for line in found.headline
        if line.figure == "Kondo Fig 10"
    }
    for metric in analysis.READINGS:
        assert lengths["PPO", metric] == lengths["PG", metric]


def test_the_papers_pmpo_is_judged_by_float32_and_exact_ties_by_nothing():
    """A run of full size whose every number is the paper's own."""
    full = STUDY.settings("full", None)
    names = [*analysis.delightful(full), *analysis.baselines(), "PMPO", "DG-K 3%, exact count"]
    steps = sorted({int(x) for points in analysis.FIG_8.values() for x in points})
    part = "curves-seeds-0-2"
    made = [
        Record(part, name, math.nan, seed, step, 100 * step, step, "online error", value)
        for name in names
        for seed in range(2)
        for step in steps
        for value in [analysis.FIG_8.get(name, {}).get(step, 0.5)]
    ]
    found = analysis.analyse(records.frame(made, part=part), full)
    errors = [line for line in found.headline if line.metric == "online error"]
    verdicts = {name: {line.verdict for line in errors if line.series == name} for name in names}
    assert verdicts["PMPO float32"] == verdicts["DG"] == verdicts["PPO"] == {"matches"}
    assert verdicts["PMPO"] == {""}


def test_a_speed_up_needs_all_seeds_to_arrive(small):
    table = small[1].copy()
    late = (table["part"] == "vocabularies") & (table["series"] == "PG")
    table.loc[late, "value"] = 1.0
    assert analysis._speed(table, "vocabularies", "DG", SMALL.vocabularies[0], 1.0) is None


def test_the_frontier_names_dense_and_fixed_rates(small):
    rates = {point.series: point.rate for point in small[0].frontier}
    assert rates["PG"] == 1.0
    assert rates["DG-K 3%"] == 0.03
    assert math.isnan(rates["DG-K price 0"])
