import math

import pytest

from kondo_lab.evidence import progress, records, runner
from kondo_lab.studies.reversal_dg import STUDY, analysis, run
from kondo_lab.studies.reversal_dg.settings import SMALL
from lab.made_up import Record, table_of
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-dg"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def test_every_figure_is_drawn_and_every_method_compared(small):
    found, table = small
    assert list(found.figures) == [
        "fig8-learning-curves",
        "fig9-lengths-and-vocabularies",
        "variants",
    ]
    methods = {"PG", "PPO", "PMPO float32", "PMPO", "DG"}
    assert set(table[table["part"] == "curves"]["series"]) == methods
    assert set(table[table["part"] == "lengths-seeds-0-1"]["series"]) == methods - {"PPO"}
    ends = [line for line in found.headline if line.metric == "online error at the end"]
    assert {line.series for line in ends if line.figure == "DG Fig 9a"} == methods
    assert {line.figure for line in found.headline} == {
        "DG Fig 8",
        "DG Fig 9a",
        "DG Fig 9b",
        "DG Fig 9c",
        "DG Fig 9d",
        "DG App D",
    }


def test_seeds_come_in_blocks_and_every_line_says_how_many_there_are(small):
    found, table = small
    figures = {line.figure: line.seeds for line in found.headline}
    assert figures["DG Fig 9a"] == figures["DG Fig 9c"] == SMALL.sweep_seeds == 4
    first = table[~table["part"].str.endswith("-seeds-2-3")]
    fewer = {line.figure: line.seeds for line in analysis.analyse(first, SMALL).headline}
    assert fewer["DG Fig 9a"] == fewer["DG Fig 9c"] == 2


def test_dg_is_compared_on_each_of_eight_variants(small):
    lines = [line for line in small[0].headline if line.figure == "DG App D"]
    orders = [line for line in lines if line.metric.startswith("order of")]
    assert len({line.metric for line in orders}) == 8
    assert {line.series for line in orders} == {"DG < PG", "DG < PMPO float32"}
    kinds = {(variant.reverse, variant.increment, variant.reward) for variant in run.VARIANTS}
    assert len(kinds) == 8


def test_a_fresh_policy_gets_half_of_the_tokens_right(small):
    table = small[1]
    first = table[(table["part"] == "curves") & (table["step"] == table["step"].min())]
    assert 0.3 < first["value"].mean() < 0.6
    assert SMALL.curve_steps in set(table["step"])


def test_the_average_error_weighs_a_point_by_the_steps_before_it():
    table = table_of(
        part="lengths",
        made=[
            Record("lengths", "DG", 10.0, 0, step, 100 * step, 100 * step, "online error", value)
            for step, value in ((10, 1.0), (40, 0.2))
        ],
    )
    found = analysis.averages(table, "lengths", "DG")
    assert_close(found[10.0].mean, (10 * 1.0 + 30 * 0.2) / 40)


def test_the_exponent_is_that_of_a_power_law_seed_by_seed():
    powers = {0: 1.5, 1: 2.5}
    found = {x: {seed: 0.5 * x**k for seed, k in powers.items()} for x in (2.0, 5.0, 20.0)}
    found[5.0][2] = 0.1  # not run at the other settings
    slope = analysis.exponent(found)
    assert_close([slope.mean, slope.se], [2.0, 0.5])
    assert slope.seeds == 2


def sweep(seeds):
    """Records of Figure 9a at full size: average errors of a power law, DG's the flattest."""
    part = "lengths-seeds-0-1"
    powers = {"DG": 1.0, "PG": 1.5, "PMPO float32": 1.3, "PMPO": 1.2}
    made = [
        Record(part, name, x, seed, 10, 1000, 1000, "online error", 0.001 * x ** (k + seed / 20))
        for name, k in powers.items()
        for x in (10.0, 50.0)
        for seed in range(seeds)
    ]
    return analysis.analyse(table_of(made, part=part), STUDY.settings("full", None))


def test_orders_of_exponents_have_errors_and_one_seed_is_too_few():
    def orders(found):
        lines = (line for line in found.headline if line.metric == "order of exponent")
        return {line.series: line.verdict for line in lines}

    assert orders(sweep(3)) == {
        "DG < PG": "matches",
        "DG < PPO": "",
        "DG < PMPO float32": "matches",
    }
    assert orders(sweep(10))["DG < PMPO float32"] == "matches"
    assert orders(sweep(1)) == {"DG < PG": "noisy", "DG < PPO": "", "DG < PMPO float32": "noisy"}
    slopes = [line for line in sweep(3).headline if line.metric.startswith("exponent of")]
    assert_close([line.se for line in slopes], [0.05 / math.sqrt(3)] * len(slopes))


def test_numbers_of_fitted_figures_are_marked():
    numbers = [line for line in sweep(3).headline if line.metric == "online error at the end"]
    known = {line.series: line.against for line in numbers if line.expected is not None}
    assert known == {"DG": "fitted", "PG": "fitted", "PMPO float32": "fitted", "PPO": ""}
