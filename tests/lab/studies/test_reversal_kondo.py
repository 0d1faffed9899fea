import math

import pytest

from kondo_lab.evidence import progress, records, runner
from kondo_lab.evidence.study import Estimate, headline
from kondo_lab.studies.reversal_kondo import STUDY, analysis
from kondo_lab.studies.reversal_kondo.claims import claims
from kondo_lab.studies.reversal_kondo.settings import SMALL
from lab.made_up import Record, table_of
from lab.studies import toy


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-kondo"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


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
        "curves-seeds-0-1",
        "lengths-seeds-0-1",
        "vocabularies",
        "curves-seeds-2-3",
        "lengths-seeds-2-3",
    ]
    assert [part.name for part in STUDY.parts(STUDY.settings("full", None))][-2:] == [
        "curves-seeds-5-9",
        "lengths-seeds-5-9",
    ]
    seeds = {line.seeds for line in found.headline if line.figure == "Kondo Fig 10"}
    assert seeds == {4}
    first = table[~table["part"].str.endswith("-seeds-2-3")]
    fewer = analysis.analyse(first, SMALL)
    assert {line.seeds for line in fewer.headline if line.figure == "Kondo Fig 10"} == {2}


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
    run = table[table["part"] == "lengths-seeds-0-1"]["series"].unique()
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
    part = "curves-seeds-0-1"
    made = [
        Record(part, name, math.nan, seed, step, 100 * step, step, "online error", value)
        for name in names
        for seed in range(2)
        for step in steps
        for value in [analysis.FIG_8.get(name, {}).get(step, 0.5)]
    ]
    found = analysis.analyse(table_of(made, part=part), full)
    errors = [line for line in found.headline if line.metric == "online error"]
    verdicts = {name: {line.verdict for line in errors if line.series == name} for name in names}
    assert verdicts["PMPO float32"] == verdicts["DG"] == verdicts["PPO"] == {"matches"}
    assert verdicts["PMPO"] == {""}
    assert {line.against for line in errors if line.series == "DG"} == {"fitted"}


def test_pg_in_the_place_of_ppo_has_no_verdict_and_the_figure_is_marked_as_fitted():
    full = STUDY.settings("full", None)
    part = "lengths-seeds-0-1"
    made = [
        Record(part, name, length, seed, step, 100 * step, step, "online error", error)
        for name in (*analysis.delightful(full), "PG", "PMPO float32", "PMPO")
        for length, error in ((6.0, 0.0), (24.0, 0.0 if name.startswith("DG") else 0.9))
        for seed in range(3)
        for step in (1000, 2500, 5000, 7500, 10_000)
    ]
    found = analysis.analyse(table_of(made, part=part), full)
    lines = [line for line in found.headline if line.expected is not None]
    ppo = [line for line in lines if "PPO" in line.series]
    assert any(line.series == "PPO" for line in ppo)
    assert any(line.series == "DG < PPO" for line in ppo)
    assert {(line.against, line.verdict) for line in ppo} == {("", "")}
    others = [line for line in lines if "PPO" not in line.series]
    assert {line.against for line in others if "<" in line.series} == {"paper"}
    assert {line.against for line in others if "<" not in line.series} == {"fitted"}
    told = {claim.statement: claim for claim in found.claims}
    beside = told["DG-K solves about as long sequences as DG"]
    assert beside.verdict == "met"
    orders = told["DG and DG-K solve longer sequences than PG, PPO and PMPO"]
    assert (orders.verdict, orders.measured) == ("met", "6 of 6 match")


def gain(place, value, seeds=3, se=0.1):
    """A speed-up of DG-K 3% at c = 8."""
    metric = f"speed-up over PG to 25% error, {place}"
    return headline("Kondo section 5", "DG-K 3%", metric, 8, Estimate(value, se, seeds))


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([gain("H=10 M=4", 2.0), gain("H=10 M=8", 3.0)], "met"),
        ([gain("H=10 M=4", 3.0), gain("H=10 M=8", 2.0)], "missed"),
        ([gain("H=10 M=4", 3.0), gain("H=10 M=8", 3.1)], "open"),
        # M = 2 at other lengths belongs to another sweep.
        ([gain("H=12 M=2", 9.0), gain("H=10 M=4", 2.0), gain("H=10 M=8", 3.0)], "met"),
        ([gain("H=12 M=2", 1.0), gain("H=10 M=4", 2.0)], "open"),
        ([gain("H=12 M=2", 1.0), gain("H=18 M=2", 2.0)], "open"),
        ([gain("H=10 M=4", 2.0, 2), gain("H=10 M=8", 3.0)], "open"),
        ([gain("H=10 M=4", 2.0, 3, math.nan), gain("H=10 M=8", 3.0, 3, math.nan)], "open"),
        ([gain("H=10 M=4", 2.0, 1, math.nan), gain("H=10 M=8", 3.0, 1, math.nan)], "open"),
    ],
)
def test_the_gain_is_compared_over_vocabularies_of_one_length(lines, verdict):
    found = {claim.statement: claim for claim in claims(lines, 10)}
    claim = found["DG-K 3%: the gain over PG grows with the vocabulary"]
    assert claim.verdict == verdict
    assert "M = 2:" not in claim.measured


def test_a_speed_up_has_the_spread_of_its_seeds():
    made = [
        Record("vocabularies", name, 4.0, seed, step, 100 * step, 100 * step, "online error", error)
        for name, arrives in (("PG", (4, 8)), ("DG", (2, 2)))
        for seed, at in enumerate(arrives)
        for step in range(1, 9)
        for error in [0.25 if step >= at else 0.9]
    ]
    found = analysis._speed(table_of(made, part="vocabularies"), "vocabularies", "DG", 4.0, 1)
    assert found == Estimate(3.0, 1.0, 2)  # 4 / 2 and 8 / 2


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
