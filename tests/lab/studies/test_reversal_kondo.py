import math

import pytest

from kondo_lab import progress
from kondo_lab.part import Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.reversal_kondo import STUDY, analysis
from kondo_lab.studies.reversal_kondo.settings import SMALL
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-kondo"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def lengths(values):
    """Records of DG from {(seed, length): errors at steps 1, 2, ...}."""
    return records.frame(
        part="lengths",
        records=[
            Record(
                part="lengths",
                series="DG",
                setting=length,
                seed=seed,
                step=step,
                forward=100 * step,
                backward=100 * step,
                metric="online error",
                value=value,
            )
            for (seed, length), errors in values.items()
            for step, value in enumerate(errors, start=1)
        ],
    )


def test_every_figure_is_drawn(small):
    assert list(small[0].figures) == [
        "fig8-learning-curves",
        "fig10-lengths",
        "fig10-slow",
        "speed-up-by-backward-cost",
        "vocabularies",
    ]


def test_both_gates_pay_for_less_than_everything_and_the_exact_count_for_no_more_than_its_rate(
    small,
):
    table = small[1]
    ends = table[(table["part"] == "curves") & (table["step"] == SMALL.num_steps)]
    paid = ends.groupby("series")["backward"].max()
    assert paid["DG"] == paid["PMPO"] == SMALL.num_steps * 100
    assert paid["DG-K 3%, exact count"] <= SMALL.num_steps * 3
    assert paid["DG-K 3%, exact count"] <= paid["DG-K 3%"] < paid["DG-K price 0"]
    assert paid["DG-K price 0"] < SMALL.num_steps * 100


def test_what_was_tried_is_in_the_table(small):
    series = {line.series for line in small[0].headline}
    assert {"PMPO alpha 0.5 beta 0.1", "DG-K 3% lr 0.002"} <= series


def test_a_length_is_solved_by_the_mean_so_far_or_by_the_moment():
    table = lengths({(0, 10): [0.4, 0.0], (0, 20): [0.9, 0.1], (0, 30): [0.9, 0.9]})
    now = analysis.longest(table, "DG", 200, average=False)
    so_far = analysis.longest(table, "DG", 200, average=True)
    assert_close(now.mean, 20 + 10 * (0.25 - 0.1) / (0.9 - 0.1))
    assert_close(so_far.mean, 10 + 10 * (0.25 - 0.2) / (0.5 - 0.2))


def test_a_seed_below_the_shortest_length_makes_no_mean():
    table = lengths(
        {(0, 10): [0.1], (0, 20): [0.9], (1, 10): [0.8], (1, 20): [0.9]},
    )
    assert analysis.longest(table, "DG", 100, average=False) is None


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
